"""Behaviour of the trackio log, in processes of its own: trackio takes one folder a process."""

import json
import sys
from importlib.util import find_spec

import pytest
from test_runlog import run_script

from recipes.runlog import RunLog
from recipes.trackio_log import TrackioError

needs_trackio = pytest.mark.skipif(find_spec("trackio") is None, reason="no trackio here")

# Any attempt to reach another machine fails, and a lookup of one as well.
OFFLINE = """
import json, os, socket, sys
def refuse(*_):
    raise OSError("no network in this test")
socket.getaddrinfo = socket.socket.connect = refuse
from pathlib import Path
from tests.test_runlog import *
folder = Path(sys.argv[1])
"""
KEPT = """
os.environ["TRACKIO_DIR"] = str(folder / "trackio")
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("zerokl")
logs = {run: SQLiteStorage.get_logs("zerokl", run) for run in runs}
config = SQLiteStorage.get_run_config("zerokl", runs[0])
print(json.dumps([runs, logs, config]))
"""
FIRST = """
log = RunLog(folder, 4, trackio=True, config={"seed": 3})
log.evaluation(0, {"eval/greedy_strict": 0.25})
for step in (1, 2, 3):
    record(log, step, reward=float(step), entropy=float("nan"))
import time
time.sleep(2)
os._exit(9)
"""
RESUMED = """
with RunLog(folder, 4, trackio=True, config={"seed": 3}, resume_step=1) as log:
    for step in (2, 3):
        record(log, step, reward=10.0 * step)
    log.finish()
"""


def kept(folder) -> tuple[list[str], dict[str, list[dict]], dict]:
    done = run_script(OFFLINE + KEPT, str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def series(rows: list[dict], name: str) -> list[tuple[int, float]]:
    return sorted((row["step"], row[name]) for row in rows if name in row)


@needs_trackio
def test_trackio_gets_every_number_once_and_a_resumed_run_goes_on(tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    assert run_script(OFFLINE + FIRST, str(folder)).returncode == 9
    runs, logs, _ = kept(folder)
    assert series(logs["run"], "reward") == [(1, 1), (2, 2), (3, 3)] and runs == ["run"]
    folder.rename(moved)
    done = run_script(OFFLINE + RESUMED, str(moved), TRACKIO_SERVER_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "trackio show --project zerokl" in done.stdout and "* " not in done.stdout
    runs, logs, config = kept(moved)
    assert runs == ["run"] and config["seed"] == 3
    assert series(logs["run"], "reward") == [(1, 1), (2, 20), (3, 30)]
    assert series(logs["run"], "parity/tokens_differing") == [(1, 0), (2, 0), (3, 0)]
    assert series(logs["run"], "eval/greedy_strict") == [(0, 0.25)]
    assert not any("entropy" in row or "completion" in row for row in logs["run"])


TWO_FOLDERS = """
from recipes.trackio_log import TrackioError
os.environ["TRACKIO_DIR"] = "mine"
with RunLog(folder / "a", 1, trackio=True) as log:
    record(log, 1)
assert os.environ["TRACKIO_DIR"] == "mine"
try:
    RunLog(folder / "b", 1, trackio=True)
except TrackioError as error:
    print(error)
"""


@needs_trackio
def test_a_second_folder_in_a_process_is_refused(tmp_path):
    done = run_script(OFFLINE + TWO_FOLDERS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "start the run in a process of its own" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "b" / "trackio").exists()


@needs_trackio
def test_a_failing_trackio_does_not_stop_the_run(tmp_path):
    script = """
with RunLog(folder, 2, trackio=True) as log:
    def fail(*_, **__):
        raise RuntimeError("no\\nspace")
    log._sinks[-1]._run.log = fail
    record(log, 1)
    record(log, 2)
"""
    done = run_script(OFFLINE + script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trackio stopped taking the log (no space)") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_missing_trackio_names_the_flag(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(TrackioError, match=r"--trackio: .*pip install trackio"):
        RunLog(tmp_path, 1, trackio=True)
