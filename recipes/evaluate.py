"""Held-out accuracy, greedy and sampled, in the asked-for form and leniently."""

from collections.abc import Iterable, Mapping
from typing import Any

from recipes.accuracy import Accuracy, average_accuracy, pass_accuracy
from recipes.runtime import Sides
from recipes.settings import RunConfig
from recipes.task import Task
from rollout.request import SamplingParams

FORMS = ("strict", "lenient")
LENIENT_REWARD = "recipes.gsm8k.lenient_reward"


def sampled_kind(samples: int, form: str) -> str:
    """The name of the mean accuracy of samples: `sampled_<form>` of one, `avg@k_<form>` of k."""
    return f"sampled_{form}" if samples == 1 else f"avg@{samples}_{form}"


def rewarded_form(config: RunConfig) -> str:
    """The form whose accuracy the run's reward is after."""
    return "lenient" if LENIENT_REWARD in config.reward_functions else "strict"


def evaluate(sides: Sides, task: Task, config: RunConfig) -> dict[str, Accuracy]:
    """Accuracy of the engine's current weights by kind; empty without held-out problems.

    Kinds are sampled, greedy, each strict and lenient; with k = evaluation.samples above 1, avg@k
    and pass@k take the place of sampled. The run's top_p, top_k and min_p do not apply: it is the
    policy that is measured, not a part of it. The draws depend on the seed only, so evaluations of
    one run differ by the weights alone.
    """
    results: dict[str, Accuracy] = {}
    if task.test is None:
        return results
    for name, temperature in (("sampled", config.temperature), ("greedy", 0.0)):
        count = config.evaluation.samples if name == "sampled" else 1
        params = SamplingParams(
            max_tokens=config.max_tokens,
            temperature=temperature,
            n=count,
            seed=config.seed + 2**40,
        )
        groups = sides.rollout.generate(task.test_prompts, params)
        for form in FORMS:
            right = task.right(groups, strict=form == "strict")
            if count > 1:
                results[sampled_kind(count, form)] = average_accuracy(right)
                results[f"pass@{count}_{form}"] = pass_accuracy(right)
            else:
                results[f"{name}_{form}"] = pass_accuracy(right)
    return results


def as_metrics(results: dict[str, Accuracy]) -> dict[str, Any]:
    """`eval/<kind>` shares with their 95% intervals, for the log."""
    metrics: dict[str, Any] = {}
    for kind, accuracy in results.items():
        low, high = accuracy.interval
        metrics |= {f"eval/{kind}": accuracy.share, f"eval/{kind}/n": accuracy.total}
        metrics |= {f"eval/{kind}/low": low, f"eval/{kind}/high": high}
    return metrics


def best_step(
    evaluations: Iterable[Mapping[str, Any]], samples: int, form: str = "strict"
) -> int | None:
    """The step of the best record of evaluations.jsonl, the first of equals; step 0 does not count.

    Best is the largest accuracy of samples in this form: it varies less than greedy accuracy, and
    is what the reward measures.
    """
    name = f"eval/{sampled_kind(samples, form)}"
    trained = [row for row in evaluations if row["step"] and name in row]
    return max(trained, key=lambda row: (row[name], -row["step"]))["step"] if trained else None
