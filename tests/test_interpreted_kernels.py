"""Masks and indices of the Triton kernels, in Triton's interpreter: no GPU needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = (
    "linear",
    "lora",
    "tiles",
    "rmsnorm",
    "elementwise",
    "embedding",
    "logprob",
    "sample",
    "checksum",
    "optimizer",
    "draw_scored",
    "gated_linear",
    "trained_layer",
    "packed_attention",
    "paged_attention",
    "unconstrained",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("check", CHECKS)
def test_kernel_agrees_with_plain_torch(check: str) -> None:
    folder = Path(__file__).parent
    path = os.pathsep.join((str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")))
    run = subprocess.run(
        [sys.executable, str(folder / "interpreted_checks.py"), check],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
