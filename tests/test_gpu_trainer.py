"""Bits of the trainer on a GPU: gradients in every way of recomputing, and the optimiser."""

from __future__ import annotations

import pytest
import torch
from gpu import needs_gpu, randn, same_bits
from toy_models import toy_folder
from train_samples import drawn, unscored

from trainer import LoraConfig, Trainer, TrainerConfig
from trainer.optimizer import AdamW, gradient_norm
from trainer.packing import pack

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    families = ("llama", "qwen2", "qwen3")
    return {name: toy_folder(base / name, name, num_hidden_layers=3) for name in families}


def gradients(folder, recompute: str, dtype: str, **settings) -> list[torch.Tensor]:
    config = TrainerConfig(device="cuda", dtype=dtype, recompute=recompute, **settings)
    trainer = Trainer(folder, config)
    with torch.no_grad():
        for leaf in trainer._held.weights.leaves():
            leaf += 0.01  # so that no B of an adapter is 0
    samples = unscored(30, seed=3, longest=130)
    batch = pack(samples, tuple(range(len(samples))), trainer.ranks.device)
    logprobs_N, entropy_N = trainer._held.scorer.score(batch)
    weight_N = torch.linspace(-1, 1, len(logprobs_N), device="cuda")
    loss = (logprobs_N * weight_N).sum() + entropy_N.sum()
    found = torch.autograd.grad(loss, trainer._held.weights.leaves())
    return [logprobs_N.detach(), *found]


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=8)], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_recomputed_layers_give_the_same_bits(folders, family, dtype, lora):
    wanted = gradients(folders[family], "none", dtype, lora=lora)
    for mode in ("none", "selective", "full"):
        got = gradients(folders[family], mode, dtype, lora=lora)
        assert sum(same_bits(*pair) for pair in zip(got, wanted, strict=True)) > 10_000
    assert all(gradient.count_nonzero() for gradient in wanted)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_steps_are_the_same_in_every_way_and_leave_rounded_masters(folders, family):
    digests = set()
    for mode in ("selective", "selective", "none", "full"):
        config = TrainerConfig(
            device="cuda", dtype="bfloat16", recompute=mode, learning_rate=1e-2, weight_decay=0.1,
            max_grad_norm=0.1, micro_batch_tokens=300,
        )  # fmt: skip
        trainer = Trainer(folders[family], config)
        before = trainer.publish()[0].digest
        for seed in range(2):
            trainer.step(drawn(trainer, unscored(12, seed=seed, longest=60)))
        held = trainer._held
        for leaf, master in zip(held.weights.leaves(), held.masters.leaves(), strict=True):
            same_bits(leaf.detach(), master.bfloat16())
        digests.add(trainer.publish()[0].digest)
        assert before not in digests
    assert len(digests) == 1


SHAPES = [(1,), (1001,), (1024,), (3, 2048), (300, 257), (70, 1031)]


def tensors(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    """One begins 4 bytes after a boundary."""
    found = [randn(*shape, dtype=torch.float32, seed=seed, scale=scale) for shape in SHAPES]
    return [*found, randn(5000, dtype=torch.float32, seed=seed, scale=scale)[1:]]


@pytest.mark.parametrize("copies", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e4])
def test_adamw_in_one_launch_has_the_bits_of_torch_ops(copies, decay, size):
    config, sides = TrainerConfig(weight_decay=decay, beta2=0.99), []
    for _ in range(2):
        masters = tensors(0)
        sides.append(AdamW(masters, config, copies and [x.to(copies) for x in masters]))
    fused, plain = sides
    for step, scale in enumerate((1.0, 0.37, 1.0)):
        gradients = tensors(step + 1, size)
        plain.steps += 1
        numbers = plain._numbers(1e-2 / (step + 1), scale)
        each = plain.masters, [x.clone() for x in gradients], plain.first, plain.second
        for leaf in zip(*each, plain.copies, strict=True):
            plain._step_one(*leaf, numbers)
        fused.step(gradients, 1e-2 / (step + 1), scale)
    compared = 0
    for name in ("masters", "first", "second", *(["copies"] if copies else [])):
        for got, wanted in zip(getattr(fused, name), getattr(plain, name), strict=True):
            compared += same_bits(got, wanted)
    assert compared > 400_000
    assert sum(int(first.count_nonzero()) for first in plain.first) > 100_000


def test_the_gradient_norm_is_exact_and_the_same_each_time():
    gradients = tensors(5)
    norm = gradient_norm(gradients)
    assert norm == gradient_norm(iter(gradients)) == gradient_norm([x.clone() for x in gradients])
    exact = gradient_norm([x.cpu() for x in gradients])
    assert abs(norm - exact) <= 1e-14 * exact
    gradients[3][1, 7] = float("nan")
    assert gradient_norm(gradients) != gradient_norm(gradients)
