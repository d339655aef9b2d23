"""Bits of stale tokens under the versions that drew them, and what corrects for lag."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from toy_models import toy_folder
from train_samples import drawn, nudged, unscored

from trainer import ParityError, Trainer, TrainerConfig, TrainSample
from trainer.lag import chosen_stale

KEEP = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("model") / "llama")


def trainer_of(folder, **settings) -> Trainer:
    return Trainer(
        folder, TrainerConfig(**{"learning_rate": 1e-2, "keep_versions": KEEP, **settings})
    )


def aged(trainer: Trainer, versions: int = 3) -> list[TrainSample]:
    """Samples of several versions, each published; half of them change version in the middle."""
    samples = []
    for version in range(versions):
        trainer.publish()
        mine = drawn(trainer, unscored(4, seed=version, request_id=""))
        samples += mine
        trainer.step(drawn(trainer, unscored(4, seed=10 + version)))
    trainer.publish()
    half = [_changing_version(trainer, sample) for sample in drawn_by_first(samples)]
    return samples + half


def drawn_by_first(samples: list[TrainSample]) -> list[TrainSample]:
    return [s for s in samples if s.policy_versions[0] == 0 and len(s.completion_ids) > 1]


def _changing_version(trainer: Trainer, sample: TrainSample) -> TrainSample:
    """Its last tokens as the current version would have drawn them after a recomputed prefix."""
    cut = len(sample.completion_ids) // 2
    fresh = trainer.logprobs([sample])[0].tolist()
    tail = len(sample.completion_ids) - cut
    return replace(
        sample,
        behaviour_logprobs=(*sample.behaviour_logprobs[:cut], *fresh[cut:]),
        policy_versions=(*sample.policy_versions[:cut], *[trainer.version] * tail),
    )


def stale_tokens(trainer: Trainer, samples: list[TrainSample]) -> int:
    return sum(v < trainer.version for s in samples for v in s.policy_versions)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", ["device", "cpu", "disk"])
def test_every_stale_token_is_proved_under_the_version_that_drew_it(folder, dtype, place):
    trainer = trainer_of(folder, dtype=dtype, keep_versions_on=place)
    samples = aged(trainer)
    stale = stale_tokens(trainer, samples)
    proved = trainer.with_lag_proof(samples, share=1.0)
    metrics = trainer.step(proved).metrics
    tokens = sum(len(s.completion_ids) for s in samples)
    assert metrics["parity/lag_rescored_compared"] == stale > 100
    assert metrics["parity/tokens_compared"] == tokens - stale > 0
    assert metrics["parity/lag_rescored_differing"] == metrics["parity/tokens_differing"] == 0
    assert metrics["kl/mismatch"] == 0.0 < metrics["kl/lag"]
    ages = [trainer.version - 1 - v for s in samples for v in s.policy_versions]
    found = {age: metrics[f"lag/tokens/{age}"] for age in range(max(ages) + 1)}
    assert found == {age: ages.count(age) for age in range(max(ages) + 1)}


@pytest.mark.usefixtures("reordered")
def test_ops_in_another_order_are_caught_in_stale_tokens(folder):
    """The control: the same tokens, drawn by ops without contracts."""
    exact, other = trainer_of(folder), trainer_of(folder, exact=False)
    exact.publish()
    samples = drawn(other, unscored(24))
    exact.step(drawn(exact, unscored(4, seed=9)))
    with pytest.raises(ParityError, match="tokens differ") as caught:
        exact.with_lag_proof(samples)
    assert caught.value.report.tokens_differing > 0


def test_a_wrong_version_tag_is_caught_and_named(folder):
    trainer = trainer_of(folder)
    samples = aged(trainer)
    wrong = replace(samples[5], policy_versions=[0] * len(samples[5].completion_ids))
    assert samples[5].policy_versions[0] == 1
    with pytest.raises(ParityError, match=r"policy version the one.*\(it says 0\)") as caught:
        trainer.with_lag_proof([*samples[:5], wrong, *samples[6:]])
    assert caught.value.first.sample_index == 5
    assert caught.value.report.tokens_differing == len(wrong.completion_ids)
    future = replace(samples[5], policy_versions=[trainer.version] * len(wrong.completion_ids))
    with pytest.raises(ParityError):
        trainer.step([future, *samples])


def test_one_nudged_stale_token_stops_before_anything_changes(folder):
    trainer = trainer_of(folder)
    samples = aged(trainer)
    samples[7] = nudged(samples[7], 0, -1.5)
    before = trainer.publish()[0].digest
    with pytest.raises(ParityError, match="1 of") as caught:
        trainer.with_lag_proof(samples)
    assert (caught.value.first.sample_index, caught.value.first.position) == (7, 0)
    assert trainer.publish()[0].digest == before


def test_a_share_is_random_repeatable_and_never_empty(folder):
    trainer = trainer_of(folder)
    samples = aged(trainer)
    pairs = len(chosen_stale(samples, trainer.version, 1.0, 0))
    sizes = [len(chosen_stale(samples, trainer.version, 0.3, seed)) for seed in range(200)]
    assert 0.2 * pairs < sum(sizes) / len(sizes) < 0.4 * pairs
    picks = {tuple(chosen_stale(samples, trainer.version, 0.3, seed)) for seed in range(50)}
    assert len(picks) > 40
    assert min(len(chosen_stale(samples, 3, 0.0, seed)) for seed in range(20)) == 1
    assert chosen_stale(samples, 3, 0.3, 5) == chosen_stale(samples, 3, 0.3, 5)
    proved = trainer.with_lag_proof(samples, share=0.3)
    known = sum(value is not None for s in proved for value in s.old_logprobs)
    assert 0 < known < stale_tokens(trainer, samples)


def test_a_difference_of_nothing_compared_is_no_zero(folder):
    trainer = trainer_of(folder, mode="none")
    samples = drawn(trainer, unscored(4))
    trainer.step(samples)
    metrics = trainer.step(samples).metrics
    assert metrics["parity/tokens_compared"] == metrics["parity/lag_rescored_compared"] == 0
    for name in ("kl/sampler_trainer", "kl/mismatch", "sampling/sampling_logp_difference/mean"):
        assert math.isnan(metrics[name])


def test_versions_beyond_the_kept_ones_are_refused_by_name(folder):
    trainer = trainer_of(folder, keep_versions=2)
    with pytest.raises(ValueError, match=r"policy version 0 is not kept .*raise keep_versions"):
        trainer.with_lag_proof(aged(trainer))


def test_versions_are_forgotten_where_the_weights_go_back(folder, tmp_path):
    trainer = trainer_of(folder)
    trainer.save(tmp_path / "start")
    for seed in (1, 2):
        trainer.step(drawn(trainer, unscored(4, seed=seed)))
        trainer.publish()
    trainer.load(tmp_path / "start")
    trainer.step(drawn(trainer, unscored(4, seed=3)))
    trainer.publish()
    samples = drawn(trainer, unscored(4, seed=4))
    trainer.step(drawn(trainer, unscored(4, seed=5)))
    proved = trainer.with_lag_proof(samples)
    assert all(None not in sample.old_logprobs for sample in proved)


def test_a_mistaken_copy_would_be_seen(folder):
    """The control of the kept copies: a copy that is not what was published makes bits differ."""
    trainer = trainer_of(folder)
    samples = aged(trainer)
    kept = trainer._lag.kept._kept[1]
    assert isinstance(kept, list)
    kept[0].mul_(1 + 2**-20)
    with pytest.raises(ParityError):
        trainer.with_lag_proof(samples)


@pytest.mark.parametrize("correction", ["ppo", "decoupled", "tis", "mis"])
def test_fresh_tokens_have_ratio_one_and_nothing_is_clipped(folder, correction):
    trainer = trainer_of(folder, lag_correction=correction)
    metrics = trainer.step(drawn(trainer, unscored(8))).metrics
    for bound in ("min", "mean", "max"):
        assert metrics[f"sampling/importance_sampling_ratio/{bound}"] == 1.0
    assert metrics["clip_ratio/region_mean"] == metrics["sampling/limited_share"] == 0.0
    assert metrics["kl/lag"] == metrics["kl/mismatch"] == 0.0
    assert "lag/tokens/0" not in metrics


def test_the_corrections_agree_on_fresh_tokens_and_part_on_stale_ones(folder):
    """Equal weights after a fresh step, bit for bit; others after a step on old samples."""
    after: dict[str, list[str]] = {"fresh": [], "stale": []}
    for correction in ("ppo", "decoupled", "tis", "mis"):
        trainer = trainer_of(folder, lag_correction=correction, mis_high=1.2, tis_cap=1.1)
        old = drawn(trainer, unscored(8, seed=1))
        trainer.publish()
        trainer.step(drawn(trainer, unscored(8)))
        after["fresh"].append(trainer.publish()[0].digest)
        trainer.step(trainer.with_lag_proof(old))
        after["stale"].append(trainer.publish()[0].digest)
    assert len(set(after["fresh"])) == 1
    assert len(set(after["stale"])) == 4


def test_several_steps_on_a_batch_of_mixed_age_keep_their_proofs(folder):
    trainer = trainer_of(folder, lag_correction="decoupled")
    samples = aged(trainer)
    samples = trainer.with_old_logprobs(trainer.with_lag_proof(samples))
    first, second = trainer.step(samples).metrics, trainer.step(samples).metrics
    tokens = sum(len(s.completion_ids) for s in samples)
    assert first["parity/tokens_compared"] + first["parity/lag_rescored_compared"] == tokens
    assert second["parity/lag_rescored_compared"] == tokens
    assert second["parity/lag_rescored_differing"] == 0
    weights = [torch.tensor(s.proximal_logprobs) for s in samples]
    assert all(weight.isfinite().all() for weight in weights)


def test_lag_corrections_are_refused_outside_bitwise_mode():
    with pytest.raises(ValueError, match="lag_correction is 'decoupled' in mode 'tis'"):
        TrainerConfig(mode="tis", lag_correction="decoupled")
