"""Behaviour of training adapters: what is frozen, published, saved and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lora_runs import LORA, engine_of, take_steps, trainer_of
from test_recipe import SMALL, lines, without_timings
from toy_models import toy_folder
from train_samples import drawn, unscored

from recipes.command_line import parse
from recipes.grpo_gsm8k import main
from rollout import LoraConfig
from shared_ops.model.lora_config import NO_LORA
from shared_ops.model.weights import WeightsError, digest_of
from trainer import CheckpointError

FLAGS = ("--lora.rank", "4", "--lora.target-modules", "q_proj", "v_proj", "down_proj")
RUN = [*SMALL, *FLAGS, "--trainer.learning-rate", "3e-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_stays_as_it_is_and_is_kept_once(folder, dtype):
    trainer = trainer_of(folder, dtype=dtype, beta=0.1)
    base = trainer._held.scorer.model.weights
    assert base.embed_VD.dtype == getattr(torch, dtype)
    assert trainer._held.reference is not None and trainer._held.reference.model.weights is base
    before, manifest = digest_of(base.views()), trainer.publish()[0]
    assert manifest.base == before and manifest.scale == LORA.scale
    first, second = take_steps(trainer, 2)
    assert digest_of(base.views()) == before
    assert not any(leaf.requires_grad for leaf in base.leaves())
    assert trainer.publish()[0].digest != manifest.digest
    assert first["kl"] == 0.0 and second["kl"] > 0
    assert all(master.dtype == torch.float32 for master in trainer.optimizer.masters)
    assert {tuple(m.shape) for m in trainer.optimizer.masters} == {
        *((12, 64), (128, 4), (4, 64), (64, 4), (8, 64), (320, 4), (4, 160)),
    }


def test_no_gradient_of_frozen_weights_is_computed(folder, monkeypatch):
    from shared_ops.linear import reference as linear
    from shared_ops.logprob import reference as logprob

    product, head, asked = linear.backward, logprob.token_logprobs_backward, set()

    def seen(*arguments, needs):
        asked.add(needs[1:])
        return product(*arguments, needs=needs)

    def seen_head(*arguments, needs_head):
        asked.add(needs_head)
        return head(*arguments, needs_head=needs_head)

    monkeypatch.setattr(linear, "backward", seen)
    monkeypatch.setattr(logprob, "token_logprobs_backward", seen_head)
    take_steps(trainer_of(folder), 1)
    assert asked == {(False, False), False}
    take_steps(trainer_of(folder, NO_LORA), 1)
    assert True in asked


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_layers_give_adapters_the_same_gradients(folder, dtype):
    """The first layer's input has no gradient here: nothing below it is trained."""
    plain, again = (trainer_of(folder, dtype=dtype, recompute=flag) for flag in ("none", "full"))
    assert take_steps(plain, 2) == take_steps(again, 2)
    assert plain.publish()[0] == again.publish()[0]
    gradients = again._accumulate(drawn(again, unscored(3)))[1]
    assert all(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_equal_one_save_load_and_two(folder, tmp_path, dtype):
    settings = {"dtype": dtype, "schedule": "cosine", "total_steps": 5, "beta": 0.05}
    whole = trainer_of(folder, **settings)
    wanted = take_steps(whole, 3)
    first = trainer_of(folder, **settings)
    take_steps(first, 1)
    first.save(tmp_path / "step-1", {"row": 17})
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} < names
    assert not {"model.safetensors", "config.json"} & names
    resumed = trainer_of(folder, **settings)
    assert resumed.load(tmp_path / "step-1") == {"row": 17}
    assert take_steps(resumed, 2) == wanted[1:]
    assert resumed.publish()[0] == whole.publish()[0]


def test_checkpoints_of_another_kind_base_or_scale_are_refused(folder, tmp_path):
    trainer_of(folder).save(tmp_path / "adapters")
    trainer_of(folder, NO_LORA).save(tmp_path / "whole")
    other = toy_folder(tmp_path / "other", initializer_range=0.1)
    refused = [
        (trainer_of(folder, NO_LORA), "adapters", "holds adapters, this trainer trains whole"),
        (trainer_of(folder), "whole", "holds whole weights, this trainer trains adapters"),
        (trainer_of(other), "adapters", "adapters of another base model"),
        (trainer_of(folder, replace(LORA, alpha=4)), "adapters", "scaled by 2, this trainer"),
        (trainer_of(folder, LoraConfig(rank=2, alpha=4)), "adapters", "is of another model"),
    ]
    for trainer, name, message in refused:
        before = trainer.publish()[0]
        with pytest.raises(CheckpointError, match=message) as caught:
            trainer.load(tmp_path / name)
        assert trainer.publish()[0] == before and "\n" not in str(caught.value)


def test_publications_of_another_kind_base_or_scale_are_refused(folder, tmp_path):
    engine, trainer = engine_of(folder), trainer_of(folder)
    take_steps(trainer, 1)
    other = toy_folder(tmp_path / "other", initializer_range=0.1)
    refused = [
        (engine, trainer_of(folder, NO_LORA), "are whole and the engine takes adapters"),
        (engine_of(folder, NO_LORA), trainer, "are adapters and the engine takes whole"),
        (engine, trainer_of(other), "adapters of a base with digest"),
        (engine, trainer_of(folder, replace(LORA, alpha=4)), "scaled by 1 and the engine"),
        (engine, trainer_of(folder, LoraConfig(rank=2, alpha=4)), r"has shape \(2, 64\)"),
        (engine, trainer_of(folder, dtype="bfloat16"), "are bfloat16"),
    ]
    for taker, giver, message in refused:
        before = taker.weights_digest()
        with pytest.raises(WeightsError, match=message) as caught:
            taker.load_weights(*giver.publish())
        assert taker.weights_digest() == before and "\n" not in str(caught.value)
    manifest, tensors = trainer.publish()
    with pytest.raises(WeightsError, match="was published"):
        engine.load_weights(replace(manifest, digest="0" * 64), tensors)
    engine.load_weights(manifest, tensors)


def test_the_update_follows_the_advantage(folder):
    trainer = trainer_of(folder)
    take_steps(trainer, 1)
    signs = [1.0, -1.0, 1.0, -1.0]
    samples = [
        replace(sample, advantage=sign)
        for sample, sign in zip(drawn(trainer, unscored(4)), signs, strict=True)
    ]
    before = [values.sum() for values in trainer.logprobs(samples)]
    trainer.step(samples)
    after = [values.sum() for values in trainer.logprobs(samples)]
    assert [float(b > a) * 2 - 1 for a, b in zip(before, after, strict=True)] == signs


def test_stale_tokens_are_proved_under_kept_adapters(folder):
    trainer = trainer_of(folder, keep_versions=3)
    samples = []
    for seed in range(3):
        trainer.publish()
        samples += drawn(trainer, unscored(3, seed=seed))
        take_steps(trainer, 1)
    trainer.publish()
    proved = trainer.with_lag_proof(samples[3:])
    tokens = sum(len(sample.completion_ids) for sample in samples[3:])
    metrics = trainer.step([*proved, *drawn(trainer, unscored(2))]).metrics
    assert metrics["parity/lag_rescored_compared"] == tokens > 20
    assert metrics["parity/lag_rescored_differing"] == 0
    with pytest.raises(ValueError, match="policy version 0 is not kept"):
        trainer.with_lag_proof(samples)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main([*RUN, "--out", str(out)]) == 0
    return out


def test_a_run_with_adapters_compares_every_token(finished):
    rows, completions = lines(finished / "metrics.jsonl"), lines(finished / "completions.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        tokens = sum(one["tokens"] for one in completions if one["step"] == row["step"])
        assert row["parity/tokens_compared"] == tokens > 0
        assert row["parity/tokens_differing"] == 0 and row["kl/sampler_trainer"] == 0.0
    assert [row["step"] for row in lines(finished / "evaluations.jsonl")] == [0, 3]


def test_an_interrupted_run_resumes_to_the_same_lines_and_adapters(finished, tmp_path, monkeypatch):
    from recipes import job

    real = job.Job.finish_step

    def killed_after_one(self, step, *rest):
        real(self, step, *rest)
        if step == 0:
            raise KeyboardInterrupt

    out = tmp_path / "resumed"
    with monkeypatch.context() as patch:
        patch.setattr(job.Job, "finish_step", killed_after_one)
        assert main([*RUN, "--out", str(out)]) == 130
    assert main([*RUN, "--out", str(out), "--resume", "auto"]) == 0
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert without_timings(out / name) == without_timings(finished / name)
    adapters = [f / "checkpoints/step-000003/adapter_model.safetensors" for f in (out, finished)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_a_run_goes_on_from_a_peft_folder(finished, capsys):
    folder = finished / "checkpoints" / "step-000003"
    words = [*SMALL, "--lora.folder", str(folder), "--dry-run"]
    assert main(words) == 0
    assert "rank 4, scale 4, 15,360 trained parameters on q_proj, v_proj, down_proj" in (
        capsys.readouterr().out
    )
    config = parse(words)
    assert config.trainer.lora == config.rollout.lora == config.lora
    assert config.lora.rank == 4


def test_the_plan_counts_adapters_instead_of_masters():
    from recipes.models import EMBEDDED_MODEL
    from recipes.plan import memory_estimate
    from recipes.task import load_task
    from shared_ops.model.config import ModelConfig

    model = ModelConfig.from_folder(EMBEDDED_MODEL)
    whole, lora = parse(SMALL), parse(RUN)
    kept = replace(lora, trainer=replace(lora.trainer, keep_versions=3))
    task = load_task(whole, EMBEDDED_MODEL)
    size, adapters = 4 * model.num_parameters, lora.lora.num_parameters(model)
    bytes_whole, bytes_lora, bytes_kept = (
        memory_estimate(config, model, task) for config in (whole, lora, kept)
    )
    assert bytes_whole - bytes_lora == 3 * size - 5 * 4 * adapters
    assert bytes_kept - bytes_lora == 4 * 4 * adapters


def test_one_sides_own_adapters_are_refused(capsys):
    assert main([*SMALL, "--trainer.lora.rank", "4", "--dry-run"]) == 1
    assert "use --lora, which reaches both sides" in capsys.readouterr().err
    words = [*RUN, "--mode", "none", "--sampler-precision", "bfloat16", "--dry-run"]
    assert main(words) == 1
    assert "rounds whole weights, but with --lora" in capsys.readouterr().err
