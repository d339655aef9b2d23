"""What the attestation finds on this machine for given models, and what it takes.

Of each folder: seconds to measure, seconds to take the kept verdict up again in the same process,
the schedules that run, those that were passed over, and every check. Verdicts of earlier runs are
not looked at.

Example: python -m benchmarks.bench_attest recipes/tiny_model SMOLLM2_FOLDER --threads 1 2 \\
    --output benchmarks/results/attest_cpu.json
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_learning import environment
from shared_ops.attest import attest
from shared_ops.model.config import ModelConfig


def measured(folder: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    config = ModelConfig.from_folder(folder)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        start = time.perf_counter()
        report = attest(config)
        first = time.perf_counter() - start
        attest(config)
        again = time.perf_counter() - start - first
    return {
        "model": Path(folder).name,
        "threads": threads,
        "seconds": round(first, 2),
        "seconds_kept": round(again, 4),
        "values": sum(check.values for check in report.checks),
        "differing": sum(check.differing for check in report.checks),
        "passed_over": [vars(check) for check in report.dropped],
        "checks": [[c.op, c.shape, c.values, c.differing] for c in report.checks],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'model':<24} {'threads':>7} {'values':>14} {'differing':>9} {'seconds':>8} {'kept':>7}"
        "  schedules"
    ]
    for row in rows:
        runs = [f"{op.split()[0]} {calls}" for op, calls, *_ in row["checks"] if "against" in op]
        lines.append(
            f"{row['model']:<24} {row['threads']:>7} {row['values']:>14,} {row['differing']:>9,}"
            f" {row['seconds']:>8.2f} {row['seconds_kept']:>7.4f}  {', '.join(runs)}"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_attest")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    given = parser.parse_args(arguments)
    rows = [measured(folder, threads) for folder in given.folders for threads in given.threads]
    print(table(rows))
    if given.output:
        where = environment("cpu", given.commit)
        given.output.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    return int(any(row["differing"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
