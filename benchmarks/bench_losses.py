"""Each loss beside its float64 reference: errors of value and gradient, and micro-batches.

    python -m benchmarks.bench_losses

Errors are relative: of the value to itself, of the gradient's worst token to its largest. "float32"
is the same reference run in float32, for scale. The last columns cut the batch into micro-batches
of one completion, and of two and three: tokens whose gradient then has other bits, and the relative
change of the value (a sum in another order). Writes benchmarks/results/losses_cpu.json.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss_reference import (
    CASES,
    MICRO_BATCHES,
    columns,
    our_loss,
    reference_loss,
    sum_of_micro_batches,
    value_and_gradient,
)
from trainer.config import TrainerConfig

RESULTS = Path(__file__).resolve().parent / "results" / "losses_cpu.json"
SEEDS = range(20)
COLUMNS = ("value", "gradient", "value_float32", "gradient_float32", "moved", "value_moved")


def measure(config: TrainerConfig, seed: int) -> dict[str, float]:
    """One row of numbers for one draw of log-probabilities."""
    data = columns(seed)
    exact, exact_2T = value_and_gradient(reference_loss, config, data, torch.float64)
    plain, plain_2T = value_and_gradient(reference_loss, config, data, torch.float32)
    ours, ours_2T = value_and_gradient(our_loss, config, data, torch.float32)
    largest = exact_2T.abs().max()
    row = {
        "value": float((ours - exact).abs() / exact.abs()),
        "gradient": float((ours_2T - exact_2T).abs().max() / largest),
        "value_float32": float((plain - exact).abs() / exact.abs()),
        "gradient_float32": float((plain_2T - exact_2T).abs().max() / largest),
        "moved": 0.0,
        "value_moved": 0.0,
    }
    for batches in MICRO_BATCHES:
        split = partial(sum_of_micro_batches, batches=batches)
        value, gradient_2T = value_and_gradient(split, config, data, torch.float32)
        row["moved"] += float((gradient_2T != ours_2T).any(0).sum())
        row["value_moved"] = max(row["value_moved"], float((value - ours).abs() / exact.abs()))
    return row


def main() -> int:
    rows: list[dict[str, Any]] = []
    print(f"{'loss':<16}" + "".join(f"{name:>18}" for name in COLUMNS))
    for name, settings in CASES.items():
        found = [measure(TrainerConfig(**settings), seed) for seed in SEEDS]
        worst = {column: max(row[column] for row in found) for column in COLUMNS}
        rows.append({"loss": name, "settings": settings, **worst})
        print(f"{name:<16}" + "".join(f"{worst[column]:>18.1e}" for column in COLUMNS))
    report = {"torch": torch.__version__, "draws": len(SEEDS), "worst": rows}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row["moved"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
