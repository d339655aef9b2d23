"""Behaviour of a step: what stops it, what it leaves unchanged, what it counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from toy_models import toy_folder
from train_samples import drawn, nudged, unscored

from trainer import ParityError, Trainer, TrainerConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("model") / "llama")


def trainer_of(folder, **settings) -> Trainer:
    return Trainer(folder, TrainerConfig(**{"learning_rate": 1e-2, **settings}))


def everything(trainer: Trainer) -> list[torch.Tensor]:
    counters = [trainer.version, trainer.steps, trainer.num_tokens, trainer.optimizer.steps]
    working = list(trainer.publish()[1].values())
    state = [tensor.detach().clone() for tensor in trainer._state_tensors().values()]
    return [torch.tensor(counters), *state, *[tensor.clone() for tensor in working]]


def assert_unchanged(trainer: Trainer, before: list[torch.Tensor]) -> None:
    after = everything(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [-1.25, math.nan, -math.inf])
def test_a_differing_token_stops_the_step_before_anything_changes(folder, dtype, value):
    trainer = trainer_of(folder, dtype=dtype, micro_batch_tokens=64)
    trainer.step(drawn(trainer, unscored(5)))
    samples = drawn(trainer, unscored(7, seed=1))
    samples[4] = nudged(samples[4], 0, value)
    samples[6] = nudged(samples[6], 0, value)
    before = everything(trainer)
    with pytest.raises(ParityError, match="2 of") as caught:
        trainer.step(samples)
    assert_unchanged(trainer, before)
    first = caught.value.first
    assert (first.sample_index, first.position, first.request_id) == (4, 0, "request-4")
    assert first.token_id == samples[4].completion_ids[0]
    assert first.trainer == trainer.logprobs([samples[4]])[0][0].item()
    assert caught.value.report.tokens_differing == 2


def test_the_first_difference_is_first_in_sample_order_even_without_a_gradient(folder):
    trainer = trainer_of(folder)
    samples = drawn(trainer, unscored(4))
    samples[1] = replace(nudged(samples[1], 0, -1.0), advantage=0.0)
    samples[2] = nudged(samples[2], 0, -1.0)
    with pytest.raises(ParityError) as caught:
        trainer.step(samples)
    assert caught.value.first.sample_index == 1


def test_a_step_without_any_provable_token_stops(folder):
    trainer = trainer_of(folder)
    samples = drawn(trainer, unscored(4))
    trainer.step(samples)
    before = everything(trainer)
    with pytest.raises(ParityError, match="no token could be compared") as caught:
        trainer.step(samples)
    assert caught.value.first is None
    assert_unchanged(trainer, before)


def test_several_steps_on_one_batch_stay_proved_by_old_logprobs(folder):
    trainer = trainer_of(folder)
    samples = trainer.with_old_logprobs(drawn(trainer, unscored(6)))
    trainer.step(samples)
    metrics = trainer.step(samples).metrics
    tokens = sum(len(sample.completion_ids) for sample in samples)
    assert metrics["parity/lag_rescored_compared"] == tokens
    assert metrics["parity/lag_rescored_differing"] == metrics["parity/tokens_compared"] == 0
    assert metrics["kl/lag"] > 0 and metrics["lag/versions_mean"] == 1
    samples[2] = nudged(samples[2], 0, -1.0)
    with pytest.raises(ParityError, match="1 of"):
        trainer.step(samples)


def test_old_logprobs_are_only_taken_of_the_current_version(folder):
    trainer = trainer_of(folder)
    stale = drawn(trainer, unscored(3))
    trainer.step(stale)
    now = trainer.logprobs(stale)
    for sample, values in zip(trainer.with_old_logprobs(stale), now, strict=True):
        assert set(sample.old_logprobs) == {None}
        assert list(sample.proximal_logprobs) == values.tolist()


def test_stale_tokens_are_lag_and_are_counted(folder):
    trainer = trainer_of(folder)
    old = drawn(trainer, unscored(3, seed=1))
    trainer.step(drawn(trainer, unscored(3, seed=2)))
    trainer.step(drawn(trainer, unscored(3, seed=3)))
    fresh = drawn(trainer, unscored(3, seed=4))
    metrics = trainer.step(old + fresh).metrics
    stale_tokens = sum(len(sample.completion_ids) for sample in old)
    fresh_tokens = sum(len(sample.completion_ids) for sample in fresh)
    assert metrics["parity/tokens_compared"] == fresh_tokens
    assert metrics["lag/versions_max"] == 2
    assert metrics["lag/versions_mean"] == 2 * stale_tokens / (stale_tokens + fresh_tokens)
    assert metrics["kl/lag"] > 0 and metrics["kl/sampler_trainer"] == 0.0


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_comparison_modes_count_differences_and_go_on(folder, mode):
    trainer = trainer_of(folder, mode=mode)
    samples = drawn(trainer, unscored(4))
    samples[0] = nudged(samples[0], 0, -0.5)
    stats = trainer.step(samples)
    assert stats.tokens_differing == 1 and stats.version == 1
    assert stats.metrics["kl/sampler_trainer"] > 0
    share = 1 / stats.tokens_compared
    limited = stats.metrics["sampling/limited_share"]
    assert limited == (0 if mode != "mis" else pytest.approx(share))


def test_a_gradient_that_is_not_finite_stops_the_step(folder):
    trainer = trainer_of(folder)
    samples = drawn(trainer, unscored(3))
    samples[1] = replace(samples[1], advantage=1e308)
    before = everything(trainer)
    with pytest.raises(FloatingPointError, match="gradient norm of step 1"):
        trainer.step(samples)
    assert_unchanged(trainer, before)


def test_masked_completions_change_neither_loss_nor_update(folder):
    whole = drawn(trainer_of(folder), unscored(5))
    masked = [*whole[:2], replace(whole[2], truncated=True), *whole[3:]]
    without = [*whole[:2], *whole[3:]]
    digests = []
    for aggregation in ("token", "sequence", "constant"):
        for samples in (masked, without, whole):
            trainer = trainer_of(
                folder,
                mask_truncated=True,
                aggregation=aggregation,
                max_completion_tokens=30,
                micro_batch_tokens=1,
            )
            stats = trainer.step(samples)
            digests.append((stats.loss, stats.metrics["entropy"], trainer.publish()[0].digest))
        with_mask, left_out, kept = digests[-3:]
        assert with_mask == left_out != kept


def gradients(folder, samples, **settings) -> list[torch.Tensor]:
    return trainer_of(folder, **settings)._accumulate(samples)[1]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_does_not_depend_on_micro_batch_size(folder, aggregation):
    samples = drawn(trainer_of(folder), unscored(9))
    settings = {"aggregation": aggregation, "max_completion_tokens": 30}
    whole = gradients(folder, samples, **settings)
    scale = max(gradient.abs().max() for gradient in whole)
    for budget in (1, 70):
        parts = gradients(folder, samples, micro_batch_tokens=budget, **settings)
        difference = max((a - b).abs().max() for a, b in zip(whole, parts, strict=True))
        assert difference <= 1e-6 * scale


def test_an_entropy_bonus_raises_entropy_and_0_asks_for_no_gradient_of_it(folder, monkeypatch):
    from shared_ops.logprob import reference

    real, asked = reference.token_logprobs_backward, []

    def seen(*arguments, **settings):
        asked.append(arguments[-1] is not None)
        return real(*arguments, **settings)

    monkeypatch.setattr(reference, "token_logprobs_backward", seen)
    means = {}
    for coefficient in (0.0, 0.5, -0.5):
        trainer = trainer_of(folder, entropy_coefficient=coefficient, learning_rate=1e-3)
        samples = [replace(s, advantage=0.0) for s in drawn(trainer, unscored(6))]
        samples[0] = replace(samples[0], advantage=1e-6)
        trainer.step(samples)
        means[coefficient] = trainer.step(drawn(trainer, samples)).metrics["entropy"]
    assert asked == [bool(coefficient) for coefficient in means for _ in range(2)]
    assert means[-0.5] < means[0.0] < means[0.5]


def test_the_gradient_of_the_entropy_bonus_does_not_depend_on_micro_batch_size(folder):
    samples = drawn(trainer_of(folder), unscored(9))
    whole, parts = (
        gradients(folder, samples, entropy_coefficient=0.3, micro_batch_tokens=budget)
        for budget in (8192, 1)
    )
    scale = max(gradient.abs().max() for gradient in whole)
    assert max((a - b).abs().max() for a, b in zip(whole, parts, strict=True)) <= 1e-6 * scale


def test_samples_without_advantage_change_only_denominators(folder):
    samples = drawn(trainer_of(folder), unscored(6))
    idle = [replace(sample, advantage=0.0) for sample in samples[3:]]
    trainer = trainer_of(folder, aggregation="sequence", max_grad_norm=0.0)
    stats = trainer.step(samples[:3] + idle)
    alone = trainer_of(folder, aggregation="sequence", max_grad_norm=0.0)
    assert stats.grad_norm == pytest.approx(alone.step(samples[:3]).grad_norm / 2, rel=1e-5)
    assert stats.tokens_compared == sum(len(sample.completion_ids) for sample in samples)


def test_a_batch_of_dead_groups_has_no_gradient(folder):
    trainer = trainer_of(folder)
    digest = trainer.publish()[0].digest
    samples = [replace(sample, advantage=0.0) for sample in drawn(trainer, unscored(4))]
    stats = trainer.step(samples)
    assert (stats.loss, stats.grad_norm, stats.version) == (0.0, 0.0, 1)
    assert trainer.publish()[0].digest == digest


def test_the_update_follows_the_advantage(folder):
    trainer = trainer_of(folder)
    signs = [1.0, -1.0, 1.0, -1.0]
    samples = [
        replace(sample, advantage=sign)
        for sample, sign in zip(drawn(trainer, unscored(4)), signs, strict=True)
    ]
    before = [values.sum() for values in trainer.logprobs(samples)]
    trainer.step(samples)
    after = [values.sum() for values in trainer.logprobs(samples)]
    moved = [float(b - a) for a, b in zip(before, after, strict=True)]
    assert [math.copysign(1, move) for move in moved] == signs


def test_the_reference_is_the_initial_model(folder):
    trainer = trainer_of(folder, beta=0.1)
    first = trainer.step(drawn(trainer, unscored(4))).metrics
    second = trainer.step(drawn(trainer, unscored(4))).metrics
    assert first["kl"] == 0.0 and second["kl"] > 0
    assert "kl" not in trainer_of(folder).step(drawn(trainer_of(folder), unscored(4))).metrics


def test_clipping_bounds_what_reaches_the_optimizer(folder):
    trainer = trainer_of(folder, max_grad_norm=0.01, learning_rate=1.0)
    samples = drawn(trainer, unscored(4))
    norm = trainer.step(samples).grad_norm
    assert norm > 0.01
    squares = sum(float(first.double().square().sum()) for first in trainer.optimizer.first)
    assert math.sqrt(squares) == pytest.approx(0.1 * 0.01, rel=1e-5)


REFUSED = {
    "greedy": ({"temperature": 0.0}, "temperature is 0"),
    "from the future": ({"policy_versions": (3,)}, "version 3 is newer"),
    "outside the vocabulary": ({"completion_ids": (115,)}, "token id 115 is not below 113"),
    "too long": ({"prompt_ids": (5,) * 600}, "601 tokens, the model takes 512"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_samples_that_cannot_be_trained_on_are_named(folder, name):
    change, message = REFUSED[name]
    trainer = trainer_of(folder)
    samples = drawn(trainer, unscored(2))
    single = {"completion_ids": (7,), "behaviour_logprobs": (-1.0,), "policy_versions": (0,)}
    samples.append(replace(samples[0], request_id="odd", **single | change))
    before = everything(trainer)
    with pytest.raises(ValueError, match=message) as caught:
        trainer.step(samples)
    assert "'odd' at index 2" in str(caught.value) and "\n" not in str(caught.value)
    assert_unchanged(trainer, before)


def test_an_empty_batch_is_refused(folder):
    with pytest.raises(ValueError, match="samples is empty"):
        trainer_of(folder).step([])


def test_devices_that_are_not_there_are_named(folder):
    with pytest.raises(ValueError, match="device 'abacus' is unknown"):
        trainer_of(folder, device="abacus")


def test_published_tensors_alias_the_weights_and_an_actors_do_not(folder):
    from trainer.actor import TrainerActor

    actor = TrainerActor(folder, TrainerConfig(learning_rate=1e-2))
    _, alias = actor.trainer.publish()
    manifest, copy = actor.publish()
    kept = {name: tensor.clone() for name, tensor in copy.items()}
    actor.step(drawn(actor.trainer, unscored(3)))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(alias[name], kept[name]) and torch.equal(copy[name], kept[name])
    assert copy[name].untyped_storage().nbytes() == copy[name].numel() * 4
    assert (manifest.version, actor.version()) == (0, 1)
