"""Bits: processes with other instructions and other numbers of threads draw and score alike."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from toy_models import toy_folder

from shared_ops.elementary import FUNCTIONS

TESTS = Path(__file__).parent
NAMES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
# What a processor of each generation has; SSE4 knows no fused multiply-add.
INSTRUCTIONS = {
    "all": {},
    "AVX2": dict(zip(NAMES, ("avx2", "AVX2", "AVX2"), strict=True)),
    "SSE4": dict(zip(NAMES, ("default", "SSE4_2", "SSE41"), strict=True)),
}
RUNS = [("all", 1), ("AVX2", 3), ("SSE4", 2)]

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="no x86 processor"
)


def bits_on(instructions: str, threads: int, folder: Path, functions: tuple[str, ...]) -> dict:
    script = [sys.executable, str(TESTS / "on_processor.py"), str(folder), str(threads)]
    environment = os.environ | INSTRUCTIONS[instructions] | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [*script, *functions], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("toy") / "model")


def test_all_bits_agree_where_exp_and_log_are_plain(folder):
    first, *others = (bits_on(*run, folder, FUNCTIONS) for run in RUNS)
    assert sum(map(len, first["drawn"])) == 48
    assert first["scored"] == first["drawn"]
    for other in others:
        assert other["capability"] != first["capability"], "the setting did nothing"
        for name in ("tokens", "drawn", "scored", "facts"):
            assert other[name] == first[name], name


def test_sums_agree_and_each_process_with_itself_whatever_exp_and_log_are(folder):
    found = [bits_on(*run, folder, ()) for run in RUNS]
    assert len({each["facts"]["sums"] for each in found}) == 1
    for each in found:
        assert each["scored"] == each["drawn"]
