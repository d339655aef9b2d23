"""Behaviour of evaluation: avg@k and pass@k with their intervals, and which checkpoint is best."""

import json
import random

import pytest
from test_recipe import SMALL, lines

from recipes.accuracy import Accuracy, average_accuracy, pass_accuracy, wilson_interval
from recipes.evaluate import best_step, rewarded_form
from recipes.grpo_gsm8k import main
from recipes.settings import RunConfig


def test_averages_and_passes_are_counted_by_problem():
    right = [[True, False, True, False], [False] * 4, [True] * 4]
    assert (average_accuracy(right).correct, average_accuracy(right).total) == (6, 12)
    assert pass_accuracy(right) == Accuracy(2, 3)


def test_samples_that_agree_are_worth_one_a_problem_and_independent_ones_all():
    source = random.Random(0)
    alike = [[source.random() < 0.5] * 8 for _ in range(400)]
    assert average_accuracy(alike).worth == pytest.approx(400, rel=0.01)
    assert average_accuracy(alike).interval == pytest.approx(
        wilson_interval(sum(one[0] for one in alike), 400), abs=1e-3
    )
    free = [[source.random() < 0.5 for _ in range(8)] for _ in range(400)]
    assert average_accuracy(free).worth > 0.8 * 3200
    for none_or_all in (False, True):
        assert average_accuracy([[none_or_all] * 8] * 5).worth == 5


def test_the_interval_of_an_average_covers_the_truth_as_often_as_it_says():
    """Problems of differing difficulty, k samples each: 95%, where counting answers falls short."""
    source, covered, naive = random.Random(1), 0, 0
    runs = 400
    for _ in range(runs):
        chances = [source.betavariate(0.4, 0.6) for _ in range(100)]
        right = [[source.random() < chance for _ in range(8)] for chance in chances]
        accuracy = average_accuracy(right)
        low, high = accuracy.interval
        covered += low <= 0.4 <= high
        low, high = wilson_interval(accuracy.correct, accuracy.total)
        naive += low <= 0.4 <= high
    assert 0.92 <= covered / runs <= 0.98
    assert naive / runs < 0.85


def test_the_best_step_is_the_first_of_the_highest_after_the_start():
    rows = [
        {"step": step, "eval/avg@2_strict": share}
        for step, share in enumerate([0.9, 0.2, 0.5, 0.5])
    ]
    assert best_step(rows, 2) == 2
    assert best_step(rows[:1], 2) is None
    assert best_step(rows, 1) is None
    lenient = [{**row, "eval/avg@2_lenient": row["step"]} for row in rows]
    assert best_step(lenient, 2, "lenient") == 3


@pytest.mark.parametrize(("reward", "form"), [("correctness", "strict"), ("lenient", "lenient")])
def test_the_form_that_counts_is_the_rewards(reward, form):
    assert rewarded_form(RunConfig(reward_functions=(f"recipes.gsm8k.{reward}_reward",))) == form


def test_a_run_evaluates_every_step_with_k_samples(tmp_path):
    out = tmp_path / "k"
    words = ["--evaluation.samples", "3", "--evaluation.every", "1", "--steps", "2"]
    assert main([*SMALL, *words, "--out", str(out)]) == 0
    rows = lines(out / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert (row["eval/avg@3_strict/n"], row["eval/pass@3_strict/n"]) == (12, 4)
        assert row["eval/pass@3_strict"] >= row["eval/avg@3_strict"]
        for kind in ("avg@3_lenient", "pass@3_lenient", "greedy_strict"):
            low, share, high = (row[f"eval/{kind}{end}"] for end in ("/low", "", "/high"))
            assert 0 <= low <= share <= high <= 1
    summary = json.loads((out / "summary.json").read_text())
    assert "avg@3, strict accuracy" in summary and "best checkpoint" in summary
    assert main([*SMALL, *words, "--out", str(out), "--resume", "auto"]) == 0
    assert lines(out / "evaluations.jsonl") == rows
