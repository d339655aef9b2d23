"""The picture of a run: reward, KL between sampler and trainer, parity, accuracy."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.durable import write_whole

Rows = Sequence[Mapping[str, Any]]
BLUE, ORANGE, GREEN = "#3b6ea5", "#d9822b", "#3f8f5b"
KINDS_SHOWN = 6


def draw_curves(path: Path, steps: Rows, evaluations: Rows) -> None:
    """Writes a PNG from the records of metrics.jsonl and evaluations.jsonl; never half of one.

    Raises ImportError without matplotlib, durable.OutputError where the file cannot be written.
    """
    from matplotlib.figure import Figure  # no pyplot: it would choose a window system

    figure = Figure(figsize=(11, 7), layout="constrained")
    (reward, accuracy), (kl, parity) = figure.subplots(2, 2)
    _reward(reward, steps)
    _accuracy(accuracy, evaluations)
    _kl(kl, steps)
    _parity(parity, steps)
    for axes in (reward, kl, parity):
        axes.set_xlabel("step")
    for axes in (reward, accuracy, kl, parity):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_whole(path, lambda beside: beside.write_bytes(image.getvalue()))


def accuracies(evaluation: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """kind -> (share, low, high) of one record of evaluations.jsonl."""
    kinds = [name[5:] for name in evaluation if name.startswith("eval/") and name.count("/") == 1]
    return {
        kind: (
            evaluation[f"eval/{kind}"],
            evaluation.get(f"eval/{kind}/low", evaluation[f"eval/{kind}"]),
            evaluation.get(f"eval/{kind}/high", evaluation[f"eval/{kind}"]),
        )
        for kind in kinds
    }


def _points(steps: Rows, name: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[name]) for row in steps if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _reward(axes, steps: Rows) -> None:
    at, values = _points(steps, "reward")
    axes.set_title("reward (mean of the step's completions)")
    axes.plot(at, values, color=BLUE, marker="o", markersize=3, alpha=0.5, label="each step")
    if len(values) >= 10:
        window = max(3, len(values) // 10)
        windows = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
        means = [sum(each) / len(each) for each in windows]
        axes.plot(at, means, color=ORANGE, linewidth=2, label=f"mean of the last {window}")
        axes.legend(frameon=False)


def _kl(axes, steps: Rows) -> None:
    at, values = _points(steps, "kl/sampler_trainer")
    axes.set_title("KL(sampler || trainer) (k3 estimate)")
    axes.plot(at, values, color=BLUE, marker="o", markersize=3)
    if not any(values):
        _all_zero(axes, "exactly 0.0 at every step")


def _parity(axes, steps: Rows) -> None:
    at, values = _points(steps, "parity/tokens_differing")
    compared = sum(_points(steps, "parity/tokens_compared")[1])
    axes.set_title(f"tokens whose bits differ: {sum(values):,} of {compared:,}")
    axes.plot(at, values, color=GREEN if not any(values) else ORANGE, marker="o", markersize=3)
    if not any(values):
        _all_zero(axes, "0 at every step")


def _all_zero(axes, text: str) -> None:
    axes.set_ylim(-1, 1)
    axes.set_yticks([0], ["0"])
    axes.text(0.5, 0.6, text, transform=axes.transAxes, ha="center", color="0.35")


def _accuracy(axes, evaluations: Rows) -> None:
    axes.set_title("held-out accuracy, with 95% intervals")
    if not evaluations:
        axes.text(0.5, 0.5, "not evaluated", transform=axes.transAxes, ha="center", color="0.35")
        axes.set_axis_off()
        return
    shown = [evaluations[0]] if len(evaluations) == 1 else [evaluations[0], evaluations[-1]]
    kinds = list(accuracies(shown[-1]))[:KINDS_SHOWN]
    for column, (evaluation, colour) in enumerate(zip(shown, (BLUE, ORANGE), strict=False)):
        _bars(axes, accuracies(evaluation), kinds, column, len(shown), colour, evaluation["step"])
    axes.set_xticks(range(len(kinds)), [kind.replace("_", "\n") for kind in kinds])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(frameon=False, loc="upper left", ncols=2)


def _bars(axes, values, kinds, column, columns, colour, step) -> None:
    width = 0.8 / columns
    label = f"after step {step}" if step else "before"
    for position, kind in enumerate(kinds):
        if kind not in values:
            continue
        share, low, high = values[kind]
        axes.bar(
            position + (column - (columns - 1) / 2) * width,
            share,
            width * 0.92,
            yerr=[[max(0.0, share - low)], [max(0.0, high - share)]],
            color=colour,
            ecolor="0.25",
            capsize=3,
            label=label if position == 0 else None,
        )
