"""Ways of living with a sampler that is not the trainer, over several seeds.

    python -m benchmarks.bench_modes [--seeds 3] [--settings edge] [--arms bitwise none]

Every arm trains the tiny model on the same problems with the same seeds, so the first batch asks
the same prompts everywhere; later batches ask the same problems of policies that have parted. The
arms differ in the sampler (bitwise: this project's ops; the others: torch's ordinary ops with the
layers' matrices rounded) and in what the trainer does about it. Accuracy is that of the trainer's
own weights, drawn by an exact engine in every arm: it compares policies and not samplers.

Settings: `edge` has a learning rate at which runs that are on-policy to the bit begin to waver, so
that a small bias has its best chance to show, and weights rounded to float8. `coarse` has the main
job's learning rate and a large mismatch, weights rounded to float4.

Runs that benchmarks/results/modes_cpu.json already holds are not repeated; it is written after each
run, and the table is printed from it.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.command_line import parse
from recipes.evaluate import evaluate
from recipes.grpo_gsm8k import run
from recipes.models import EMBEDDED_MODEL
from recipes.settings import RunConfig

RESULTS = Path(__file__).resolve().parent / "results" / "modes_cpu.json"
ARMS = ("bitwise", "none", "tis", "mis")
SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "edge": {
        "every arm": ("--steps", "40", "--trainer.learning-rate", "1e-3"),
        "other samplers": ("--sampler-precision", "float8_e4m3fn"),
    },
    "coarse": {
        "every arm": ("--steps", "30", "--trainer.learning-rate", "3e-4"),
        "other samplers": ("--sampler-precision", "float4_e2m1fn"),
    },
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


def run_config(setting: str, arm: str, seed: int) -> RunConfig:
    """The run of one setting, arm and seed; only its last checkpoint is kept."""
    words = ["--preset", "tiny", "--runtime", "inline", "--device", "cpu", "--threads", "1"]
    words += ["--seed", str(seed), "--save-every", "1000"]
    words += ["--mode", arm, *SETTINGS[setting]["every arm"]]
    return parse(words + list(SETTINGS[setting]["other samplers"] if arm != "bitwise" else ()))


def measure(config: RunConfig) -> dict[str, Any]:
    """One run: its steps' numbers, and accuracies after it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        blind = replace(config, out=str(out), evaluation=replace(config.evaluation, problems=0))
        with contextlib.redirect_stdout(io.StringIO()):
            files = run(blind)
            after = accuracy(config, out / "checkpoints" / f"step-{config.steps:06d}")
        rows = [json.loads(line) for line in Path(files["metrics"]).read_text().splitlines()]
    curves = {short: [_short(row[name]) for row in rows] for short, name in KEPT.items()}
    return {"steps": curves, "after": after}


def _short(value: float | None) -> float | None:
    """Five significant digits: enough for a picture; 0 stays 0."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def accuracy(config: RunConfig, folder: Path) -> dict[str, tuple[int, int]]:
    """kind -> right answers and all answers of a model folder's weights, by an exact engine."""
    from recipes.runtime import Sides
    from recipes.task import load_task
    from rollout.actor import RolloutActor

    engine = RolloutActor(folder, replace(config.rollout, exact=True), config.threads)
    results = evaluate(Sides(engine, None), load_task(config, folder), config)
    return {kind: (one.correct, one.total) for kind, one in results.items() if "strict" in kind}


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
        head = f"{'arm':<8}{'seeds':>6}" + "".join(f"{name:>27}" for name in numbers)
        cells = ("{:.4g} +- {:.2g}".format(*interval(values)) for values in numbers.values())
        lines.append(f"{arm:<8}{len(runs):>6}" + "".join(f"{cell:>27}" for cell in cells))
    return [head, *lines]


def load() -> dict[str, Any]:
    """What was measured so far: "before" by seed, and "runs" by setting, arm and seed."""
    if RESULTS.exists():
        return json.loads(RESULTS.read_text())
    return {"settings": SETTINGS, "before": {}, "runs": {}}


def add(report: dict[str, Any], setting: str, arm: str, seed: str) -> None:
    """Measure one run unless it is there, and write the file."""
    config = run_config(setting, arm, int(seed))
    if seed not in report["before"]:
        with contextlib.redirect_stdout(io.StringIO()):
            report["before"][seed] = accuracy(config, EMBEDDED_MODEL)
    runs = report["runs"].setdefault(setting, {}).setdefault(arm, {})
    if seed not in runs:
        runs[seed] = measure(config)
        RESULTS.write_text(json.dumps(report, separators=(",", ":")) + "\n")
        print(f"{setting:<8} seed {seed}  {arm:<8} {runs[seed]['after']}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Comparison modes over several seeds")
    parser.add_argument("--seeds", type=int, choices=range(2, 11), default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    asked = parser.parse_args(arguments)
    report = load()
    for setting in asked.settings:
        for seed in range(asked.seeds):
            for arm in asked.arms:
                add(report, setting, arm, str(seed))
        print("\n".join(table(report["runs"][setting])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
