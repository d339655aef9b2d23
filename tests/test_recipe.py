"""Behaviour of the recipe: a small run inline, resumed, with broken parity, and with bad input."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.command_line import parse
from recipes.grpo_gsm8k import main

PROJECT = Path(__file__).resolve().parent.parent
SMALL = [
    *("--preset", "tiny", "--runtime", "inline", "--steps", "3", "--prompts-per-step", "3"),
    *("--group-size", "4", "--max-tokens", "24", "--evaluation.problems", "4"),
    *("--save-every", "1", "--device", "cpu"),
]
TIMINGS = ("time/", "step_time", "tokens_per_second/")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_timings(path: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMINGS)} for row in lines(path)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main([*SMALL, "--out", str(out)]) == 0
    return out


def test_every_sampled_token_is_compared_and_none_differs(finished):
    rows, completions = lines(finished / "metrics.jsonl"), lines(finished / "completions.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        drawn = sum(one["tokens"] for one in completions if one["step"] == row["step"])
        assert row["parity/tokens_compared"] == drawn > 0
        assert row["parity/tokens_differing"] == row["parity/max_ulp"] == 0
        assert row["kl/sampler_trainer"] == 0.0
        assert row["sampling/importance_sampling_ratio/max"] == 1.0


def test_a_second_run_with_two_threads_gives_the_same_lines_and_weights(finished, tmp_path):
    import torch

    out, before = tmp_path / "again", torch.get_num_threads()
    try:
        assert main([*SMALL, "--threads", "2", "--out", str(out)]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for name in ("metrics.jsonl", "completions.jsonl", "evaluations.jsonl"):
        assert without_timings(out / name) == without_timings(finished / name)
    digests = [f / "checkpoints/step-000003/digests.json" for f in (out, finished)]
    assert digests[0].read_bytes() == digests[1].read_bytes()


def test_a_run_writes_what_it_promises(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"metrics.jsonl", "completions.jsonl", "evaluations.jsonl", "curves.png"} <= names
    assert [row["step"] for row in lines(finished / "evaluations.jsonl")] == [0, 3]
    assert len(list((finished / "checkpoints").iterdir())) == 2


def test_the_last_checkpoint_is_a_folder_that_transformers_loads(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished / "checkpoints" / "step-000003"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_an_interrupted_run_resumes_to_the_same_lines_and_weights(finished, tmp_path, monkeypatch):
    from recipes import job

    real = job.Job.finish_step

    def killed_after_two(self, step):
        real(self, step)
        if step == 1:
            raise KeyboardInterrupt

    out = tmp_path / "resumed"
    with monkeypatch.context() as patch:
        patch.setattr(job.Job, "finish_step", killed_after_two)
        assert main([*SMALL, "--out", str(out)]) == 130
    # Lines past the checkpoint, as a kill between two writes leaves them.
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 3}) + "\n")
    assert main([*SMALL, "--out", str(out), "--resume", "auto"]) == 0
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert without_timings(out / name) == without_timings(finished / name)
    weights = [f / "checkpoints/step-000003/model.safetensors" for f in (out, finished)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


FILTERED = ["--filter-groups.enable", "--filter-groups.max-num-gen-batches", "3"]


def test_dynamic_sampling_asks_until_enough_groups_inform_and_resumes(tmp_path, monkeypatch):
    from recipes import job

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main([*SMALL, *FILTERED, "--out", str(whole)]) == 0
    rows, completions = lines(whole / "metrics.jsonl"), lines(whole / "completions.jsonl")
    assert max(row["filter_groups/num_gen_batches"] for row in rows) > 1
    for row in rows:
        mine = [one for one in completions if one["step"] == row["step"]]
        trained = [one for one in mine if one["trained"]]
        groups = [mine[i : i + 4] for i in range(0, len(mine), 4)]
        informing = [g for g in groups if len({one["reward"] for one in g}) > 1]
        assert len(groups) == row["filter_groups/groups_drawn"]
        assert len(groups) == 3 * row["filter_groups/num_gen_batches"]
        assert row["parity/tokens_compared"] == sum(one["tokens"] for one in trained) > 0
        assert row["reward"] == pytest.approx(sum(one["reward"] for one in mine) / len(mine))
        if informing:
            assert trained == [one for group in informing[:3] for one in group]
        if len(informing) < 3:
            assert row["filter_groups/num_gen_batches"] == 3
    real = job.Job.finish_step

    def killed_after_two(self, step):
        real(self, step)
        if step == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job.Job, "finish_step", killed_after_two)
        assert main([*SMALL, *FILTERED, "--out", str(resumed)]) == 130
    assert main([*SMALL, *FILTERED, "--out", str(resumed), "--resume", "auto"]) == 0
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert without_timings(resumed / name) == without_timings(whole / name)
    states = [run / "checkpoints/step-000003/digests.json" for run in (whole, resumed)]
    assert states[0].read_bytes() == states[1].read_bytes()


def test_no_draw_is_used_twice_in_a_step():
    from recipes.asking import sampling

    config = parse(SMALL)
    first, second = (sampling(config, batch, [[1], [2], [1], [1]]) for batch in (5, 6))
    assert [one.first_sample for one in first] == [0, 0, 4, 8]
    assert {one.seed for one in first}.isdisjoint(one.seed for one in second)


def test_reward_functions_are_imported_and_weighed(tmp_path):
    out = tmp_path / "rewards"
    names = ["recipes.gsm8k.correctness_reward", "recipes.gsm8k.boxed_reward"]
    words = ["--reward-functions", *names, "--reward-weights", "0.5", "2", "--steps", "1"]
    assert main([*SMALL, *words, "--evaluation.problems", "0", "--out", str(out)]) == 0
    for one in lines(out / "completions.jsonl"):
        assert (
            one["reward"]
            == 0.5 * one["rewards"]["correctness_reward"] + 2 * (one["rewards"]["boxed_reward"])
        )
    (row,) = lines(out / "metrics.jsonl")
    assert {"rewards/correctness_reward/mean", "rewards/boxed_reward/mean"} <= row.keys()


@pytest.mark.usefixtures("reordered")
def test_other_ops_on_one_side_stop_the_run_and_name_the_op(tmp_path, capsys):
    out = tmp_path / "broken"
    assert main([*SMALL, "--rollout.no-exact", "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert "tokens differ between sampler and trainer" in error
    assert "step-1/prompt-0/sample-0" in error
    assert "op to look at: layer 0" in error
    assert not list(out.glob("checkpoints/*"))


@pytest.mark.usefixtures("reordered")
def test_mode_none_reports_the_difference_and_goes_on(tmp_path):
    out = tmp_path / "none"
    assert main([*SMALL, "--mode", "none", "--steps", "1", "--out", str(out)]) == 0
    (row,) = lines(out / "metrics.jsonl")
    assert row["parity/tokens_differing"] > 0
    assert row["kl/sampler_trainer"] > 0.0


def test_several_updates_see_lag_and_stay_proved(tmp_path):
    out = tmp_path / "lag"
    words = [*SMALL, "--updates-per-batch", "2", "--steps", "1", "--out", str(out)]
    assert main(words) == 0
    (row,) = lines(out / "metrics.jsonl")
    assert row["lag/versions_max"] == 1
    assert row["parity/lag_rescored_compared"] > 0
    assert row["parity/lag_rescored_differing"] == row["parity/tokens_differing"] == 0


def test_the_checkpoint_with_the_best_evaluation_is_kept(tmp_path, monkeypatch):
    from recipes import job
    from recipes.accuracy import Accuracy

    scores = iter([3, 2, 1, 0, 1])
    monkeypatch.setattr(job, "evaluate", lambda *_: {"sampled_strict": Accuracy(next(scores), 4)})
    out = tmp_path / "best"
    words = ["--steps", "4", "--keep-checkpoints", "1", "--evaluation.every", "1"]
    assert main([*SMALL, *words, "--save-every", "3", "--out", str(out)]) == 0
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000004"]
    assert json.loads((out / "summary.json").read_text())["best checkpoint"] == "step-000001"


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "dry"
    assert main([*SMALL, "--dry-run", "--out", str(out)]) == 0
    plan = capsys.readouterr().out
    for word in ("completions", "optimiser steps", "GiB", "to carry signal", str(out)):
        assert word in plan
    assert not out.exists()


def test_settings_reach_both_sides_by_dotted_names():
    config = parse(["--preset", "tiny", "--dtype", "bfloat16", "--trainer.learning-rate", "0.5"])
    assert config.rollout.dtype == config.trainer.dtype == "bfloat16"
    assert config.trainer.learning_rate == 0.5


def test_help_answers_at_once():
    began = time.perf_counter()
    words = [sys.executable, "-X", "importtime", "-m", "recipes.grpo_gsm8k", "--help"]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--trainer.learning-rate" in done.stdout
    assert " torch\n" not in done.stderr
    assert time.perf_counter() - began < 20


BAD = {
    "missing model folder": (["--model", "/nowhere/at/all"], "--model"),
    "missing data folder": (["--data", "./nowhere"], "--data"),
    "no tokens": (["--max-tokens", "0"], "max-tokens"),
    "too many tokens": (["--max-tokens", "100000"], "--max-tokens"),
    "negative temperature": (["--temperature", "-1"], "temperature"),
    "greedy training": (["--temperature", "0"], "temperature"),
    "one completion a group": (["--group-size", "1"], "group-size"),
    "unknown preset": (["--preset", "huge"], "--preset"),
    "side disagrees": (["--rollout.dtype", "bfloat16"], "--dtype"),
    "page size": (["--rollout.page-size", "0"], "page_size"),
    "no such reward": (["--reward-functions", "recipes.gsm8k.nothing"], "--reward-functions"),
    "weights of rewards": (["--reward-weights", "1", "2"], "--reward-weights"),
    "no rounds": (["--filter-groups.max-num-gen-batches", "0"], "max-num-gen-batches"),
    "nothing to resume": (["--resume", "/nowhere/at/all"], "--resume"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line_that_names_the_setting(case, tmp_path, capsys):
    words, named = BAD[case]
    out = tmp_path / "bad"
    try:
        code = main([*SMALL, "--out", str(out), *words])
    except SystemExit as error:
        code = error.code
    assert code not in (0, None)
    captured = capsys.readouterr()
    error = captured.err
    assert named in error
    assert "Traceback" not in error
    assert not (out / "metrics.jsonl").exists()


def test_an_unwritable_out_is_named(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main([*SMALL, "--out", str(blocker / "run")]) == 1
    assert "--out" in capsys.readouterr().err


def test_a_finished_run_is_not_overwritten(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert main([*SMALL, "--out", str(finished)]) == 1
    assert "--resume auto" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_resuming_with_another_setting_is_refused(finished, capsys):
    words = [*SMALL, "--out", str(finished), "--resume", "auto", "--trainer.learning-rate", "1"]
    assert main(words) == 1
    assert "--trainer.learning-rate" in capsys.readouterr().err


def test_rewards_of_none_are_left_out_and_counted(tmp_path, monkeypatch):
    from recipes import task

    def judges_half(completions, **columns):
        return [None if i % 2 else float(i % 4 == 0) for i in range(len(completions))]

    real = task.load_task

    def with_reward(config, folder):
        from dataclasses import replace

        return replace(real(config, folder), reward_functions=(judges_half,))

    monkeypatch.setattr(task, "load_task", with_reward)
    out = tmp_path / "none_rewards"
    words = [*SMALL, "--steps", "1", "--evaluation.problems", "0", "--out", str(out)]
    assert main(words) == 0
    (row,) = lines(out / "metrics.jsonl")
    assert row["rewards/missing"] == 6
    assert row["reward"] == 0.5
    left_out = [one for one in lines(out / "completions.jsonl") if one["reward"] is None]
    assert len(left_out) == 6
    assert all(one["advantage"] == 0.0 for one in left_out)


def faulty(monkeypatch, change) -> None:
    """Every batch of completions passes through `change(completion, place)` on its way."""
    from rollout.actor import RolloutActor

    real = RolloutActor.generate

    def generate(self, prompts, params):
        groups = real(self, prompts, params)
        places = iter(range(10**6))
        return [[change(one, next(places)) for one in group] for group in groups]

    monkeypatch.setattr(RolloutActor, "generate", generate)


def shifted(one, versions: int = 0, logprobs: float = 0.0):
    from dataclasses import replace

    return replace(
        one,
        policy_versions=tuple(v + versions for v in one.policy_versions),
        logprobs=tuple(value - logprobs for value in one.logprobs),
    )


def test_tokens_of_another_version_are_not_passed_over(tmp_path, monkeypatch, capsys):
    faulty(monkeypatch, lambda one, place: one if place == 0 else shifted(one, 1, 0.1))
    words = [*SMALL, "--evaluation.problems", "0", "--out", str(tmp_path / "run")]
    assert main(words) == 1
    assert "weights version 1 and the trainer has version 0" in capsys.readouterr().err


@pytest.mark.parametrize("updates", ["1", "3"])
def test_a_difference_anywhere_stops_before_any_update(updates, tmp_path, monkeypatch, capsys):

    from trainer.trainer import Trainer

    steps = []
    real = Trainer._update
    monkeypatch.setattr(Trainer, "_update", lambda *args: steps.append(1) or real(*args))
    faulty(monkeypatch, lambda one, place: shifted(one, 0, 1e-6) if place == 11 else one)
    words = [*SMALL, "--evaluation.problems", "0", "--updates-per-batch", updates]
    assert main([*words, "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "step-1/prompt-2/sample-3" in error
    assert "the sampler gives the trainer's value" in error
    assert not steps


def test_weights_that_change_in_the_engine_stop_the_run(tmp_path, monkeypatch, capsys):
    from rollout.actor import RolloutActor

    real = RolloutActor.generate

    def generate(self, prompts, params):
        groups = real(self, prompts, params)
        weight = self.engine.weights.layers[2].down_DF
        weight[5, 7] = weight[5, 7].nextafter(weight.new_tensor(9.0))
        return groups

    monkeypatch.setattr(RolloutActor, "generate", generate)
    words = [*SMALL, "--evaluation.problems", "0", "--out", str(tmp_path / "run")]
    assert main(words) == 1
    assert "are not the trainer's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("op", "place"), [("rmsnorm", "rmsnorm before attention"), ("swiglu", "swiglu")]
)
def test_the_op_named_is_the_one_at_fault(op, place, tmp_path, monkeypatch, capsys):
    from shared_ops.opset import EXACT
    from trainer.held import Held

    def broken(*arguments):
        return getattr(EXACT, op)(*arguments) * 1.000001

    monkeypatch.setattr(Held, "ops", lambda self: EXACT._replace(**{op: broken}))
    words = [*SMALL, "--evaluation.problems", "0", "--out", str(tmp_path / "run")]
    assert main(words) == 1
    assert f"op to look at: layer 0: {place}" in capsys.readouterr().err


def test_a_short_trial_run_with_warmup_can_be_prolonged(tmp_path):
    words = [*SMALL, "--evaluation.problems", "0", "--trainer.warmup-steps", "5"]
    words += ["--out", str(tmp_path / "run"), "--resume", "auto"]
    assert main([*words, "--steps", "1"]) == 0
    assert main([*words, "--steps", "2"]) == 0
