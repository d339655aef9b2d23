"""Activation recomputation: the same bits, less kept between forward and backward."""

from __future__ import annotations

import pytest
import torch
from bits import differing
from toy_models import toy_folder
from train_samples import drawn, unscored

from trainer import Trainer, TrainerConfig
from trainer.packing import pack

FAMILIES = ("llama", "qwen2", "qwen3")
LAYERS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: toy_folder(base / name, name, num_hidden_layers=LAYERS) for name in FAMILIES}


def trainer_of(folder, recompute: bool, dtype: str = "float32", **settings) -> Trainer:
    config = TrainerConfig(dtype=dtype, learning_rate=1e-2, recompute=recompute, **settings)
    return Trainer(folder, config)


def backward(trainer: Trainer, later: float = 1.0):
    """Log-probabilities, gradients, bytes kept for the backward, and SwiGLUs run in all.

    later: what the input of a second forward's SwiGLU is multiplied by.
    """
    samples = unscored(9, seed=3, longest=40)
    batch = pack(samples, tuple(range(len(samples))), trainer.ranks.device)
    model, calls = trainer._held.scorer.model, []
    exact = model.ops

    def counted(x):
        calls.append(len(x))
        return exact.swiglu(x * later if len(calls) > LAYERS else x)

    weights = {leaf.untyped_storage().data_ptr() for leaf in trainer._held.weights.leaves()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.ops = exact._replace(swiglu=counted)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs_N, entropy_N = trainer._held.scorer.score(batch)
    weight_N = torch.linspace(-1, 1, len(logprobs_N))
    loss = (logprobs_N * weight_N).sum() + entropy_N.sum()
    gradients = torch.autograd.grad(loss, trainer._held.weights.leaves())
    model.ops = exact
    return logprobs_N.detach(), list(gradients), sum(kept.values()), len(calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_give_the_same_bits(folders, family, dtype):
    logprobs, gradients, kept, calls = backward(trainer_of(folders[family], False, dtype))
    again, other, kept_less, more_calls = backward(trainer_of(folders[family], True, dtype))
    assert differing(again, logprobs) == 0 and logprobs.unique().numel() > 100
    assert len(other) == len(gradients) > LAYERS
    for got, wanted in zip(other, gradients, strict=True):
        assert differing(got, wanted) == 0 and wanted.count_nonzero()
    assert (calls, more_calls) == (LAYERS, 2 * LAYERS)
    assert kept_less < kept / LAYERS


def test_another_second_forward_gives_other_gradients(folders):
    """The control: what the recomputation computes is what the backward uses."""
    trainer = trainer_of(folders["llama"], True)
    logprobs, gradients, *_ = backward(trainer)
    again, other, *_ = backward(trainer, later=1 + 2**-20)
    assert differing(again, logprobs) == 0
    assert sum(differing(a, b) for a, b in zip(gradients, other, strict=True)) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_the_same_with_and_without(folders, dtype):
    def run(recompute: bool) -> tuple[str, list[dict]]:
        trainer = trainer_of(folders["qwen3"], recompute, dtype, micro_batch_tokens=90, beta=0.1)
        lines = [trainer.step(drawn(trainer, unscored(6, seed=seed))).metrics for seed in range(2)]
        return trainer.publish()[0].digest, lines

    assert run(True) == run(False)


def test_the_plan_counts_less_memory(capsys):
    from recipes.grpo_gsm8k import main

    def planned(*flags: str) -> float:
        settings = ("--preset", "tiny", "--device", "cpu", "--trainer.micro-batch-tokens", "65536")
        assert main([*settings, "--dry-run", *flags]) == 0
        return float(capsys.readouterr().out.partition("memory     about ")[2].split()[0])

    assert planned("--trainer.recompute") < planned() - 0.5
    ranks = ("--trainer-ranks", "8")
    assert planned(*ranks, "--trainer.sharding", "full") < planned(*ranks) - 0.05
