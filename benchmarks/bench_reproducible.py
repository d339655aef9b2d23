"""The same run twice, and once killed and resumed: equal byte for byte.

    python -m benchmarks.bench_reproducible [--device cuda] [--steps 20] [--workers 4]

The main job (tiny model, one optimiser step a batch) in processes of their own: twice left alone,
and once killed with SIGKILL right after an optimiser step in the middle, then resumed. Compared are
the digests of every file of the last checkpoint (weights, masters, moments), metrics.jsonl without
its timings, completions.jsonl, evaluations and summary. The control, a run with another seed, must
differ in the first three. Writes benchmarks/results/reproducible_cpu.json, or
reproducible_cuda.json.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.bench_learning import environment
from benchmarks.bench_resume import RESULTS, Kill, killed_and_resumed, outcome, run

PARTS = ("last checkpoint", "metrics", "completions", "evaluations", "summary")
SETTINGS = ("--preset", "tiny", "--runtime", "inline", "--threads", "1")


def kill_in_the_middle(steps: int) -> Kill:
    """When the optimiser has stepped the middle step's masters, and nothing else has seen them."""
    return Kill("in the middle", "trainer.optimizer:AdamW.step", steps // 2 + 1, "after")


def left_alone(scratch: Path, out: str, words: Sequence[str]) -> None:
    """Raises RuntimeError where the run failed."""
    if code := run(scratch, out, words):
        log = (scratch / f"{out}.log").read_text(errors="replace")
        raise RuntimeError(f"run {out} ended with {code}; {log[-500:]}")


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the parts that are not equal."""
    return [name for name in PARTS if one[name] != other[name]]


def run_all(scratch: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Do the four runs, `given.workers` at a time, and compare them.

    Raises:
        RuntimeError: one of them failed, or the control did not differ.
    """
    words = [*SETTINGS, "--device", given.device, "--steps", str(given.steps)]
    words += ["--evaluation.problems", str(given.problems)]
    kill = kill_in_the_middle(given.steps)
    with ThreadPoolExecutor(given.workers) as pool:
        calls = [
            pool.submit(left_alone, scratch, "first", words),
            pool.submit(left_alone, scratch, "second", words),
            pool.submit(killed_and_resumed, scratch, kill, "killed", words),
            pool.submit(left_alone, scratch, "control", [*words, "--seed", "1"]),
        ]
        for call in calls:
            call.result()
    names = ("first", "second", "killed", "control")
    first, second, killed, control = (outcome(scratch / name) for name in names)
    if not set(PARTS[:3]) <= set(differing(first, control)):
        raise RuntimeError(f"the control differs in {differing(first, control)} only: no test")
    metrics = first["metrics"]
    return {
        "environment": environment(given.device, given.commit),
        "settings": words,
        "optimiser_steps": len(metrics),
        "tokens_compared": sum(row["parity/tokens_compared"] for row in metrics),
        "tokens_differing": sum(row["parity/tokens_differing"] for row in metrics),
        "completions": len(first["completions"].splitlines()),
        "completions_sha256": hashlib.sha256(first["completions"].encode()).hexdigest(),
        "last_checkpoint": first["last checkpoint"],
        "killed_at": {"target": kill.target, "call": kill.call},
        "differing": {
            "second run": differing(first, second),
            "killed and resumed": differing(first, killed),
            "control, another seed": differing(first, control),
        },
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", type=int, default=256, help="of each evaluation")
    parser.add_argument("--workers", type=int, default=1, help="runs beside each other")
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results")
    parser.add_argument("--commit", help="default: git's HEAD")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        report = run_all(Path(name), given)
    output = given.output or RESULTS / f"reproducible_{given.device}.json"
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{report['optimiser_steps']} optimiser steps, {report['tokens_compared']:,} tokens"
        f" compared, {report['tokens_differing']} differ"
    )
    for other, parts in report["differing"].items():
        print(f"{other:<24} {', '.join(parts) or 'equal in every part'}")
    wrong = report["differing"]["second run"] + report["differing"]["killed and resumed"]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
