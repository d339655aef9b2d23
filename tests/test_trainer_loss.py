"""Accuracy of losses, weights and aggregation against float64 references, gradients too.

The references are in benchmarks/loss_reference.py. "As close as torch" means: at most twice the
error that the same reference has in float32.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from benchmarks.loss_reference import (
    CASES,
    LENGTHS,
    MICRO_BATCHES,
    TOKENS,
    columns,
    our_loss,
    reference_loss,
    spans,
    sum_of_micro_batches,
    value_and_gradient,
)
from trainer import TrainerConfig
from trainer.correction import correct


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_as_close_to_float64_as_torch(name):
    config, data = TrainerConfig(**CASES[name]), columns()
    loss, gradient = value_and_gradient(our_loss, config, data, torch.float32)
    exact_loss, exact = value_and_gradient(reference_loss, config, data, torch.float64)
    plain_loss, plain = value_and_gradient(reference_loss, config, data, torch.float32)
    assert exact.abs().max() > 0
    assert (loss - exact_loss).abs() <= 2 * max((plain_loss - exact_loss).abs(), 1e-7)
    assert (gradient - exact).abs().max() <= 2 * max((plain - exact).abs().max(), 1e-8)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_a_token_does_not_depend_on_the_micro_batches(name):
    config, data = TrainerConfig(**CASES[name]), columns()
    loss, gradient = value_and_gradient(our_loss, config, data, torch.float32)
    for batches in MICRO_BATCHES:
        split = partial(sum_of_micro_batches, batches=batches)
        parts, part = value_and_gradient(split, config, data, torch.float32)
        assert torch.equal(part, gradient)
        assert float(parts) == pytest.approx(float(loss), rel=1e-5)


def test_the_cases_clip_and_limit_something():
    """Otherwise the test above would pass without any clipping."""
    data = columns()
    free = TrainerConfig(clip_low=1.0, clip_high=1e6)
    unclipped = value_and_gradient(our_loss, free, data, torch.float32)[1]
    clipped = value_and_gradient(our_loss, TrainerConfig(), data, torch.float32)[1]
    assert not torch.equal(clipped, unclipped)
    for name in ("tis token", "tis geometric", "mis token", "mis sequence", "mis geometric"):
        config = TrainerConfig(**CASES[name])
        limited = correct(config, data["old"] - data["behaviour"], LENGTHS).limited_T
        assert 0 < limited.sum() < TOKENS, name


def test_a_summed_log_ratio_is_clamped_at_twenty():
    config = TrainerConfig(mode="mis", correction_level="sequence", mis_high=1e12)
    high = correct(config, torch.full((400,), 2.0), [400]).ratio_T
    low = correct(config, torch.full((400,), -2.0), [400]).ratio_T
    assert torch.equal(high, torch.tensor(20.0).exp().expand(400))
    assert torch.equal(low, torch.tensor(-20.0).exp().expand(400))


def test_gradients_stay_finite_where_a_masked_completion_is_not():
    """0 x inf would be NaN: masks select, they do not multiply."""
    config, data = TrainerConfig(mask_truncated=True), columns()
    data["behaviour"][spans()[2]] = -math.inf
    loss, gradient = value_and_gradient(our_loss, config, data, torch.float32)
    assert loss.isfinite() and gradient.isfinite().all()
