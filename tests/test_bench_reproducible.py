"""Behaviour of the reproducibility benchmark, on a short run."""

import json

from benchmarks import bench_reproducible
from benchmarks.bench_reproducible import PARTS, SETTINGS, differing, main
from recipes import grpo_gsm8k

FEW = ("--prompts-per-step", "4", "--group-size", "4", "--max-tokens", "32")


def here(scratch, out, words) -> None:
    """A run in this process, which saves the start of one."""
    assert grpo_gsm8k.main([*words, "--out", str(scratch / out)]) == 0


def test_two_runs_and_a_killed_one_are_equal_and_the_control_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_reproducible, "left_alone", here)
    monkeypatch.setattr(bench_reproducible, "SETTINGS", (*SETTINGS, *FEW))
    output = tmp_path / "reproducible.json"
    assert main(["--steps", "2", "--problems", "1", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["optimiser_steps"] == 2 and report["tokens_compared"] > 0
    assert report["tokens_differing"] == 0
    found = report["differing"]
    assert found["second run"] == found["killed and resumed"] == []
    assert set(PARTS[:3]) <= set(found["control, another seed"])


def test_the_comparison_sees_each_part():
    one = {name: [1.0] for name in PARTS}
    assert differing(one, dict(one)) == []
    for name in PARTS:
        assert differing(one, {**one, name: [1.0000000001]}) == [name]
