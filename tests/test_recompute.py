"""Activation recomputation: the same bits, less kept between forward and backward."""

from __future__ import annotations

import json

import pytest
import torch
from bits import differing, differing_in_control
from toy_models import toy_folder
from train_samples import drawn, unscored

from recipes.command_line import parse
from recipes.grpo_gsm8k import main
from shared_ops.swiglu import reference as swiglu
from tests.test_recipe import SMALL, lines
from trainer import LoraConfig, Trainer, TrainerConfig
from trainer.packing import pack

FAMILIES = ("llama", "qwen2", "qwen3")
MODES = ("none", "selective", "full")
LAYERS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: toy_folder(base / name, name, num_hidden_layers=LAYERS) for name in FAMILIES}


def trainer_of(folder, recompute, dtype: str = "float32", **settings) -> Trainer:
    config = TrainerConfig(dtype=dtype, learning_rate=1e-2, recompute=recompute, **settings)
    return Trainer(folder, config)


def backward(trainer: Trainer, monkeypatch, later: float = 1.0):
    """Log-probabilities, gradients, bytes kept for the backward, and SwiGLUs run in all.

    later: what the input of a second forward's SwiGLU is multiplied by.
    """
    samples = unscored(9, seed=3, longest=40)
    batch = pack(samples, tuple(range(len(samples))), trainer.ranks.device)
    calls, exact = [], swiglu.forward

    def counted(x):
        calls.append(len(x))
        return exact(x * later if len(calls) > LAYERS else x)

    weights = {leaf.untyped_storage().data_ptr() for leaf in trainer._held.weights.leaves()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(swiglu, "forward", counted)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs_N, entropy_N = trainer._held.scorer.score(batch)
        weight_N = torch.linspace(-1, 1, len(logprobs_N))
        loss = (logprobs_N * weight_N).sum() + entropy_N.sum()
        gradients = torch.autograd.grad(loss, trainer._held.weights.leaves())
    return logprobs_N.detach(), list(gradients), sum(kept.values()), len(calls)


def same_bits(gradients: list, others: list) -> None:
    assert len(others) == len(gradients) > LAYERS
    for got, wanted in zip(others, gradients, strict=True):
        assert differing(got, wanted) == 0 and wanted.count_nonzero()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_give_the_same_bits(folders, family, dtype, monkeypatch):
    found = {
        mode: backward(trainer_of(folders[family], mode, dtype), monkeypatch) for mode in MODES
    }
    logprobs, gradients, kept, calls = found["none"]
    assert logprobs.unique().numel() > 100 and calls == LAYERS
    for mode, share in (("selective", 0.65), ("full", 1 / LAYERS)):
        again, others, kept_less, more_calls = found[mode]
        assert differing(again, logprobs) == 0
        same_bits(gradients, others)
        print(f"{family} {dtype} {mode}: {kept_less / kept:.0%} of {kept:,} bytes kept")
        assert kept_less < kept * share
        assert more_calls == 2 * LAYERS


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_another_second_forward_gives_other_gradients(folders, mode, monkeypatch):
    """The control: what the recomputation computes is what the backward uses."""
    trainer = trainer_of(folders["llama"], mode)
    logprobs, gradients, *_ = backward(trainer, monkeypatch)
    again, other, *_ = backward(trainer, monkeypatch, later=1 + 2**-20)
    assert differing(again, logprobs) == 0
    assert sum(differing_in_control(a, b) for a, b in zip(gradients, other, strict=True)) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("up_proj",), ("o_proj", "v_proj")])
def test_adapters_of_any_products_get_the_same_gradients(folders, family, targets, monkeypatch):
    """The first layer's input has no gradient here: nothing below it is trained."""
    lora = LoraConfig(rank=3, alpha=6, target_modules=targets)
    found = []
    for mode in MODES:
        trainer = trainer_of(folders[family], mode, "bfloat16", lora=lora)
        with torch.no_grad():
            for leaf in trainer._held.weights.leaves():
                leaf += 0.01
        found.append(backward(trainer, monkeypatch))
    for logprobs, gradients, *_ in found[1:]:
        assert differing(logprobs, found[0][0]) == 0
        same_bits(found[0][1], gradients)


def test_ordinary_ops_are_recomputed_whole_or_not_at_all(folders, monkeypatch):
    found = {
        mode: backward(trainer_of(folders["qwen3"], mode, exact=False), monkeypatch)
        for mode in MODES
    }
    assert found["selective"][2] == found["none"][2] > 2 * found["full"][2]
    same_bits(found["none"][1], found["full"][1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_the_same_in_every_mode(folders, dtype):
    def run(recompute: str) -> tuple[str, list[dict]]:
        trainer = trainer_of(folders["qwen3"], recompute, dtype, micro_batch_tokens=90, beta=0.1)
        lines = [trainer.step(drawn(trainer, unscored(6, seed=seed))).metrics for seed in range(2)]
        return trainer.publish()[0].digest, lines

    assert run("full") == run("selective") == run("none")


def test_the_plan_counts_less_memory(capsys):
    def planned(*flags: str) -> float:
        settings = ("--preset", "tiny", "--device", "cpu", "--trainer.micro-batch-tokens", "65536")
        assert main([*settings, "--dry-run", *flags]) == 0
        return float(capsys.readouterr().out.partition("memory     about ")[2].split()[0])

    assert planned("--trainer.recompute") < planned() - 0.3
    assert planned() < planned("--trainer.recompute", "none") - 0.2
    ranks = ("--trainer-ranks", "8")
    assert planned(*ranks, "--trainer.sharding", "full") < planned(*ranks) - 0.05


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), "selective"),
        (("--trainer.recompute",), "full"),
        (("--trainer.recompute", "--trainer.beta", "0"), "full"),
        (("--trainer.no-recompute",), "none"),
        (("--trainer.recompute", "True"), "full"),
        (("--trainer.recompute", "false"), "none"),
        (("--trainer.recompute", "selective"), "selective"),
    ],
)
def test_the_words_of_a_flag_are_still_understood(words, wanted):
    assert parse([*words, "--device", "cpu"]).trainer.recompute == wanted


def test_a_run_from_when_it_was_a_flag_resumes_to_the_same_lines(tmp_path):
    words = [*SMALL, "--evaluation.problems", "0", "--out"]
    found = []
    for name in ("older", "newer"):
        out = tmp_path / name
        assert main([*words, str(out), "--steps", "1"]) == 0
        if name == "older":
            settings = json.loads((out / "config.json").read_text())
            settings["trainer"]["recompute"] = True
            (out / "config.json").write_text(json.dumps(settings))
            assert parse(["--resume", str(out)]).trainer.recompute == "full"
        assert main([*words, str(out), "--steps", "2", "--resume", "auto"]) == 0
        rows = lines(out / "metrics.jsonl")
        found.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert found[0] == found[1] and len(found[0]) == 2
