"""Accuracy of losses, weights and aggregation against float64 references, gradients too.

The references are written from the papers, one completion at a time, with Python floats for what
is not differentiated. "As close as torch" means: at most twice the error that the same reference
has in float32.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trainer import TrainerConfig
from trainer.correction import correct
from trainer.loss import Denominators
from trainer.objective import Given, objective

LENGTHS = [5, 1, 9, 3, 7]
ADVANTAGES = [1.2, -0.7, -1.5, 0.4, 0.0]
MASKED = [False, False, True, False, False]
TOKENS = sum(LENGTHS)
COUNTED = [n for n, masked in zip(LENGTHS, MASKED, strict=True) if not masked]


def columns(seed: int = 0) -> dict[str, Tensor]:
    """Log-probabilities whose ratios fall inside and outside every clip width in use."""
    generator = torch.Generator().manual_seed(seed)
    now = -3 * torch.rand(TOKENS, generator=generator) - 0.01
    noise = [torch.randn(TOKENS, generator=generator) for _ in range(3)]
    return {
        "now": now,
        "behaviour": now + 0.5 * noise[0],
        "old": now + 0.3 * noise[1],
        "reference": now + 0.4 * noise[2],
    }


def spans() -> list[slice]:
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS) + 1)]
    return [slice(*pair) for pair in pairwise(starts)]


def policy_terms(config: TrainerConfig, now: Tensor, old: Tensor, advantage: float) -> Tensor:
    """Losses of one completion's tokens."""
    ratio = (now - old).exp()
    if config.loss == "gspo":
        ratio = (now - old).mean().exp().expand(len(now))
    if config.loss == "cispo":
        return -ratio.detach().clamp(max=config.cispo_cap) * advantage * now
    low, high = 1 - config.clip_low, 1 + config.clip_high
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if config.dual_clip and advantage < 0:
        surrogate = torch.maximum(
            surrogate, torch.full_like(surrogate, config.dual_clip * advantage)
        )
    return -surrogate


def weights_of(config: TrainerConfig, log_ratio: Tensor) -> list[float]:
    logs = log_ratio.double().tolist()
    if config.correction_level != "token":
        total = math.fsum(logs)
        total = total if config.correction_level == "sequence" else total / len(logs)
        logs = [total] * len(logs)
    ratios = [math.exp(min(max(log, -20.0), 20.0)) for log in logs]
    if config.mode == "tis":
        return [min(ratio, config.tis_cap) for ratio in ratios]
    if config.mode == "mis":
        return [r if config.mis_low <= r <= config.mis_high else 0.0 for r in ratios]
    return [1.0] * len(ratios)


def reference_loss(config: TrainerConfig, now: Tensor, data: dict[str, Tensor]) -> Tensor:
    dtype, total = now.dtype, torch.zeros((), dtype=now.dtype)
    for span, advantage, masked in zip(spans(), ADVANTAGES, MASKED, strict=True):
        if masked and config.mask_truncated:
            continue
        behaviour, kept = data["behaviour"][span].to(dtype), data["old"][span].to(dtype)
        old = behaviour if config.mode == "bitwise" else kept
        weight = torch.tensor(weights_of(config, kept - behaviour), dtype=dtype)
        terms = weight * policy_terms(config, now[span], old, advantage)
        if config.beta:
            log_ratio = data["reference"][span].to(dtype) - now[span]
            terms = terms + config.beta * (log_ratio.exp() - log_ratio - 1)
        total = total + terms.sum() / denominator(config, len(terms))
    return total


def denominator(config: TrainerConfig, length: int) -> float:
    lengths = COUNTED if config.mask_truncated else LENGTHS
    if config.aggregation == "token":
        return sum(lengths)
    if config.aggregation == "sequence":
        return len(lengths) * length
    return len(lengths) * config.max_completion_tokens


def spread(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(LENGTHS))


def our_loss(config: TrainerConfig, now: Tensor, data: dict[str, Tensor]) -> Tensor:
    lengths = COUNTED if config.mask_truncated else LENGTHS
    totals = Denominators(len(lengths), sum(lengths))
    counted = [not (masked and config.mask_truncated) for masked in MASKED]
    given = Given(
        lengths=LENGTHS,
        behaviour_N=data["behaviour"],
        kept_N=data["old"],
        age_N=torch.ones(TOKENS, dtype=torch.int64),
        advantage_N=spread(ADVANTAGES),
        counts_N=spread(counted).bool(),
        scale_N=spread([totals.token_scale(config, length) for length in LENGTHS]),
    )
    reference = data["reference"] if config.beta else None
    return objective(config, given, now, torch.zeros(TOKENS), reference)[0]


def value_and_gradient(function, config, data, dtype) -> tuple[Tensor, Tensor]:
    now = data["now"].to(dtype).requires_grad_()
    loss = function(config, now, data)
    (gradient,) = torch.autograd.grad(loss, now)
    return loss.detach().double(), gradient.double()


CASES = {
    "grpo": {"aggregation": "sequence", "clip_high": 0.2},
    "dapo": {"mask_truncated": True},
    "dr_grpo": {"aggregation": "constant", "max_completion_tokens": 12},
    "dual clip": {"dual_clip": 1.3},
    "gspo": {"loss": "gspo", "aggregation": "sequence", "clip_low": 0.01, "clip_high": 0.02},
    "gspo masked": {"loss": "gspo", "mask_truncated": True},
    "cispo": {"loss": "cispo", "cispo_cap": 1.2},
    "reference": {"beta": 0.3, "mask_truncated": True},
    "none": {"mode": "none"},
    "tis token": {"mode": "tis", "tis_cap": 1.1},
    "tis sequence": {"mode": "tis", "correction_level": "sequence"},
    "tis geometric": {"mode": "tis", "correction_level": "geometric", "tis_cap": 1.02},
    "mis token": {"mode": "mis", "mis_low": 0.8, "mis_high": 1.3, "beta": 0.1},
    "mis sequence": {"mode": "mis", "correction_level": "sequence", "mis_low": 0.0, "mis_high": 3},
    "mis geometric": {"mode": "mis", "correction_level": "geometric", "mis_low": 0.9},
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_as_close_to_float64_as_torch(name):
    config, data = TrainerConfig(**CASES[name]), columns()
    loss, gradient = value_and_gradient(our_loss, config, data, torch.float32)
    exact_loss, exact = value_and_gradient(reference_loss, config, data, torch.float64)
    plain_loss, plain = value_and_gradient(reference_loss, config, data, torch.float32)
    assert exact.abs().max() > 0
    assert (loss - exact_loss).abs() <= 2 * max((plain_loss - exact_loss).abs(), 1e-7)
    assert (gradient - exact).abs().max() <= 2 * max((plain - exact).abs().max(), 1e-8)


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
