"""Where the verdict of a CUDA attestation is kept."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from shared_ops.cuda import require_triton
from shared_ops.model.config import ModelConfig


def verdict_file(
    config: ModelConfig, dtype: torch.dtype, seed: int, narrow: Sequence[tuple[int, int]] = ()
) -> Path:
    """Under XDG_CACHE_HOME or ~/.cache; the name holds all that a verdict depends on."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    parts = [
        torch.cuda.get_device_name(),
        driver_version(),
        torch.__version__,
        require_triton(),
        source.hexdigest(),
        repr(config),
        str(dtype),
        str(seed),
        *map(str, narrow),
    ]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]
    return root / "zerokl" / "attest" / f"{name}.json"


def driver_version() -> str:
    """Of the NVIDIA kernel driver, or torch's CUDA version where that is hidden."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
    return found[0] if found else f"CUDA {torch.version.cuda}"
