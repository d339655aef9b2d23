"""From a fresh clone to a result, with nothing but Python and PyPI.

    python3 bootstrap.py run [flags of the recipe]     the main job
    python3 bootstrap.py test [flags of pytest]        the tests

Each makes a virtual environment in .venv (or $ZEROKL_VENV) the first time, with the CPU build of
torch where there is no NVIDIA GPU. Standard library only.
"""

import hashlib
import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

PROJECT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("ZEROKL_VENV", PROJECT / ".venv"))
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
TORCH = "torch==2.13.0"
COMMANDS = {"run": ["-m", "recipes.grpo_gsm8k"], "test": ["-m", "pytest", "-q", "-n", "auto"]}


def install(extras: str) -> None:
    """Make the environment unless it is there, complete, and made from this pyproject.toml."""
    text = (PROJECT / "pyproject.toml").read_bytes() + extras.encode()
    stamp, digest = VENV / "zerokl-installed", hashlib.sha256(text).hexdigest()
    if stamp.exists() and digest in stamp.read_text().split():
        return
    print(f"setting up {VENV} (once, a few minutes)", flush=True)
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    if not has_torch():
        install_torch()
    pip("install", "--quiet", "--editable", f"{PROJECT}{extras}")
    done = stamp.read_text() if stamp.exists() else ""
    stamp.write_text(f"{done}{digest}\n")


def install_torch() -> None:
    """The CPU build where PyPI's own carries CUDA and there is no GPU for it.

    uv knows where the CPU builds are; where it cannot reach them, pip's configured sources decide.
    """
    cuda_by_default = platform.system() == "Linux" and platform.machine() == "x86_64"
    if cuda_by_default and not gpu_present():
        pip("install", "--quiet", "uv")
        uv = [str(PYTHON), "-m", "uv", "pip", "install", "--quiet", "--python", str(PYTHON)]
        environment = os.environ | {"UV_HTTP_RETRIES": "0"}
        got = subprocess.run(
            [*uv, "--torch-backend=cpu", TORCH], env=environment, stderr=subprocess.DEVNULL
        )
        if got.returncode == 0:
            return
        print("the CPU build was not found by uv: asking pip", flush=True)
    pip("install", "--quiet", TORCH)


def has_torch() -> bool:
    return subprocess.run([str(PYTHON), "-c", "import torch"], capture_output=True).returncode == 0


def gpu_present() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command).returncode:
        sys.exit(f"error: pip {' '.join(arguments)} failed (its messages are above)")


def main(words: list[str]) -> int:
    if sys.version_info < (3, 11):
        sys.exit("error: Python 3.11 or newer is needed: run this with python3.11 or newer")
    if not words or words[0] not in COMMANDS:
        print(__doc__)
        return 2
    install("[dev]" if words[0] == "test" else "")
    command = [str(PYTHON), *COMMANDS[words[0]], *words[1:]]
    return subprocess.run(command, cwd=PROJECT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
