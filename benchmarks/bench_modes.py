"""Ways of living with a sampler that is not the trainer, over several seeds.

    python -m benchmarks.bench_modes [--seeds 5] [--steps 60] [--learning-rate 1e-3] [--arms ...]

Every arm trains the tiny model on the same problems with the same seeds, so the first batch asks
the same prompts everywhere; rewards of later batches depend on what was learnt. The arms differ in
the sampler (this project's ops, or torch's ordinary ops with weights rounded to float8) and in what
the trainer does about it. Accuracy is that of the trainer's own weights, drawn by an exact engine
in every arm, so that it compares policies and not samplers. Prints a table and writes
benchmarks/results/modes_cpu.json after each run.
"""

import argparse
import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.command_line import parse
from recipes.evaluate import evaluate
from recipes.grpo_gsm8k import run
from recipes.settings import RunConfig

RESULTS = Path(__file__).resolve().parent / "results" / "modes_cpu.json"
FLOAT8 = ("--sampler-precision", "float8_e4m3fn")
ARMS: dict[str, tuple[str, ...]] = {
    "bitwise": ("--mode", "bitwise"),
    "none": ("--mode", "none", *FLOAT8),
    "tis": ("--mode", "tis", *FLOAT8),
    "mis": ("--mode", "mis", *FLOAT8),
    "none, float32": ("--mode", "none"),
}
KEPT = {
    "reward": "reward",
    "kl": "kl/sampler_trainer",
    "effective_sample_size": "sampling/effective_sample_size",
    "limited": "sampling/limited_share",
    "clipped": "clip_ratio/region_mean",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "tokens_compared": "parity/tokens_compared",
    "tokens_differing": "parity/tokens_differing",
}
# Two-sided 95% points of Student's t, by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def settings(arm: str, seed: int, steps: int, common: Sequence[str]) -> RunConfig:
    """The run of one arm and seed."""
    words = ["--preset", "tiny", "--runtime", "inline", "--device", "cpu", "--threads", "1"]
    words += ["--seed", str(seed), "--steps", str(steps), "--save-every", str(steps)]
    return parse([*words, *common, *ARMS[arm]])


def measure(config: RunConfig) -> dict[str, Any]:
    """One run: its steps' numbers, and accuracies before and after."""
    from dataclasses import replace

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        blind = replace(config, out=str(out), evaluation=replace(config.evaluation, problems=0))
        with contextlib.redirect_stdout(io.StringIO()):
            files = run(blind)
            after = accuracy(config, out / "checkpoints" / f"step-{config.steps:06d}")
            before = accuracy(config, None)
        rows = [json.loads(line) for line in Path(files["metrics"]).read_text().splitlines()]
    curves = {short: [_short(row[name]) for row in rows] for short, name in KEPT.items()}
    return {"steps": curves, "before": before, "after": after}


def _short(value: float | None) -> float | None:
    """Five significant digits: enough for a picture; 0 stays 0."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def accuracy(config: RunConfig, folder: Path | None) -> dict[str, tuple[int, int]]:
    """Right answers and answers of a model folder's weights (None: the initial model's)."""
    from dataclasses import replace

    from recipes.models import local_folder
    from recipes.runtime import Sides
    from recipes.task import load_task
    from rollout.actor import RolloutActor

    home = local_folder(config.model, Path("."))
    engine = RolloutActor(folder or home, replace(config.rollout, exact=True), config.threads)
    results = evaluate(Sides(engine, None), load_task(config, home), config)
    return {
        kind: (one.correct, one.total) for kind, one in results.items() if kind.endswith("strict")
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% interval over seeds (Student's t); infinite for one seed."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    half = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Of one arm's runs, each number of the table for every seed."""
    table: dict[str, list[float]] = {
        "reward, last 10 steps": [statistics.fmean(r["steps"]["reward"][-10:]) for r in runs],
        "lowest reward, last half": [
            min(r["steps"]["reward"][len(r["steps"]["reward"]) // 2 :]) for r in runs
        ],
        "largest kl": [max(r["steps"]["kl"]) for r in runs],
        "least sample size": [min(r["steps"]["effective_sample_size"]) for r in runs],
        "limited": [statistics.fmean(r["steps"]["limited"]) for r in runs],
    }
    for kind in ("sampled_strict", "greedy_strict"):
        table[f"{kind}, after"] = [r["after"][kind][0] / r["after"][kind][1] for r in runs]
    return table


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """One line an arm; mean and half-width over seeds."""
    lines, head = [], ""
    for arm, runs in results.items():
        numbers = summary(list(runs.values()))
        head = f"{'arm':<16}{'seeds':>6}" + "".join(f"{name:>27}" for name in numbers)
        cells = ("{:.4g} +- {:.2g}".format(*interval(values)) for values in numbers.values())
        lines.append(f"{arm:<16}{len(runs):>6}" + "".join(f"{cell:>27}" for cell in cells))
    return [head, *lines]


def main(arguments: Sequence[str]) -> int:
    import torch

    parser = argparse.ArgumentParser(description="Comparison modes over several seeds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", default="1e-3")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="flags of the recipe")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    common = ["--trainer.learning-rate", asked.learning_rate, *asked.more]
    report = {
        "torch": torch.__version__,
        "flags": common,
        "arms": {arm: list(ARMS[arm]) for arm in asked.arms},
        "runs": {arm: {} for arm in asked.arms},
    }
    for seed in range(asked.seeds):
        for arm in asked.arms:
            one = measure(settings(arm, seed, asked.steps, common))
            report["runs"][arm][str(seed)] = one
            print(f"seed {seed}  {arm:<16} {one['steps']['reward'][-1]:.3f}", flush=True)
            asked.out.write_text(json.dumps(report, separators=(",", ":")) + "\n")
    print("\n".join(table(report["runs"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
