"""The tests of CPU bits under every instruction set and number of threads: `make matrix`.

    python -m benchmarks.bits_matrix --threads 1 3 --instructions AVX2 --output FILE

Each line of the table is a process of its own, because libraries choose their kernels once. What it
compares is counted where the tests compare; `tests/tally.py` has the sums. More threads than cores
are allowed: they change what is computed by which thread, which is what is asked. An instruction
set that this processor lacks is skipped with the reason.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

PROJECT = Path(__file__).resolve().parent.parent
CONTRACTS = ("test_cpu_products.py", "test_contracts.py", "test_contracts_attention.py")
MODELS = ("test_engine_bits.py", "test_trainer_bits.py", "test_lora_bits.py")
THREADS = (1, 2, 3, 4, 8)
LEVELS = ("DEFAULT", "AVX2", "AVX512")
COUNTED = re.compile(r"^bits: ([\d,]+) values compared, ([\d,]+) differ \((\w+), (\d+) ", re.M)
ENDED = re.compile(r"(\d+) (passed|failed|error|skipped)")


class InstructionSet(NamedTuple):
    """`capability` is torch's name for it, as it gives it when `variables` are set."""

    name: str
    capability: str
    variables: dict[str, str]
    files: tuple[str, ...]


def _set(name: str, capability: str, mkl: str, onednn: str, files: tuple[str, ...]):
    variables = {"MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    variables["ATEN_CPU_CAPABILITY"] = capability.lower()
    return InstructionSet(name, capability, variables, files)


# Without fused multiply-adds in the processor products are slow: the contracts alone.
INSTRUCTION_SETS = (
    _set("SSE4", "DEFAULT", "SSE4_2", "SSE41", CONTRACTS),
    _set("AVX2", "AVX2", "AVX2", "AVX2", (*CONTRACTS, *MODELS)),
    _set("AVX-512", "AVX512", "AVX512", "AVX512_CORE", (*CONTRACTS, *MODELS)),
)


class Cell(NamedTuple):
    instructions: str
    threads: int
    passed: int = 0
    failed: int = 0
    compared: int = 0
    differing: int = 0
    seconds: float = 0.0
    skipped: str = ""
    output: str = ""

    @property
    def holds(self) -> bool:
        """Skipped, or something was compared and nothing differed or failed."""
        proved = self.passed and self.compared and not (self.failed or self.differing)
        return bool(self.skipped or proved)


def lacking(wanted: InstructionSet) -> str:
    """Why this machine cannot run it; empty where it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"{platform.machine()} has no {wanted.name}"
    found = torch.backends.cpu.get_cpu_capability()
    if found not in LEVELS or LEVELS.index(found) < LEVELS.index(wanted.capability):
        return f"this processor has {found} at most"
    return ""


def run_cell(wanted: InstructionSet, threads: int, files: Sequence[str | Path] = ()) -> Cell:
    """The files (the set's own without any) in a process with these instructions and threads."""
    if reason := lacking(wanted):
        return Cell(wanted.name, threads, skipped=reason)
    paths = [str(PROJECT / "tests" / name) for name in files or wanted.files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # MKL, and torch with it, would start with no more threads than cores.
    count = {"OMP_NUM_THREADS": str(threads), "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
    environment = os.environ | wanted.variables | count
    began = time.perf_counter()
    done = subprocess.run(
        [*command, *paths], cwd=PROJECT, env=environment, capture_output=True, text=True
    )
    seconds = round(time.perf_counter() - began, 1)
    return _read(wanted, threads, done.stdout + done.stderr)._replace(seconds=seconds)


def _read(wanted: InstructionSet, threads: int, output: str) -> Cell:
    """What pytest printed last; a process that ran under other settings has failed."""
    ends = {kind: int(count) for count, kind in ENDED.findall(output.rstrip().rpartition("\n")[2])}
    failed = ends.get("failed", 0) + ends.get("error", 0)
    cell = Cell(wanted.name, threads, ends.get("passed", 0), failed, output=output)
    if not (counted := COUNTED.search(output)):
        return cell
    compared, differing = (int(counted[place].replace(",", "")) for place in (1, 2))
    as_asked = (counted[3], int(counted[4])) == (wanted.capability, threads)
    return cell._replace(
        compared=compared, differing=differing, failed=failed + (0 if as_asked else 1)
    )


HEAD = ("instructions", "threads", "passed", "failed", "compared", "differing", "seconds")


def line(cell: Cell) -> str:
    start = f"{cell.instructions:<14}{cell.threads:>8}"
    if cell.skipped:
        return f"{start}  skipped: {cell.skipped}"
    counts = f"{cell.passed:>8}{cell.failed:>8}{cell.compared:>15,}{cell.differing:>11,}"
    return f"{start}{counts}{cell.seconds:>10.1f}"


def table_head() -> str:
    widths = (14, 8, 8, 8, 15, 11, 10)
    first, *others = (f"{name:>{width}}" for name, width in zip(HEAD, widths, strict=True))
    return f"{first.strip():<14}" + "".join(others)


def processor() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", path.read_text()) if path.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def parsed(words: Sequence[str]) -> argparse.Namespace:
    names = [each.name for each in INSTRUCTION_SETS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS))
    parser.add_argument("--instructions", nargs="+", choices=names, default=names)
    parser.add_argument("--files", nargs="+", default=[], help="names of test files, for every set")
    parser.add_argument("--output", type=Path, help="write the table as JSON too")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    options = parsed(words)
    print(f"{processor()}, torch {torch.__version__}")
    print(table_head(), flush=True)
    cells = []
    for wanted in INSTRUCTION_SETS:
        for threads in options.threads if wanted.name in options.instructions else ():
            cells.append(run_cell(wanted, threads, options.files))
            print(line(cells[-1]), flush=True)
            if not cells[-1].holds:
                print(cells[-1].output[-3000:], file=sys.stderr)
    if options.output:
        rows = [{**cell._asdict(), "output": None} for cell in cells]
        rows = [{name: row[name] for name in (*HEAD, "skipped")} for row in rows]
        about = {"processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__}
        options.output.write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")
    return int(not all(cell.holds for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
