"""Bits and behaviour of the main job where it draws from kept sets."""

from dataclasses import replace

import pytest

from recipes.command_line import parse
from recipes.grpo_gsm8k import main
from recipes.settings import SettingError
from tests.test_recipe import SMALL, lines
from trainer.sample import TrainSample

FILTERS = ["--top-p", "0.9", "--top-k", "20", "--min-p", "0.01"]
WORDS = [*SMALL, *FILTERS, "--steps", "2"]


@pytest.mark.parametrize("updates", ["1", "2"])
def test_tokens_of_kept_sets_are_compared_and_none_differs(updates, tmp_path, monkeypatch):
    from recipes import job

    samples: list[TrainSample] = []
    real = job.Job.update

    def seen(self, batch):
        samples.extend(batch)
        return real(self, batch)

    monkeypatch.setattr(job.Job, "update", seen)
    assert main([*WORDS, "--updates-per-batch", updates, "--out", str(tmp_path / "run")]) == 0
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["parity/tokens_compared"] > 50
        assert row["parity/tokens_differing"] == 0
        assert updates == "1" or row["parity/lag_rescored_compared"] > 0
        assert row["parity/lag_rescored_differing"] == 0
    kept = [x for sample in samples for x in sample.kept_thresholds]
    assert len(kept) == sum(len(sample.completion_ids) for sample in samples)
    assert len(set(kept)) > 30 and max(kept) <= 0


def test_withheld_kept_sets_stop_the_run(tmp_path, monkeypatch, capsys):
    """The control: the same run, the thresholds not passed on."""
    real = TrainSample.of
    without = staticmethod(lambda *given: replace(real(*given), kept_thresholds=()))
    monkeypatch.setattr(TrainSample, "of", without)
    out = tmp_path / "withheld"
    assert main([*WORDS, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert "tokens differ between sampler and trainer" in error and "kept set" in error
    assert not list(out.glob("checkpoints/*"))


def test_filters_change_the_draws_of_training_and_not_of_evaluation(tmp_path):
    for name, words in (("filtered", WORDS), ("whole", [*SMALL, "--steps", "2"])):
        assert main([*words, "--evaluation.problems", "2", "--out", str(tmp_path / name)]) == 0
    first, second = (lines(tmp_path / name / "completions.jsonl") for name in ("filtered", "whole"))
    assert [one["completion"] for one in first] != [one["completion"] for one in second]
    before = [lines(tmp_path / name / "evaluations.jsonl")[0] for name in ("filtered", "whole")]
    assert before[0] == before[1]


@pytest.mark.parametrize("name,value,mend", [("top_p", 0.0, "above 0"), ("top_k", -1, "0")])
def test_a_filter_that_cannot_work_is_named(name, value, mend):
    flag = name.replace("_", "-")
    with pytest.raises(SettingError, match=f"^--{flag} is {value}.*{mend}"):
        replace(parse(SMALL), **{name: value})


def test_filters_reach_the_draws():
    from recipes.asking import sampling

    config = replace(parse(SMALL), top_p=0.9, top_k=20, min_p=0.01)
    (params,) = sampling(config, 0, [[1]])
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 20, 0.01)
