"""Accuracy of AdamW, norm and schedule against float64; bits over thread counts."""

from __future__ import annotations

import math

import pytest
import torch

from trainer import TrainerConfig
from trainer.optimizer import AdamW, fixed_sum, gradient_norm, learning_rate

SHAPES = [(300, 257), (1001,), (64, 1031), (1,)]


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def run_adamw(config: TrainerConfig, steps: int = 4) -> list[torch.Tensor]:
    masters = tensors(0)
    optimizer = AdamW(masters, config)
    for step in range(steps):
        optimizer.step(tensors(step + 1), 1e-2 * (step + 1))
    return masters


def run_torch(config: TrainerConfig, dtype: torch.dtype, steps: int = 4) -> list[torch.Tensor]:
    leaves = [leaf.to(dtype).requires_grad_() for leaf in tensors(0)]
    groups = [
        {"params": [x for x in leaves if x.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [x for x in leaves if x.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config.epsilon, foreach=False)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1)
        for leaf, gradient in zip(leaves, tensors(step + 1), strict=True):
            leaf.grad = gradient.to(dtype)
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_as_close_to_float64_as_torch(decay):
    config = TrainerConfig(weight_decay=decay, beta2=0.99)
    exact, plain = run_torch(config, torch.float64), run_torch(config, torch.float32)
    for mine, wanted, other in zip(run_adamw(config), exact, plain, strict=True):
        error = (mine.double() - wanted).abs().max()
        assert error <= 2 * max((other.double() - wanted).abs().max(), torch.tensor(1e-8))


def test_update_norm_and_sum_have_the_same_bits_with_one_and_two_threads():
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            masters = run_adamw(TrainerConfig(weight_decay=0.1))
            results.append((masters, gradient_norm(tensors(9)), fixed_sum(tensors(5)[0])))
    finally:
        torch.set_num_threads(before)
    (one, *sums_one), (two, *sums_two) = results
    assert sums_one == sums_two
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_gradient_norm_is_the_euclidean_norm():
    values = torch.cat([tensor.double().reshape(-1) for tensor in tensors(3)]).tolist()
    exact = math.sqrt(math.fsum(value * value for value in values))
    assert gradient_norm(tensors(3)) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_norm_shows_what_is_not_finite(bad):
    gradients = tensors(3)
    gradients[1][5] = bad
    assert not math.isfinite(gradient_norm(gradients))


@pytest.mark.parametrize("size", [0, 1, 2, 1023, 1024, 1025, 5000])
def test_fixed_sum_adds_everything_once(size):
    assert fixed_sum(torch.arange(size)) == size * (size - 1) / 2


def test_warmup_rises_from_above_zero_to_the_peak():
    config = TrainerConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_to_the_final_rate():
    common = {"learning_rate": 2.0, "warmup_steps": 2, "total_steps": 12, "final_lr_ratio": 0.1}
    linear = TrainerConfig(schedule="linear", **common)
    cosine = TrainerConfig(schedule="cosine", **common)
    assert learning_rate(linear, 2) == learning_rate(cosine, 2) == pytest.approx(2.0)
    assert learning_rate(linear, 7) == pytest.approx(1.1)
    assert learning_rate(cosine, 7) == pytest.approx(1.1)
    quarter = 0.2 + 1.8 * (1 + math.cos(math.pi * 0.2)) / 2
    assert learning_rate(cosine, 4) == pytest.approx(quarter)
    for config in (linear, cosine):
        assert learning_rate(config, 12) == learning_rate(config, 99) == pytest.approx(0.2)
