"""The main job with exact and with ordinary ops, in one run on one machine.

`python -m benchmarks.bench_main_job [--steps N]` prints a table of medians over the steps and
writes benchmarks/results/main_job_cpu.json. Both sides draw the same prompts with the same seed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from shared_ops.attest_cache import processor_name

PROJECT = Path(__file__).resolve().parent.parent
RESULT = PROJECT / "benchmarks" / "results" / "main_job_cpu.json"
COLUMNS = ("step_time", "tokens_per_second/rollout", "tokens_per_second/train")


def run(mode: str, steps: int) -> dict[str, float]:
    """Medians of a run's steps, the first left out, and its parity counts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / mode
        words = ["--preset", "tiny", "--runtime", "inline", "--device", "cpu", "--mode", mode]
        words += ["--steps", str(steps), "--evaluation.problems", "0", "--out", str(out)]
        command = [sys.executable, "-m", "recipes.grpo_gsm8k", *words]
        subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    medians: dict[str, float] = {
        name: statistics.median(row[name] for row in rows[1:]) for name in COLUMNS
    }
    counts = ("parity/tokens_compared", "parity/tokens_differing")
    return medians | {name: float(sum(row[name] for row in rows)) for name in counts}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="The main job, exact and with ordinary ops")
    parser.add_argument("--steps", type=int, default=8)
    steps = max(2, parser.parse_args(arguments).steps)
    results = {mode: run(mode, steps) for mode in ("bitwise", "none")}
    print(f"{'':<28}{'exact':>14}{'ordinary':>14}{'ratio':>8}")
    for name in results["bitwise"]:
        exact, ordinary = results["bitwise"][name], results["none"][name]
        ratio = f"{exact / ordinary:8.2f}" if ordinary else ""
        print(f"{name:<28}{exact:>14,.2f}{ordinary:>14,.2f}{ratio}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, capture_output=True, text=True
    )
    import torch

    environment = {
        "device": processor_name(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "steps": steps,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
