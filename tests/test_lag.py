"""Asynchronous runs: a lag of 0 is the synchronous run to the bit, older tokens are proved."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recipes import audit, job
from recipes.asking import Asking, AskingAhead, GroupError
from recipes.command_line import parse
from recipes.grpo_gsm8k import main
from recipes.settings import SettingError
from rollout.config import EngineConfig
from rollout.request import Completion
from tests.test_recipe import SMALL, lines, without_timings
from trainer import TrainSample

AHEAD = [*SMALL, "--steps", "5", "--evaluation.problems", "0", "--trainer.learning-rate", "0.002"]


def run(out: Path, *words: str) -> list[dict]:
    assert main([*AHEAD, *words, "--out", str(out)]) == 0
    return lines(out / "metrics.jsonl")


@pytest.mark.parametrize(
    "words",
    [
        ["--updates-per-batch", "2"],
        ["--filter-groups.enable", "--filter-groups.max-num-gen-batches", "2"],
    ],
)
def test_max_lag_0_is_the_synchronous_run_to_the_bit(tmp_path, words):
    together, ahead = tmp_path / "synchronous", tmp_path / "ahead"
    run(together, *words, "--steps", "3")
    run(ahead, *words, "--steps", "3", "--max-lag", "0")
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert without_timings(together / name) == without_timings(ahead / name)
    digests = [f / "checkpoints/step-000003/digests.json" for f in (together, ahead)]
    weights = [json.loads(path.read_text())["training.safetensors"] for path in digests]
    assert weights[0] == weights[1]


def test_stale_tokens_are_used_and_every_one_is_proved(tmp_path):
    lag = 2
    rows = run(tmp_path / "run", "--max-lag", str(lag), "--lag-share", "1.0")
    completions = lines(tmp_path / "run" / "completions.jsonl")
    for row in rows:
        tokens = sum(one["tokens"] for one in completions if one["step"] == row["step"])
        stale = row["parity/lag_rescored_compared"]
        assert row["parity/tokens_compared"] + stale == tokens > 0
        assert row["parity/tokens_differing"] == row["parity/lag_rescored_differing"] == 0
        assert row["kl/mismatch"] == row["kl/sampler_trainer"] == 0.0
        assert row["lag/versions_max"] <= lag
        assert sum(v for k, v in row.items() if k.startswith("lag/tokens/")) in (0, tokens)
    assert sum(row["parity/lag_rescored_compared"] for row in rows) > 100
    assert max(row["kl/lag"] for row in rows) > 0


def test_a_share_of_the_stale_tokens_is_proved_each_step(tmp_path):
    rows = run(tmp_path / "run", "--max-lag", "2", "--lag-share", "0.3")
    stale = [sum(row.get(f"lag/tokens/{age}", 0) for age in (1, 2)) for row in rows]
    proved = [row["parity/lag_rescored_compared"] for row in rows]
    assert all((some > 0) == (every > 0) for some, every in zip(proved, stale, strict=True))
    assert 0 < sum(proved) < sum(stale)


@pytest.mark.usefixtures("reordered")
def test_kernels_without_contracts_show_mismatch_beside_lag(tmp_path):
    """The control: with other ops stale tokens differ, and the two parts of the KL are told."""
    rows = run(tmp_path / "run", "--max-lag", "2", "--mode", "tis")
    assert sum(row["parity/lag_rescored_differing"] for row in rows) > 0
    assert max(row["kl/mismatch"] for row in rows) > 0
    assert max(row["kl/lag"] for row in rows) > 1e3 * max(row["kl/mismatch"] for row in rows)


def test_a_wrong_version_tag_stops_the_run(tmp_path, monkeypatch, capsys):
    real = job.Job.samples

    def mistagged(self, step, drawn):
        """From the third step on, one sample drawn 1 or 2 versions ago claims the other."""
        samples = real(self, step, drawn)
        version = self.sides.trainer.version()
        for place, one in enumerate(samples):
            drawn_by = one.policy_versions[0]
            if step >= 2 and set(one.policy_versions) == {drawn_by} and drawn_by < version:
                tags = [2 * version - 3 - drawn_by] * len(one.policy_versions)
                return [*samples[:place], replace(one, policy_versions=tags), *samples[place + 1 :]]
        return samples

    monkeypatch.setattr(job.Job, "samples", mistagged)
    words = [*AHEAD, "--max-lag", "2", "--lag-share", "1", "--out", str(tmp_path / "run")]
    assert main(words) == 1
    assert "is the token's policy version the one that drew it?" in capsys.readouterr().err


def test_a_token_older_than_allowed_is_refused_before_the_update():
    class Side:
        def weights_digest(self) -> str:
            return "same"

    sample = TrainSample((1,), (2, 3), (-1.0, -1.0), 1.0, (7, 4), request_id="r")
    sides: Any = type("Sides", (), {"rollout": Side(), "trainer": Side()})()
    assert audit.require_known_policy(sides, [sample], 4, 7)
    with pytest.raises(audit.ProofError, match=r"weights version 4 .* 5 is the oldest"):
        audit.require_known_policy(sides, [sample], 5, 7)


def test_age_is_counted_in_publications_where_a_batch_takes_fewer_updates(tmp_path, monkeypatch):
    """Filtered batches of one or two groups move the version by less than updates_per_batch."""
    seen: list[tuple[int, int, list[int]]] = []
    real = job.require_known_policy

    def recorded(sides, samples, oldest, version):
        seen.append((oldest, version, [v for one in samples for v in one.policy_versions]))
        return real(sides, samples, oldest, version)

    monkeypatch.setattr(job, "require_known_policy", recorded)
    words = ["--group-size", "2", "--prompts-per-step", "2", "--updates-per-batch", "4"]
    words += ["--filter-groups.enable", "--filter-groups.max-num-gen-batches", "1"]
    run(tmp_path / "run", *words, "--max-lag", "1", "--lag-share", "1")
    versions = [version for _, version, _ in seen]
    assert min(b - a for a, b in pairwise(versions)) < 4
    assert [oldest for oldest, _, _ in seen[1:]] == versions[:-1]
    for oldest, _, drawn_by in seen:
        assert min(drawn_by) >= oldest


def test_an_interrupted_run_asks_again_what_was_not_used(tmp_path, monkeypatch):
    real = job.Job.finish_step

    def killed_after_two(self, step):
        real(self, step)
        if step == 1:
            raise KeyboardInterrupt

    out = tmp_path / "resumed"
    words = [*AHEAD, "--max-lag", "2", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(job.Job, "finish_step", killed_after_two)
        assert main(words) == 130
    state = json.loads((out / "checkpoints/step-000002/state.json").read_text())["extra"]
    assert state["position"] == 12 and len(state["pending"]) == 6
    assert main([*words, "--resume", "auto"]) == 0
    rows = lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["parity/tokens_differing"] == 0 for row in rows)
    prompts = [one["prompt"] for one in lines(out / "completions.jsonl")][::4]
    assert len(set(prompts)) == len(prompts) == 15


class Clock:
    """A rollout side that finishes what it is told to finish, drawn by the version it is told."""

    def __init__(self) -> None:
        self.futures: list[tuple[tuple[int, ...], Future]] = []
        self.version = 0

    def submit(self, prompt, params) -> Future:
        future: Future = Future()
        self.futures.append((tuple(prompt), future))
        return future

    def finish(self, index: int, reason: str = "stop") -> None:
        prompt, future = self.futures[index]
        one = Completion("r", 0, prompt, (5,), (-1.0,), (self.version,), reason, message="told to")
        future.set_result([[one]])


class Numbers:
    """A task whose problem number n has the prompt [n]."""

    def batch_at(self, config, position: int):
        places = list(range(position, position + config.prompts_per_step))
        return places, [[place] for place in places]


def ahead(over_age: str, lag: int = 1) -> tuple[AskingAhead, Clock]:
    config = replace(parse([*SMALL, "--prompts-per-step", "2"]), max_lag=lag)
    clock = Clock()
    task: Any = Numbers()
    return AskingAhead(replace(config, over_age=over_age), task, clock, {}), clock


def prompts_of(groups) -> list[int]:
    return [group[0].prompt_ids[0] for group in groups]


def first_round(source: AskingAhead, clock: Clock) -> None:
    """Problems 1 and 2 are used by version 0; 0 and 3 are under way, and so are 4 and 5 soon."""
    source._fill(4)
    clock.finish(1)
    clock.finish(2)
    assert prompts_of(source.round(oldest=0)[1]) == [1, 2]
    assert [prompt for prompt, _ in clock.futures] == [(0,), (1,), (2,), (3,)]
    assert source.state() == {"position": 4, "pending": [0, 3]}


@pytest.mark.parametrize(
    ("over_age", "third", "counts"), [("refresh", 0, (1, 0)), ("drop", 6, (0, 1))]
)
def test_an_over_age_group_is_asked_again_or_dropped_and_never_used(over_age, third, counts):
    source, clock = ahead(over_age)
    first_round(source, clock)
    clock.finish(0)
    clock.version = 2
    source._fill(4)
    assert [prompt for prompt, _ in clock.futures[4:]] == [(4,), (5,)]
    clock.finish(3)
    clock.finish(4)
    assert prompts_of(source.round(oldest=1)[1]) == [3, 4]
    assert clock.futures[6][0] == (third,)
    found = source.counts()
    assert (found["async/groups_refreshed"], found["async/groups_dropped"]) == counts
    assert source.counts()["async/groups_refreshed"] == 0
    clock.finish(5)
    clock.finish(6)
    ordered = sorted(prompts_of(source.round(oldest=1)[1]))
    assert ordered == sorted([third, 5])


def test_never_more_is_under_way_than_the_lag_allows():
    source, clock = ahead("refresh", lag=2)
    for version in range(4):
        source._fill(6)
        for index, (_, future) in enumerate(clock.futures):
            clock.version = version
            if not future.done():
                clock.finish(index)
        source.round(max(0, version - 2))
        assert len(source._asked) == 4
        assert len(clock.futures) == 2 * (version + 3)


def test_a_failed_completion_stops_the_run_and_says_why():
    source, clock = ahead("refresh")
    source._fill(4)
    clock.finish(0)
    clock.finish(1, "error")
    with pytest.raises(GroupError, match="problem number 1: a completion failed: told to"):
        source.round(oldest=0)


def test_sources_ask_the_same_problems_in_the_same_way():
    asked: dict[str, list] = {"needed": [], "ahead": []}

    class Both:
        def generate(self, prompts, params):
            asked["needed"] += zip(prompts, params, strict=True)
            return [[] for _ in prompts]

        def submit(self, prompt, params):
            asked["ahead"].append((prompt, params))
            return Future()

    config, task, rollout = replace(parse(SMALL), max_lag=3), Numbers(), Both()
    needed: Any = Asking(config, task, rollout, {})  # type: ignore[arg-type]
    later: Any = AskingAhead(config, task, rollout, {})  # type: ignore[arg-type]
    for _ in range(4):
        needed.round(0)
    later._fill(12)
    assert asked["needed"] == asked["ahead"]
    assert needed.state()["position"] == later.state()["position"] == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_lag": -1}, "--max-lag is -1: use 0 or more"),
        ({"lag_share": 1.5}, "--lag-share is 1.5"),
        ({"max_lag": 1, "rollout": EngineConfig(in_flight="abort")}, "--rollout.in-flight abort"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(SettingError, match=message):
        replace(parse(SMALL), **changes)
