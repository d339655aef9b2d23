"""Advantages of groups of completions, in float64 without torch.

A reward of None (the reward function could not judge) is left out of its group's mean and spread
and its advantage is 0. `count_rewards` counts those, and the groups that cannot inform.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

Group = Sequence[float | None]

KINDS = ("group", "centered", "batch", "rloo")
STD_FLOOR = 1e-4


class RewardCounts(NamedTuple):
    """Groups of a batch; `dead` ones have no spread, `missing` counts rewards of None."""

    groups: int
    dead: int
    missing: int


def advantages(groups: Sequence[Group], kind: str = "group") -> list[list[float]]:
    """Advantage of each completion against its own group.

    With r a reward, mean and std those of its group (std with ddof 1), G the judged completions:
    `group` (r - mean) / (std + 1e-4), Shao et al. 2024; `centered` r - mean, Liu et al. 2025
    (Dr. GRPO); `batch` (r - mean) / (std of every reward of the batch + 1e-4); `rloo`
    G / (G - 1) (r - mean), the leave-one-out baseline of Ahmadian et al. 2024.
    One judged completion or equal rewards: 0.

    Args:
        groups: one list of rewards per prompt, None where there is none.
        kind: one of the above.

    Returns:
        Lists of the same lengths.

    Raises:
        ValueError: unknown kind, or a reward that is not finite.
    """
    if kind not in KINDS:
        raise ValueError(f"advantage is {kind!r}; choose one of {', '.join(KINDS)}")
    judged = [_judged(group, index) for index, group in enumerate(groups)]
    batch_std = _std([reward for rewards in judged for reward in rewards])
    return [
        _group_advantages(group, rewards, kind, batch_std)
        for group, rewards in zip(groups, judged, strict=True)
    ]


def is_dead(group: Group) -> bool:
    """Whether every advantage of the group is 0: fewer than two rewards, or all equal."""
    return len({reward for reward in group if reward is not None}) < 2


def count_rewards(groups: Sequence[Group]) -> RewardCounts:
    missing = sum(reward is None for group in groups for reward in group)
    return RewardCounts(len(groups), sum(map(is_dead, groups)), missing)


def _judged(group: Group, index: int) -> list[float]:
    rewards = [float(reward) for reward in group if reward is not None]
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"reward of group {index} is {reward}; return a finite number or None")
    return rewards


def _group_advantages(
    group: Group, judged: list[float], kind: str, batch_std: float
) -> list[float]:
    if is_dead(group):
        return [0.0] * len(group)
    mean = math.fsum(judged) / len(judged)
    scale = _scale(judged, kind, batch_std)
    return [0.0 if reward is None else (reward - mean) * scale for reward in group]


def _scale(judged: list[float], kind: str, batch_std: float) -> float:
    if kind == "group":
        return 1.0 / (_std(judged) + STD_FLOOR)
    if kind == "batch":
        return 1.0 / (batch_std + STD_FLOOR)
    return len(judged) / (len(judged) - 1) if kind == "rloo" else 1.0


def _std(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
