"""Behaviour of the learning benchmark: what its arms are, what it keeps, and when it stops."""

import json

import pytest

from benchmarks import bench_learning
from benchmarks.bench_learning import ARMS, main, run_config
from recipes.command_line import parse

WORDS = [
    *("--model", "embedded", "--data", "embedded", "--instruction", "", "--device", "cpu"),
    *("--threads", "1", "--steps", "2", "--prompts-per-step", "3", "--group-size", "4"),
    *("--max-tokens", "24", "--evaluation.problems", "4"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    output = tmp_path_factory.mktemp("learning") / "learning.json"
    assert main([*WORDS, "--arms", "bitwise", "none-fp8", "--output", str(output)]) == 0
    return output


def test_both_arms_are_measured_and_drawn(measured):
    arms = json.loads(measured.read_text())["arms"]
    exact, coarse = arms["bitwise"]["steps"], arms["none-fp8"]["steps"]
    assert exact["tokens_differing"] == [0, 0] and exact["kl"] == [0.0, 0.0]
    assert min(exact["tokens_compared"]) > 0
    assert min(coarse["tokens_differing"]) > 0 and min(coarse["kl"]) > 0
    for found in arms.values():
        assert found["stopped"] is None and len(found["steps"]["reward"]) == 2
        assert [row["step"] for row in found["evaluations"]] == [0, 2]
    assert measured.with_suffix(".png").stat().st_size > 10_000


def test_what_is_measured_is_not_repeated_and_the_budget_holds(measured, capsys, monkeypatch):
    monkeypatch.setattr(bench_learning, "measure", None)
    words = [*WORDS, "--arms", "bitwise", "none", "--output", str(measured), "--seconds", "-1"]
    before = measured.read_bytes()
    assert main(words) == 0
    assert measured.read_bytes() == before
    said = capsys.readouterr().out
    assert "none: left out" in said and "bitwise: left out" not in said
    with pytest.raises(TypeError):
        main([*WORDS, "--seed", "1", "--arms", "bitwise", "--output", str(measured)])


def test_arms_differ_in_the_mode_alone():
    configs = {arm: run_config(arm, "embedded", "out", ["--device", "cpu"]) for arm in ARMS}
    assert configs["bitwise"].rollout.exact and configs["bitwise"].trainer.exact
    for arm, config in configs.items():
        if arm != "bitwise":
            assert config.mode == arm.split("-")[0]
            assert not config.rollout.exact and not config.trainer.exact
        assert config.seed == configs["bitwise"].seed and config.data == "arithmetic"
    assert configs["tis-fp8"].sampler_precision == "float8_e4m3fn"
    assert configs["none"].sampler_precision is None


def test_the_preset_asks_sums_and_takes_the_last_number():
    config = parse(["--preset", "smollm2-135m-arithmetic", "--model", "embedded"])
    assert (config.data, config.group_size) == ("arithmetic", 8)
    assert config.reward_functions == ("recipes.gsm8k.lenient_reward",)
