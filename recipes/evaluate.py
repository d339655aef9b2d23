"""Held-out accuracy, greedy and sampled, in the asked-for form and leniently."""

from collections.abc import Iterable, Mapping
from typing import Any

from recipes.accuracy import Accuracy
from recipes.runtime import Sides
from recipes.settings import RunConfig
from recipes.task import Task
from rollout.request import SamplingParams

KINDS = ("sampled_strict", "sampled_lenient", "greedy_strict", "greedy_lenient")


def evaluate(sides: Sides, task: Task, config: RunConfig) -> dict[str, Accuracy]:
    """Accuracy of the engine's current weights by kind; empty without held-out problems.

    The draws depend on the seed only, so evaluations of one run differ by the weights alone.
    """
    results: dict[str, Accuracy] = {}
    if task.test is None:
        return results
    for name, temperature in (("sampled", config.temperature), ("greedy", 0.0)):
        params = SamplingParams(
            max_tokens=config.max_tokens, temperature=temperature, seed=config.seed + 2**40
        )
        groups = sides.rollout.generate(task.test_prompts, params)
        for form in ("strict", "lenient"):
            results[f"{name}_{form}"] = task.accuracy(groups, strict=form == "strict")
    return results


def as_metrics(results: dict[str, Accuracy]) -> dict[str, Any]:
    """`eval/<kind>` shares with their 95% intervals, for the log."""
    metrics: dict[str, Any] = {}
    for kind, accuracy in results.items():
        low, high = accuracy.interval
        metrics |= {f"eval/{kind}": accuracy.share, f"eval/{kind}/n": accuracy.total}
        metrics |= {f"eval/{kind}/low": low, f"eval/{kind}/high": high}
    return metrics


def best_step(evaluations: Iterable[Mapping[str, Any]]) -> int | None:
    """The step of the best record of evaluations.jsonl, the first of equals; step 0 does not count.

    Best is the largest strict accuracy of samples: it varies less than greedy accuracy, and is what
    the reward measures.
    """
    name = "eval/sampled_strict"
    trained = [row for row in evaluations if row["step"] and name in row]
    return max(trained, key=lambda row: (row[name], -row["step"]))["step"] if trained else None
