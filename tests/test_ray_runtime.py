"""Behaviour under Ray: actors give the inline run's bits, and missing resources fail in seconds."""

import dataclasses
import json
import time
from dataclasses import replace

import pytest

from recipes.command_line import parse
from recipes.grpo_gsm8k import main
from tests.test_recipe import SMALL, lines, without_timings

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        ((), "model"),
        pytest.param(("--lora.rank", "4"), "adapter_model", marks=pytest.mark.slow),
    ],
)
def test_actors_give_the_inline_runs_lines_and_weights(tmp_path, flags, file):
    for runtime in ("inline", "ray"):
        words = [*SMALL, *flags, "--steps", "2", "--runtime", runtime]
        assert main([*words, "--out", str(tmp_path / runtime)]) == 0
    first, second = tmp_path / "inline", tmp_path / "ray"
    for name in ("metrics.jsonl", "completions.jsonl", "evaluations.jsonl"):
        assert without_timings(first / name) == without_timings(second / name)
    weights = [run / f"checkpoints/step-000002/{file}.safetensors" for run in (first, second)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_actors_draw_while_the_trainer_steps_and_every_stale_token_is_proved(tmp_path):
    words = [*SMALL, "--steps", "3", "--evaluation.problems", "0", "--runtime", "ray"]
    assert main([*words, "--max-lag", "2", "--lag-share", "1", "--out", str(tmp_path)]) == 0
    rows, completions = (lines(tmp_path / f"{name}.jsonl") for name in ("metrics", "completions"))
    for row in rows:
        tokens = sum(one["tokens"] for one in completions if one["step"] == row["step"])
        stale = row["parity/lag_rescored_compared"]
        assert row["parity/tokens_compared"] + stale == tokens > 0
        assert row["parity/tokens_differing"] == row["parity/lag_rescored_differing"] == 0
    assert sum(row["parity/lag_rescored_compared"] for row in rows) > 0


@pytest.mark.slow
def test_sharded_trainer_ranks_give_the_lines_and_weights_of_whole_ones(tmp_path):
    words = [*SMALL, "--steps", "2", "--evaluation.problems", "0", "--runtime", "ray"]
    words += ["--trainer-ranks", "2", "--updates-per-batch", "2"]
    for kind in ("none", "full"):
        assert main([*words, "--trainer.sharding", kind, "--out", str(tmp_path / kind)]) == 0
    whole, sharded = tmp_path / "none", tmp_path / "full"
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert without_timings(whole / name) == without_timings(sharded / name)
    for row in lines(sharded / "metrics.jsonl"):
        assert row["parity/tokens_compared"] > 0 and row["parity/tokens_differing"] == 0
    weights = [run / "checkpoints/step-000002/training.safetensors" for run in (whole, sharded)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_other_ops_on_one_side_are_seen_by_sharded_ranks_which_name_the_op(
    tmp_path, capsys, monkeypatch
):
    from recipes import runtime

    real, hook = runtime._runtime_env, "tests.reordered.install"
    with_hook = lambda address: real(address) | {"worker_process_setup_hook": hook}  # noqa: E731
    monkeypatch.setattr(runtime, "_runtime_env", with_hook)
    words = [*SMALL, "--rollout.no-exact", "--runtime", "ray", "--evaluation.problems", "0"]
    words += ["--trainer-ranks", "2", "--trainer.sharding", "full", "--updates-per-batch", "2"]
    assert main([*words, "--out", str(tmp_path / "broken")]) == 1
    error = capsys.readouterr().err
    assert "tokens differ between sampler and trainer" in error
    assert "op to look at: layer 0" in error


def test_a_resumed_run_takes_what_is_left_out_from_the_run(tmp_path, monkeypatch):
    out = tmp_path / "run"
    words = ["--evaluation.problems", "0", "--temperature", "0.9", "--lora.rank", "2"]
    assert main([*SMALL, "--steps", "2", *words, "--out", str(out)]) == 0
    before = json.loads((out / "config.json").read_text())
    assert main(["--out", str(out), "--resume", "auto", "--steps", "3"]) == 0
    assert [row["step"] for row in lines(out / "metrics.jsonl")] == [1, 2, 3]
    monkeypatch.chdir(tmp_path)
    found = parse(["--resume", str(out), "--runtime", "inline"])
    settings = json.loads(json.dumps(dataclasses.asdict(found)))
    assert {name: settings[name] for name in before} == before


def test_missing_resources_fail_in_seconds_and_name_need_and_have(monkeypatch):
    import ray

    from recipes import models, runtime

    config = parse([*SMALL, "--runtime", "ray"])
    config = replace(config, device="cuda", rollout=replace(config.rollout, device="cuda"))
    folder = models.local_folder(config.model, models.EMBEDDED_MODEL)
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False)
    try:
        began = time.monotonic()
        with pytest.raises(runtime.RuntimeSetupError, match=r"GPU: needs 1, has 0"):
            runtime._actors(config, folder)
        assert time.monotonic() - began < 10
    finally:
        ray.shutdown()
