"""Bits of the trainer: scores do not depend on packing, order or mates; training is repeatable."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import differing, differing_in_control
from toy_models import toy_folder
from train_samples import drawn, nudged, unscored

from rollout import Engine, EngineConfig, SamplingParams
from trainer import Trainer, TrainerConfig, TrainSample

FAMILIES = ("llama", "qwen2", "qwen3")
SAMPLES = [
    replace(sample, temperature=(1.0, 0.7, 0.0, 1.5)[index % 4])
    for index, sample in enumerate(unscored(13, seed=1, longest=40))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {family: toy_folder(base / family, family) for family in FAMILIES}


def trainer_of(folder, dtype="float32", **settings) -> Trainer:
    return Trainer(folder, TrainerConfig(dtype=dtype, learning_rate=1e-2, **settings))


def values(scored: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.cat(scored)
    assert flat.numel() and flat.isfinite().all() and flat.unique().numel() > 10
    return flat


def step_on_fresh(trainer: Trainer, seed: int) -> None:
    trainer.step(drawn(trainer, unscored(6, seed=seed)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_do_not_depend_on_packing_order_or_mates(folders, family, dtype):
    trainer = trainer_of(folders[family], dtype)
    step_on_fresh(trainer, seed=5)
    alone = values([trainer.logprobs([sample])[0] for sample in SAMPLES])
    assert differing(values(trainer.logprobs(SAMPLES)), alone) == 0
    backwards = trainer.logprobs(SAMPLES[::-1])[::-1]
    assert differing(values(backwards), alone) == 0
    for budget in (1, 50, 97):
        trainer.config = replace(trainer.config, micro_batch_tokens=budget)
        assert differing(values(trainer.logprobs(SAMPLES)), alone) == 0


@pytest.mark.usefixtures("reordered")
def test_ops_in_another_order_do_depend_on_packing(folders):
    """The control: the test above can fail."""
    trainer = trainer_of(folders["llama"], exact=False)
    alone = values([trainer.logprobs([sample])[0] for sample in SAMPLES])
    assert differing_in_control(values(trainer.logprobs(SAMPLES)), alone) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_own_logprobs_hold_before_and_after_steps(folders, family, dtype):
    trainer = trainer_of(folders[family], dtype)
    engine = Engine(folders[family], EngineConfig(dtype=dtype))
    params = SamplingParams(max_tokens=12, n=4, temperature=0.8)
    for turn in range(3):
        manifest, tensors = trainer.publish()
        engine.load_weights(manifest, tensors)
        assert engine.weights_digest() == manifest.digest
        groups = engine.generate([[1, 5, 9], [1, 7, 30 + turn, 12, 4]], params)
        samples = [
            TrainSample(
                prompt_ids=completion.prompt_ids,
                completion_ids=completion.token_ids,
                behaviour_logprobs=completion.logprobs,
                advantage=index - 1.5,
                policy_versions=completion.policy_versions,
                temperature=params.temperature,
                request_id=completion.request_id,
            )
            for group in groups
            for index, completion in enumerate(group)
        ]
        stats = trainer.step(samples)
        total = sum(len(sample.completion_ids) for sample in samples)
        assert (stats.tokens_compared, stats.tokens_differing) == (total, 0)
        assert stats.metrics["kl/sampler_trainer"] == 0.0 and stats.version == turn + 1


def weights_after_steps(folder, threads: int = 1, **settings) -> tuple[str, list[dict]]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trainer = trainer_of(folder, **settings)
        lines = []
        for seed in range(2):
            samples = drawn(trainer, unscored(6, seed=seed))
            lines.append(trainer.step(samples).metrics)
        return trainer.publish()[0].digest, lines
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_repeats_to_the_bit_with_one_and_two_threads(folders, dtype):
    settings = {"dtype": dtype, "micro_batch_tokens": 90, "weight_decay": 0.1}
    first = weights_after_steps(folders["llama"], **settings)
    assert weights_after_steps(folders["llama"], **settings) == first
    assert weights_after_steps(folders["llama"], threads=2, **settings) == first


def test_ratios_of_fresh_samples_are_exactly_one(folders):
    trainer = trainer_of(folders["qwen3"])
    step_on_fresh(trainer, seed=1)
    metrics = trainer.step(drawn(trainer, unscored(6, seed=2))).metrics
    for name in ("min", "mean", "max"):
        assert metrics[f"sampling/importance_sampling_ratio/{name}"] == 1.0
    assert metrics["clip_ratio/region_mean"] == metrics["kl/lag"] == 0.0
    assert metrics["sampling/effective_sample_size"] == 1.0


def test_trace_ends_in_the_scored_logprob_and_equals_the_engines(folders):
    trainer, engine = trainer_of(folders["llama"]), Engine(folders["llama"], EngineConfig())
    sample = replace(SAMPLES[1], temperature=0.7)
    scored = trainer.logprobs([sample])[0]
    for index in (0, len(sample.completion_ids) - 1):
        position = len(sample.prompt_ids) + index
        mine = trainer.trace(sample, position)
        theirs = engine.trace(sample.prompt_ids, sample.completion_ids, position, 0.7)
        assert torch.equal(mine["logprob"], scored[index])
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_one_nudged_bit_is_found_in_any_micro_batch(folders):
    trainer = trainer_of(folders["llama"], mode="none", micro_batch_tokens=60)
    for index in (0, 4, 11):
        samples = drawn(trainer, unscored(12, seed=3))
        value = torch.tensor(samples[index].behaviour_logprobs[0])
        bigger = torch.nextafter(value, torch.tensor(0.0)).item()
        samples[index] = nudged(samples[index], 0, bigger)
        stats = trainer.step(samples)
        assert (stats.tokens_differing, stats.max_ulp) == (1, 1)
