"""Accuracy: advantages against numpy in float64. Behaviour: missing and equal rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainer.advantage import advantages, count_rewards

GROUPS = [[0.0, 1.0, 1.0, 0.0, 0.5], [2.0, -1.0, 0.25, 7.0], [3.0, 1.0]]


def reference(group: list[float], kind: str) -> np.ndarray:
    rewards = np.asarray(group, dtype=np.float64)
    centred = rewards - rewards.mean()
    if kind == "group":
        return centred / (rewards.std(ddof=1) + 1e-4)
    if kind == "batch":
        return centred / (np.concatenate([np.asarray(g) for g in GROUPS]).std(ddof=1) + 1e-4)
    if kind == "rloo":
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return rewards - others
    return centred


@pytest.mark.parametrize("kind", ["group", "centered", "batch", "rloo"])
def test_advantages_match_their_definition(kind):
    got = advantages(GROUPS, kind)
    for group, values in zip(GROUPS, got, strict=True):
        np.testing.assert_allclose(values, reference(group, kind), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", ["group", "centered", "batch", "rloo"])
def test_a_missing_reward_is_left_out_of_its_group(kind):
    holes = [[1.0, None, 0.0, None], [0.0, 1.0]]
    whole = [[1.0, 0.0], [0.0, 1.0]]
    (first, hole, second, other), pair = advantages(holes, kind)
    assert [[first, second], pair] == advantages(whole, kind)
    assert hole == other == 0.0
    assert count_rewards(holes) == (2, 0, 2)


@pytest.mark.parametrize("kind", ["group", "centered", "batch", "rloo"])
def test_groups_without_spread_have_advantage_zero_and_are_counted(kind):
    dead = [[0.1] * 7, [1.0], [None, None], [None, 0.3], []]
    assert advantages(dead, kind) == [[0.0] * len(group) for group in dead]
    assert count_rewards(dead) == (5, 5, 3)


def test_other_groups_do_not_change_an_advantage():
    alone = advantages([GROUPS[0]])
    assert advantages(GROUPS)[0] == alone[0]


def test_the_order_of_a_group_does_not_change_an_advantage():
    rewards = [0.1, 0.7, 0.3, 0.9, 1e-9, 123.456]
    straight = advantages([rewards])[0]
    assert advantages([rewards[::-1]])[0] == straight[::-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="reward of group 1"):
        advantages([[0.0, 1.0], [0.0, bad]])


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="advantage is 'best'"):
        advantages(GROUPS, "best")
