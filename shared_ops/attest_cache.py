"""Where the verdict of an attestation is kept, so that a process need not measure again."""

import functools
import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shared_ops.cuda import require_triton
from shared_ops.model.config import ModelConfig

Verdict = dict[str, Any]


def verdict_path(key: Sequence[str]) -> Path:
    """Under XDG_CACHE_HOME or ~/.cache; `key` holds all that a verdict depends on."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256("|".join(key).encode()).hexdigest()[:32]
    return root / "zerokl" / "attest" / f"{name}.json"


def verdict_of(path: Path, measure: Callable[[], Verdict]) -> Verdict:
    """The verdict in the file, or a new one, which is then put there.

    A file that cannot be read as one is measured again; one that cannot be written costs the next
    process a measurement.
    """
    try:
        return _checked(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        warnings.warn(f"attested anew, since {path} is damaged ({error})", stacklevel=2)
    verdict = json.loads(json.dumps(measure()))
    text = json.dumps({"verdict": verdict, "digest": _digest(verdict)})
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        warnings.warn(f"the attestation's verdict is not kept: {error}", stacklevel=2)
    return verdict


def _checked(found: Any) -> Verdict:
    if not isinstance(found, dict) or found.get("digest") != _digest(found.get("verdict")):
        raise ValueError("its digest is not that of its contents")
    return found["verdict"]


def _digest(verdict: Any) -> str:
    return hashlib.sha256(json.dumps(verdict, sort_keys=True).encode()).hexdigest()


def cuda_key(
    config: ModelConfig, dtype: torch.dtype, seed: int, narrow: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """All that a verdict on the current CUDA device depends on."""
    return [
        torch.cuda.get_device_name(),
        driver_version(),
        torch.__version__,
        require_triton(),
        source_digest(),
        repr(config),
        str(dtype),
        str(seed),
        *map(str, narrow),
    ]


@functools.cache
def source_digest() -> str:
    """Of the files of this package."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return source.hexdigest()


def driver_version() -> str:
    """Of the NVIDIA kernel driver, or torch's CUDA version where that is hidden."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
    return found[0] if found else f"CUDA {torch.version.cuda}"


def processor() -> str:
    """Maker, model and instruction sets of the first core, as the system tells."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return f"{platform.processor()} {platform.machine()}"
    first = path.read_text().split("\n\n")[0]
    fields = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
    pattern = rf"^(?:{'|'.join(fields)}|CPU [a-z]+)\s*:.*$"
    return "\n".join(re.findall(pattern, first, re.MULTILINE)) or platform.machine()


def processor_name() -> str:
    """The model's name in a word or two, for people."""
    found = re.search(r"^model name\s*: (.*)$", processor(), re.MULTILINE)
    return found[1] if found else platform.machine()
