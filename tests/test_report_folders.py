"""Behaviour of the report on folders that are damaged, under way, resumed, broken, or no run."""

import json
from pathlib import Path

import pytest
from test_report import BITWISE, cells, report, write_run
from test_runlog import CLEAN, HEALTHY, completion

from recipes.report import main
from recipes.report_charts import LONGEST_LABEL, short, styles
from recipes.report_runs import load_runs, of
from recipes.report_words import state, verdict
from recipes.runlog import RunLog


def damaged(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", steps=5, config={**BITWISE, "steps": 9})
    kept = (folder / "metrics.jsonl").read_text().splitlines()
    kept[1] = kept[1][:40]
    more = ["[]", '{"step": "x"}', kept[4].replace('"step": 5', '"step": 4'), '{"parity/tok']
    (folder / "metrics.jsonl").write_text("\n".join([*kept[:4], *more]))
    return folder


def test_damaged_lines_are_said_and_the_rest_is_used(tmp_path):
    folder = damaged(tmp_path)
    page = report(folder, out=tmp_path / "r.html")
    assert "metrics.jsonl: 3 damaged lines left out (lines 2, 5, 6)" in page
    assert "metrics.jsonl: the last line is cut short and was left out" in page
    assert "1 earlier step not on record" in page
    assert "step 4 of 9; not ended: still under way, or stopped" in page
    assert cells(page, "fresh tokens compared") == [f"{3 * 5321:,}"]


def test_a_run_before_its_first_step_claims_nothing(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text(json.dumps(BITWISE))
    page = report(tmp_path / "new", out=tmp_path / "r.html")
    assert "○ Nothing was compared yet: nothing is proved" in page and "✓" not in page
    assert "step 0 of 4; not ended" in page


def state_of(folder: Path) -> str:
    (run,) = load_runs([str(folder)])
    return state(run)


def test_an_ended_a_resumed_and_a_prolonged_run_say_so(tmp_path):
    folder = write_run(tmp_path / "run", config=BITWISE)
    with RunLog(folder, 4, resume_step=2) as log:
        for step in (3, 4):
            log.step(step, {**HEALTHY, **CLEAN}, [completion()])
        assert state_of(folder) == "step 4 of 4; not ended: still under way, or stopped"
        log.finish()
    assert state_of(folder) == "ended after step 4"
    with RunLog(folder, 6, resume_step=4) as log:
        log.step(5, {**HEALTHY, **CLEAN}, [completion()])
    assert state_of(folder) == "step 5 of 5; not ended: still under way, or stopped"


def said(tmp_path: Path, config: dict | None, **metrics):
    (run,) = load_runs([str(write_run(tmp_path / "run", config=config, **metrics))])
    found = verdict(run)
    return found.tone, found.headline, found.details


def test_a_difference_in_a_bitwise_run_is_no_success(tmp_path):
    one = {"parity__tokens_differing": lambda step: int(step == 3), "parity__max_ulp": lambda s: 2}
    tone, headline, details = said(tmp_path, BITWISE, **one)
    assert (tone, headline) == ("bad", "Bitwise, BROKEN: 1 of 21,284 tokens differ")
    assert "Largest difference: 2 units in the last place" in details


def test_a_stale_difference_is_no_success(tmp_path):
    stale = {
        "parity__lag_rescored_compared": lambda step: 7,
        "parity__lag_rescored_differing": lambda step: int(step == 2),
    }
    tone, headline, details = said(tmp_path, BITWISE, **stale)
    assert tone == "bad" and headline == "Bitwise, BROKEN: 1 of 21,312 tokens differ"
    assert "Of these, stale tokens proved again: 28 compared, 1 differ" in details


def test_a_run_that_parity_stopped_says_so_at_the_top(tmp_path):
    folder = write_run(tmp_path / "run", steps=2, config=BITWISE)
    with RunLog(folder, 4, resume_step=2) as log:
        log.stopped("ParityError: 3 of 5 tokens differ between sampler and trainer")
    (run,) = load_runs([str(folder)])
    found = verdict(run)
    assert (found.tone, found.headline.split(":")[0]) == ("bad", "STOPPED at step 3")
    assert found.details[0].startswith("ParityError: 3 of 5 tokens differ")
    assert state(run).startswith("step 2 of 4; stopped by ParityError")
    with RunLog(folder, 4, resume_step=2):
        assert not (folder / "stopped.json").exists()


def test_zeros_that_prove_nothing_are_not_praised(tmp_path):
    nothing = {"parity__tokens_compared": lambda step: 0}
    assert said(tmp_path / "a", BITWISE, **nothing)[0] == "open"
    assert said(tmp_path / "b", None)[0] == "open"
    assert not any("KL" in line for line in said(tmp_path / "e", BITWISE, **nothing)[2])
    lost = {"kl__sampler_trainer": lambda step: float("nan") if step == 2 else 0.0}
    assert "KL is no number at 1 step" in said(tmp_path / "c", BITWISE, **lost)[2]
    assert said(tmp_path / "d", BITWISE)[:2] == (
        "good",
        "Bitwise: 21,284 tokens compared, 0 differ",
    )


BAD = {
    "no such folder": (["{0}/nowhere"], "nowhere: no such folder"),
    "a file": (["{0}/file"], "file: is no folder"),
    "not a run": (["{0}/empty"], "empty: not a run's folder (neither metrics.jsonl"),
    "twice": (["{0}/run", "{0}/../{1}/run"], "given twice"),
    "another file": (["{0}/run", "--out", "{0}/file"], "holds a file that is no report"),
    "no place": (["{0}/run", "--out", "{0}/file/r.html"], "cannot be written"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_one_line_that_names_what(case, tmp_path, capsys):
    words, named = BAD[case]
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    capsys.readouterr()
    assert main([word.format(tmp_path, tmp_path.name) for word in words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and named in error and error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_equal_folder_names_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name / "run") for name in "ab"]
    assert [run.name for run in load_runs([*map(str, folders)])] == ["a/run", "b/run"]


def test_pictures_of_an_earlier_report_go(tmp_path):
    write_run(tmp_path / "run", entropy=lambda step: 1 / step)
    report(tmp_path / "run", out=tmp_path / "r.html")
    assert (tmp_path / "r_charts" / "entropy.png").exists()
    (tmp_path / "r_charts" / "mine.png").write_bytes(b"mine")
    report(write_run(tmp_path / "other"), out=tmp_path / "r.html")
    assert not (tmp_path / "r_charts" / "entropy.png").exists()
    assert (tmp_path / "r_charts" / "mine.png").read_bytes() == b"mine"


def test_many_runs_look_different():
    looks = [(s.colour, str(s.dash), s.marker) for s in styles(30)]
    assert len(set(looks)) == 30
    assert short("_a").strip() == "_a" and len(short("n" * 99)) <= LONGEST_LABEL + 1
    assert of("x")({"x": None}) is None and of("x")({"x": 0}) == 0
