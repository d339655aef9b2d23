"""Behaviour of resuming with other settings, and with settings that are younger than the run."""

import json

import pytest

from recipes.command_line import parse
from recipes.grpo_gsm8k import main
from tests.test_recipe import SMALL


def test_a_run_from_before_a_setting_existed_resumes_at_its_default(tmp_path, capsys):
    out = tmp_path / "older"
    assert main([*SMALL, "--steps", "2", "--evaluation.problems", "0", "--out", str(out)]) == 0
    settings = json.loads((out / "config.json").read_text())
    del settings["max_lag"], settings["lora"], settings["trainer"]["lag_correction"]
    (out / "config.json").write_text(json.dumps(settings))
    rest = ["--evaluation.problems", "0", "--out", str(out), "--resume", "auto"]
    words = [*SMALL, *rest]
    assert main([*words, "--max-lag", "1"]) == 1
    assert "--max-lag is 1 and the run to resume has None" in capsys.readouterr().err
    assert main(words) == 0


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(tmp_path, capsys):
    out = tmp_path / "run"
    words = [*SMALL, "--steps", "2", "--evaluation.problems", "0", "--out", str(out)]
    assert main(words) == 0
    before = (out / "metrics.jsonl").read_bytes()
    folders = sorted((out / "checkpoints").iterdir())
    for folder in folders:
        (folder / "training.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning):
        assert main([*words, "--steps", "3", "--resume", "auto"]) == 1
    assert "every checkpoint in" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes() == before
    assert sorted((out / "checkpoints").iterdir()) == folders


def test_every_setting_has_its_words_in_the_help(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    for words in (
        "tiny, smollm2-135m",
        "how many of the test split",
        "most times that a step asks",
        "tokens in a KV page",
        "budget of one forward and backward",
    ):
        assert words in text, words
