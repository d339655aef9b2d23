"""Behaviour of the run log: files that survive kills and full disks, a console that is true."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.console import LOSS_NOTE, step_line
from recipes.curves import draw_curves
from recipes.durable import OutputError, append_lines, write_text, write_whole
from recipes.health import complaints
from recipes.runlog import PARITY, RunLog
from recipes.wandb_log import WandbError

ROOT = Path(__file__).parents[1]
CLEAN = dict(zip(PARITY, (5321, 0, 0, 0.0), strict=True))
HEALTHY = {"loss": 1e-9, "reward": 0.4, "grad_norm": 0.8, "frac_reward_zero_std": 0.25}


def completion(text="3 x 6 = 18\n#### 18", reward: float | None = 1.0, reason="stop", **more):
    fields = {"request_id": "0/0", "prompt": "How many?", "completion": text, "tokens": 9}
    return {**fields, "reward": reward, "advantage": 0.5, "finish_reason": reason, **more}


def record(log: RunLog, step: int, **metrics) -> None:
    log.step(step, {**HEALTHY, **CLEAN, **metrics}, [completion(), completion(reward=0.0)])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_script(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**variables, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_line_begins_with_parity(tmp_path):
    with RunLog(tmp_path, 2) as log:
        more = {"parity/weights_equal": 1, "lag/versions_max": 0, "kl": 0.1, "kl/lag": 0.0}
        record(log, 1, **more)
        log.step(2, {**HEALTHY, **dict(reversed(CLEAN.items()))}, [])
    first, second = lines(tmp_path / "metrics.jsonl")
    ours = ["parity/weights_equal", "lag/versions_max", "kl/lag"]
    assert list(first)[:8] == [*PARITY, *ours, "step"]
    assert list(second)[:5] == [*PARITY, "step"]
    assert first["kl"] == 0.1 and [first["step"], second["step"]] == [1, 2]


def test_numbers_of_torch_become_plain_ones_and_nan_null(tmp_path, capsys):
    import torch  # here, as the scripts of other tests import this module

    with RunLog(tmp_path, 1) as log:
        record(log, 1, loss=torch.tensor(0.25), entropy=math.nan, grad_norm=torch.tensor(math.inf))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["loss"] == 0.25 and line["entropy"] is None and line["grad_norm"] is None
    assert "NaN or infinite at step 1: grad_norm, entropy" in capsys.readouterr().out


def test_a_step_without_parity_or_twice_is_refused(tmp_path):
    with RunLog(tmp_path, 3) as log:
        with pytest.raises(ValueError, match="lack parity/max_ulp, kl/sampler_trainer"):
            log.step(1, {**HEALTHY, PARITY[0]: 1, PARITY[1]: 0}, [])
        record(log, 1)
        with pytest.raises(ValueError, match="step 1: 1 is recorded already"):
            record(log, 1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_all_completions_are_kept(tmp_path):
    strange = completion("line\nline\u2028 \ud800 #### 7", reward=None, rewards={"f": None})
    with RunLog(tmp_path, 1) as log:
        log.step(1, {**HEALTHY, **CLEAN}, [completion(tokens=n) for n in range(300)] + [strange])
    kept = lines_of_json(tmp_path / "completions.jsonl")
    assert [one["tokens"] for one in kept[:300]] == list(range(300))
    assert len(kept) == 301 and all(one["step"] == 1 for one in kept)
    assert kept[300]["completion"] == "line\nline\u2028 ? #### 7"
    assert kept[300]["reward"] is None and kept[300]["rewards"] == {"f": None}


def lines_of_json(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    with RunLog(tmp_path, 1) as log:
        record(log, 1)
    with pytest.raises(OutputError, match=r"--out .*already holds a run.*--resume auto"):
        RunLog(tmp_path, 1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    with RunLog(tmp_path, 9) as log:
        for step in (0, 3, 5):
            log.evaluation(step, {"eval/sampled_strict": 0.1 * step})
        for step in range(1, 6):
            record(log, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"parity/tokens_compared": 17, "par')
    with RunLog(tmp_path, 9, resume_step=3) as log:
        assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
        record(log, 4, reward=0.9)
        log.evaluation(3, {"eval/sampled_strict": 0.7})
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["reward"] == 0.9
    steps = [row["step"] for row in lines(tmp_path / "completions.jsonl")]
    assert steps == [1, 1, 2, 2, 3, 3, 4, 4]
    evaluations = lines(tmp_path / "evaluations.jsonl")
    assert [(row["step"], row["eval/sampled_strict"]) for row in evaluations] == [
        (0, 0.0),
        (3, 0.7),
    ]


def test_resuming_before_the_first_checkpoint_begins_anew(tmp_path):
    with RunLog(tmp_path, 9) as log:
        record(log, 1)
    with RunLog(tmp_path, 9, resume_step=0) as log:
        record(log, 1, reward=0.7)
    assert [row["reward"] for row in lines(tmp_path / "metrics.jsonl")] == [0.7]


def test_a_damaged_file_is_named(tmp_path):
    with RunLog(tmp_path, 9) as log:
        record(log, 1)
    path = tmp_path / "metrics.jsonl"
    path.write_text("{damaged\n" + path.read_text())
    with pytest.raises(OutputError, match=r"metrics.jsonl has a damaged line"):
        RunLog(tmp_path, 9, resume_step=1)


ENDLESS = """
import sys
from tests.test_runlog import RunLog, record
log = RunLog(sys.argv[1], 10**6)
for step in range(1, 10**6):
    record(log, step)
"""


def test_a_killed_run_can_go_on(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    path = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 5000):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = lines_of_json(path)[-1]["step"]
    assert len({row["request_id"] for row in lines_of_json(tmp_path / "completions.jsonl")}) == 1
    with RunLog(tmp_path, 10**6, resume_step=last - 2) as log:
        record(log, last - 1)
    assert [row["step"] for row in lines(path)] == list(range(1, last))


FULL_DISK = """
import resource, sys
from tests.test_runlog import RunLog, record
log = RunLog(sys.argv[1], 10**6)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    for step in range(1, 1000):
        record(log, step)
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit to play a full disk")
def test_a_full_disk_leaves_whole_lines(tmp_path):
    done = run_script(FULL_DISK, str(tmp_path))
    said = done.stdout.splitlines()[-1]
    assert said.startswith(f"OutputError --out {tmp_path}: cannot write completions.jsonl (")
    assert "choose another folder" in said
    for name in ("metrics.jsonl", "completions.jsonl"):
        data = (tmp_path / name).read_bytes()
        assert 0 < len(data) <= 10_000 and data.endswith(b"\n") and lines_of_json(tmp_path / name)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_device_without_space_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"cannot write metrics.jsonl \(No space left"):
        append_lines(tmp_path / "metrics.jsonl", [{"step": 1}])


def test_an_unwritable_folder_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"--out .*file/run: cannot be written"):
        RunLog(tmp_path / "file" / "run", 1)
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(OutputError, match=r"--out .*closed: cannot be written"):
            RunLog(tmp_path / "closed", 1)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_text(path, "before")

    def half(beside: Path) -> None:
        beside.write_text("hal")
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        write_whole(path, half)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    with RunLog(tmp_path, 30) as log:
        log.say("[bold]as it is[/bold] :smile: " + "x" * 300)
        record(log, 3)
        record(log, 4)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[bold]as it is[/bold] :smile: " + "x" * 300
    assert out[1].startswith("step  3/30  reward 0.400")
    assert out[1].endswith("parity: 0 of 5,321 tokens differ | kl 0.0")
    assert out[2] == LOSS_NOTE and out.count(LOSS_NOTE) == 1
    assert "grad_norm" in LOSS_NOTE and "reward" in LOSS_NOTE
    assert len(out) == 4 and not any("\x1b" in line for line in out)


def test_kl_is_shown_as_zero_only_if_it_is():
    for kl, shown in ((0.0, "kl 0.0"), (3e-17, "kl 3.00e-17"), (None, "kl nan")):
        metrics = {**CLEAN, "parity/tokens_differing": 12, "kl/sampler_trainer": kl}
        line = step_line(1, 2, metrics)
        assert line.endswith(f"parity: 12 of 5,321 tokens differ | {shown}")


ON_A_TERMINAL = """
import os, pty, sys
code = "import sys; from tests.test_runlog import *\\nwith RunLog(sys.argv[1], 2) as log:"
code += "\\n record(log, 1); record(log, 2, **{'parity/tokens_differing': 4}); log.finish()"
sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, "-c", code, sys.argv[1]])))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_a_progress_bar_on_a_terminal(tmp_path):
    done = run_script(ON_A_TERMINAL, str(tmp_path), TERM="xterm-256color", COLUMNS="200")
    assert done.returncode == 0, done.stdout
    assert "0/2" in done.stdout and "━" in done.stdout and "\x1b[?25h" in done.stdout
    assert "\x1b[31mstep 2/2" in done.stdout and "4 of 5,321 tokens differ" in done.stdout


def test_finish_writes_table_summary_and_picture(tmp_path, capsys):
    with RunLog(tmp_path / "new" / "run", 12) as log:
        log.evaluation(0, {"eval/greedy_strict": 0.3, "eval/greedy_strict/low": 0.2})
        for step in range(1, 13):
            record(log, step, reward=step / 12)
        log.evaluation(12, {"eval/greedy_strict": 0.6, "eval/greedy_strict/high": 0.7})
        paths = log.finish({"greedy accuracy": "30.0%  ->  60.0%"})
    assert set(paths) == {"metrics", "completions", "evaluations", "summary", "curves"}
    assert all(Path(path).is_absolute() and Path(path).stat().st_size for path in paths.values())
    picture = Path(paths["curves"]).read_bytes()
    assert picture.startswith(b"\x89PNG") and picture.rstrip().endswith(b"IEND\xaeB`\x82")
    assert len(list((tmp_path / "new" / "run").iterdir())) == len(paths)
    summary = json.loads(Path(paths["summary"]).read_text())
    assert summary["tokens compared"] == f"{12 * 5321:,}" and summary["tokens differing"] == "0"
    assert summary["reward, first and last 5 steps"] == "0.250  ->  0.833"
    out = capsys.readouterr().out
    assert "30.0%  ->  60.0%" in out and all(path in out for path in paths.values())


@pytest.mark.parametrize("steps", [0, 1, 25])
@pytest.mark.parametrize("evaluations", [0, 1, 3])
def test_pictures_of_short_and_imperfect_runs(tmp_path, steps, evaluations):
    differing = {**CLEAN, "parity/tokens_differing": 3, "kl/sampler_trainer": 1e-7, "reward": None}
    rows = [{"step": step, **(differing if step % 2 else CLEAN)} for step in range(1, steps + 1)]
    scores = [{"step": step, "eval/a_b": 0.1 * step, "eval/c": 0.0} for step in range(evaluations)]
    draw_curves(tmp_path / "curves.png", rows, scores)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


HEALTHY_BATCH = [completion(), completion(reward=0.0), completion("18", 0.0), completion("", None)]


def test_a_healthy_step_has_no_complaints():
    assert complaints(HEALTHY, HEALTHY_BATCH) == {}
    half_cut = [completion(), completion("x", 0.0, "length")]
    assert complaints({"frac_reward_zero_std": 0.8}, half_cut) == {}
    assert complaints({}, []) == {}
    earned_without_the_form = [completion("it is 18", 1.0), completion("no idea", 0.0)]
    assert complaints(HEALTHY, earned_without_the_form) == {}


@pytest.mark.parametrize(
    ("name", "mend", "metrics", "batch"),
    [
        ("truncated", "--max-tokens", {}, [completion(reason="length")] * 2 + [completion()]),
        ("dead groups", "--group-size", {"frac_reward_zero_std": 0.81}, HEALTHY_BATCH),
        ("zero rewards", "completions.jsonl", {}, [completion(reward=0.0), completion("", None)]),
        (
            "answer form",
            "--instruction",
            {},
            [completion("it is 18", -1.0)] * 2,
        ),
        ("unjudged", "reward functions", {}, [completion(reward=None)] * 2),
    ],
)
def test_complaints(name, mend, metrics, batch):
    said = complaints({**HEALTHY, **metrics}, batch)
    assert list(said) == [name]
    assert mend in said[name] and "\n" not in said[name]


def test_a_warning_is_said_once(tmp_path, capsys):
    with RunLog(tmp_path, 5) as log:
        for step in (1, 2, 3):
            record(log, step, frac_reward_zero_std=0.9)
    assert capsys.readouterr().out.count("warning: 90% of groups") == 1


def test_heavy_libraries_are_left_alone():
    script = "import sys, recipes.runlog, recipes.gsm8k, recipes.data, recipes.rewards\n"
    script += "log = recipes.runlog.RunLog(sys.argv[1], 1)\nlog.close()\n"
    script += "print([m for m in ('torch', 'matplotlib', 'wandb', 'datasets') if m in sys.modules])"
    done = run_script(script, os.devnull + "/none")
    assert "OutputError" in done.stderr
    done = run_script(script.replace("sys.argv[1]", "__import__('tempfile').mkdtemp()"))
    assert done.stdout.splitlines() == ["[]"], done.stderr


WITH_WANDB = """
import sys
from tests.test_runlog import *
try:
    with RunLog(sys.argv[2], 2, sys.argv[1], {"seed": 0}) as log:
        log.step(1, {**HEALTHY, **CLEAN}, [completion(tokens=n) for n in range(40)])
        log.finish()
except WandbError as error:
    print("WandbError", error)
"""


def test_wandb_offline_keeps_all_completions(tmp_path):
    done = run_script(WITH_WANDB, "offline", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "wandb sync" in done.stdout
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    (table,) = run.glob("files/media/table/*.json")
    tokens = json.loads(table.read_text())["data"]
    assert len(tokens) == 40
    assert (tmp_path / "wandb_id").read_text().strip() in run.name


def test_wandb_online_without_a_login_names_the_flag(tmp_path):
    home = {"HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "netrc")}
    done = run_script(WITH_WANDB, "online", str(tmp_path / "run"), **home)
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("WandbError")]
    assert "--wandb online" in said and "wandb login" in said and "offline" in said


def test_wandb_modes_are_checked(tmp_path):
    with pytest.raises(WandbError, match="--wandb on: use one of disabled, offline, online"):
        RunLog(tmp_path, 1, "on")


def test_a_failing_wandb_does_not_stop_the_run(tmp_path, capsys):
    class Failing:
        def log(self, values):
            raise RuntimeError("no\nspace")

    with RunLog(tmp_path, 2) as log:
        log._wandb._run = Failing()
        log._wandb._wandb = __import__("types").SimpleNamespace(Table=lambda **table: table)
        record(log, 1)
        record(log, 2)
    assert len(lines(tmp_path / "metrics.jsonl")) == 2
    assert capsys.readouterr().out.count("W&B stopped taking the log (no space)") == 1
