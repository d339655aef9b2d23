"""Bits with adapters: the engine's paged decode against the trainer's packed forward, unmerged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from bits import differing, differing_in_control, threads
from engine_runs import LIMITS
from lora_runs import LORA, engine_of, served_samples, take_steps, trainer_of
from reordered import reordered_ops
from toy_models import toy_folder
from train_samples import drawn, unscored

from rollout import Engine, EngineConfig, LoraConfig, SamplingParams
from shared_ops.model.lora_config import TARGETS
from shared_ops.model.weights import make_manifest
from trainer import Trainer, TrainSample

FAMILIES = ("llama", "qwen2", "qwen3")
CONFIGS = {
    "all": LORA,
    "queries and values": LoraConfig(rank=1, alpha=3, target_modules=("v_proj", "q_proj")),
    "mlp, rslora": LoraConfig(rank=5, rslora=True, target_modules=("up_proj", "down_proj")),
    "keys and gate": LoraConfig(rank=16, target_modules=("k_proj", "gate_proj", "o_proj")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {family: toy_folder(base / family, family) for family in FAMILIES}


def compared(
    trainer: Trainer, samples: Sequence[TrainSample], count_wrong=differing
) -> tuple[int, int]:
    """(tokens, tokens whose float32 bits differ from those that the sampler drew with)."""
    scored = torch.cat(trainer.logprobs(samples))
    sampled = torch.tensor([value for sample in samples for value in sample.behaviour_logprobs])
    assert scored.isfinite().all() and scored.unique().numel() > 100
    return len(sampled), count_wrong(scored, sampled)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_logprobs_are_the_trainers_through_updates(folders, family, dtype):
    trainer = trainer_of(folders[family], dtype=dtype)
    engine = engine_of(folders[family], dtype=dtype, page_size=4)
    take_steps(trainer, 1)
    for _ in range(3):
        manifest, tensors = trainer.publish()
        assert all("lora_" in name for name in tensors)
        engine.load_weights(manifest, tensors)
        assert engine.weights_digest() == manifest.digest
        samples = served_samples(engine, turns=1)
        tokens, wrong = compared(trainer, samples)
        assert tokens > 100 and wrong == 0
        stats = trainer.step([sample for sample in samples if sample.temperature])
        assert stats.tokens_compared > 50 and stats.tokens_differing == 0


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_the_engine_change_no_bit(folders, name):
    """Chunked prefill, batch mates, preemption, with and without the prefix cache."""
    trainer = trainer_of(folders["qwen3"])
    take_steps(trainer, 2)
    engine = engine_of(folders["qwen3"], **LIMITS[name])
    engine.load_weights(*trainer.publish())
    tokens, wrong = compared(trainer, served_samples(engine))
    assert tokens > 200 and wrong == 0
    if name == "page pressure":
        assert engine.stats()["preempted"] > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_any_choice_of_targets_and_scale(folders, name):
    trainer = trainer_of(folders["qwen2"], CONFIGS[name])
    engine = engine_of(folders["qwen2"], CONFIGS[name])
    take_steps(trainer, 2)
    engine.load_weights(*trainer.publish())
    tokens, wrong = compared(trainer, served_samples(engine, turns=1))
    assert tokens > 100 and wrong == 0


def test_ops_in_another_order_differ(folders):
    """The control: the tests above can fail."""
    with reordered_ops():
        trainer = trainer_of(folders["llama"], exact=False, mode="none")
        engine = engine_of(folders["llama"], exact=False)
        take_steps(trainer, 2)
        engine.load_weights(*trainer.publish())
        tokens, wrong = compared(trainer, served_samples(engine), differing_in_control)
    assert tokens > 200 and wrong > tokens // 10


def merged(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The base with scale B A added into each weight."""
    tensors = trainer.publish()[1]
    weights = {n: view.clone() for n, view in trainer._held.scorer.model.weights.views().items()}
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            weights[target] += trainer.lora.scale * b @ a
    return weights


def test_weights_merged_on_one_side_differ(folders):
    """The second control: the same function to accuracy, and other bits."""
    trainer, engine = trainer_of(folders["llama"]), Engine(folders["llama"], EngineConfig())
    take_steps(trainer, 2)
    weights = merged(trainer)
    engine.load_weights(make_manifest(2, weights), weights)
    samples = served_samples(engine)
    tokens, wrong = compared(trainer, samples, differing_in_control)
    assert tokens > 200 and wrong > tokens // 10
    scored = torch.cat(trainer.logprobs(samples))
    sampled = torch.tensor([value for sample in samples for value in sample.behaviour_logprobs])
    assert (scored - sampled).abs().max() < 1e-3
    base = Engine(folders["llama"], EngineConfig())
    assert any(
        abs(one - two) > 1e-2
        for mine, others in zip(samples, served_samples(base), strict=True)
        for one, two in zip(mine.behaviour_logprobs, others.behaviour_logprobs, strict=False)
    )


def test_adapters_at_zero_are_the_base(folders):
    """A fresh B is 0, so a run begins as the model that it was given, on both sides."""
    plain = served_samples(Engine(folders["llama"], EngineConfig()), turns=1)
    fresh = served_samples(engine_of(folders["llama"]), turns=1)
    assert [s.behaviour_logprobs for s in plain] == [s.behaviour_logprobs for s in fresh]
    assert compared(trainer_of(folders["llama"]), fresh)[1] == 0


def test_requests_in_flight_go_on_under_new_adapters(folders):
    """Each token's logprob is that of the version it was drawn by, given all tokens so far."""
    trainers = [trainer_of(folders["llama"]) for _ in range(2)]
    for version, trainer in enumerate(trainers):
        take_steps(trainer, 1 + version)
    engine = engine_of(folders["llama"], page_size=4)
    engine.load_weights(*trainers[0].publish())
    for prompt in ([1, 5, 9, 30, 7, 8, 2], [1, 7, 30, 12, 4]):
        engine.add_request(prompt, SamplingParams(max_tokens=30, n=2, ignore_eos=True))
    done = [one for _ in range(12) for one in engine.step()]
    engine.load_weights(*trainers[1].publish())
    while engine.has_work:
        done += engine.step()
    counted = {1: 0, 2: 0}
    for one in done:
        sample = TrainSample(one.prompt_ids, one.token_ids, one.logprobs, 1.0, one.policy_versions)
        by_version = [trainer.logprobs([sample])[0].tolist() for trainer in trainers]
        for place, version in enumerate(one.policy_versions):
            assert one.logprobs[place] == by_version[version - 1][place]
            counted[version] += 1
    assert min(counted.values()) > 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_repeats_to_the_bit_with_one_and_two_threads(folders, dtype):
    digests = []
    for count in (1, 2, 2):
        with threads(count):
            trainer = trainer_of(folders["llama"], dtype=dtype, micro_batch_tokens=90)
            lines = take_steps(trainer, 2)
            digests.append((trainer.publish()[0].digest, lines))
    assert digests[0] == digests[1] == digests[2]


def test_both_sides_show_the_frozen_product_and_the_adapters(folders):
    trainer, engine = trainer_of(folders["llama"]), engine_of(folders["llama"])
    take_steps(trainer, 1)
    engine.load_weights(*trainer.publish())
    (sample,) = drawn(trainer, unscored(1))
    position = len(sample.prompt_ids)
    mine = trainer.trace(sample, position)
    theirs = engine.trace(sample.prompt_ids, sample.completion_ids, position)
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    shown = [name for name in mine if name.startswith("layer 0: linear below")]
    assert len(shown) == 4 and all(any(t in name for name in shown) for t in TARGETS)
