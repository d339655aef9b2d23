"""What a step's numbers say is going wrong, with the mend. Each is a sentence, or nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.answers import lenient_answer, strict_answer

MOST_TRUNCATED = 0.5
MOST_DEAD_GROUPS = 0.8


def complaints(
    metrics: Mapping[str, Any], completions: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Name -> sentence for all that is amiss; empty for a healthy step, or one without completions.

    completions: the records that RunLog.step takes.
    """
    checks = {
        "truncated": _truncated(completions),
        "dead groups": _dead_groups(metrics),
        "zero rewards": _zero_rewards(completions),
        "answer form": _answer_form(completions),
        "unjudged": _unjudged(completions),
    }
    return {name: text for name, text in checks.items() if text}


def _truncated(completions) -> str:
    cut = sum(one.get("finish_reason") == "length" for one in completions)
    if cut <= MOST_TRUNCATED * len(completions):
        return ""
    return (
        f"{cut} of {len(completions)} completions were cut off at the token limit "
        "before they ended: raise --max-tokens"
    )


def _dead_groups(metrics) -> str:
    share = metrics.get("frac_reward_zero_std", 0.0)
    if share <= MOST_DEAD_GROUPS:
        return ""
    return (
        f"{share:.0%} of groups have equal rewards and teach nothing: "
        "use easier (or harder) problems, a stronger model, or a larger --group-size"
    )


def _zero_rewards(completions) -> str:
    rewards = [one["reward"] for one in completions if one.get("reward") is not None]
    if not rewards or any(rewards):
        return ""
    return "every reward is 0, so there is nothing to learn from: read completions.jsonl"


def _answer_form(completions) -> str:
    texts = [one.get("completion", "") for one in completions]
    # A reward that was earned without the form does not ask for it.
    if any((one.get("reward") or 0) > 0 for one in completions):
        return ""
    if any(strict_answer(text) is not None for text in texts):
        return ""
    lenient = sum(lenient_answer(text) is not None for text in texts)
    if not lenient:
        return ""
    return (
        f"no completion has an answer after '####', but {lenient} of {len(texts)} hold a number: "
        "the model does not know the form, so ask for it with --instruction"
    )


def _unjudged(completions) -> str:
    rewards = [one["reward"] for one in completions if "reward" in one]
    if not rewards or any(reward is not None for reward in rewards):
        return ""
    return "no completion got a reward (all are None): check the reward functions"
