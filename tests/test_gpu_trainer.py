"""Bits of the trainer on a GPU: gradients in every way of recomputing."""

from __future__ import annotations

import pytest
import torch
from gpu import needs_gpu, same_bits
from toy_models import toy_folder
from train_samples import unscored

from trainer import LoraConfig, Trainer, TrainerConfig
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
