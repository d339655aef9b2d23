"""The kill-and-resume matrix: a run killed with SIGKILL anywhere ends as one never killed.

    python -m benchmarks.bench_resume [--only NAME ...] [--device cuda] [--workers 12]

Small runs of the recipe (`--runtime inline`, two updates a batch, an epoch's edge inside every
other step, evaluation after every step) are killed at named places by benchmarks/kill_runner.py,
resumed with `--resume auto`, and compared with a run that was left alone: digests of every file of
the last checkpoint, metrics (timings aside), completions, evaluations, summary, and the names of
all files. Writes benchmarks/results/resume_cpu.json, or resume_cuda.json.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bench_learning import environment
from recipes.wordproblems import problem

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
STEPS, ROWS, HELD_OUT = 6, 5, 2
SETTINGS = [
    *("--preset", "tiny", "--runtime", "inline", "--threads", "1"),
    *("--steps", str(STEPS), "--prompts-per-step", "3", "--group-size", "4"),
    *("--max-tokens", "24", "--updates-per-batch", "2", "--save-every", "2"),
    *("--evaluation.problems", str(HELD_OUT), "--evaluation.every", "1"),
]
DYNAMIC: tuple[str, ...] = ("--filter-groups.enable", "--filter-groups.max-num-gen-batches", "3")
TIMINGS = ("time/", "step_time", "tokens_per_second/")


@dataclass(frozen=True)
class Kill:
    """Where a run dies (see kill_runner), and what else befalls it.

    on_gpu: target, call and manner on a GPU, where they are not these (in a target `kernels` takes
    the place of `reference` by itself).
    again: a second target, call and manner, at which the resumed run dies too.
    damage: the newest checkpoint loses a byte between death and resumption.
    words: settings of this run, and of the one left alone that it is compared with.
    """

    name: str
    target: str
    call: int
    how: str = "before"
    again: tuple[str, int, str] | None = None
    damage: bool = False
    words: tuple[str, ...] = ()
    on_gpu: tuple[str, int, str] | None = None

    def on(self, device: str) -> "Kill":
        """The same kill as it is on a device."""
        if device == "cpu":
            return self
        target, call, how = self.on_gpu or (self.target, self.call, self.how)
        target = target.replace(".reference:", ".kernels:")
        return replace(self, target=target, call=call, how=how)


KILLS = (
    Kill("before the settings are in place", "recipes.run_folder:os.replace", 1),
    Kill("first evaluation", "rollout.engine:Engine._advance", 10),
    Kill("first step, nothing saved yet", "recipes.task:Task.rewards", 1),
    Kill("rollout, in the middle of a batch", "recipes.job:Job.samples", 3),
    Kill("rollout, between two tokens", "rollout.engine:Engine._commit", 350),
    Kill("rewards, on an epoch's edge", "recipes.task:Task.rewards", 4),
    Kill("scoring before the first update", "trainer.score:Scorer.score", 9, "after"),
    Kill("backward", "shared_ops.logprob.reference:token_logprobs_backward", 3),
    Kill("backward, inside a layer", "shared_ops.linear.reference:backward", 5),
    Kill(
        "inside an optimiser step",
        *("trainer.optimizer:AdamW._step_one", 40),
        on_gpu=("trainer.optimizer_kernels:adamw", 2, "after"),
    ),
    Kill("between two updates of a batch", "trainer.trainer:Trainer.step", 6),
    Kill("publishing, before the copy", "shared_ops.model.weights:Weights.copy_from", 3),
    Kill("publishing, after the copy", "shared_ops.model.weights:Weights.copy_from", 4, "after"),
    Kill("before the completions' lines", "recipes.runlog:append_lines", 5),
    Kill("within a completion's line", "recipes.durable:_write_all", 5, "cut"),
    Kill("between completions and metrics", "recipes.runlog:append_lines", 6),
    Kill("within a metrics line", "recipes.durable:_write_all", 8, "cut"),
    Kill("evaluation after a step", "recipes.evaluate:as_metrics", 4),
    Kill("evaluation, before its line", "recipes.runlog:RunLog.evaluation", 3),
    Kill("evaluation, after its line", "recipes.runlog:RunLog.evaluation", 3, "after"),
    Kill("before a checkpoint", "trainer.checkpoint:write", 1),
    Kill("checkpoint, weights written", "trainer.checkpoint:save_file", 2),
    Kill("checkpoint, digests missing", "trainer.checkpoint:_sha256", 12),
    Kill("checkpoint, not yet in place", "trainer.checkpoint:_flush", 9, "after"),
    Kill("after a checkpoint", "trainer.checkpoint:write", 1, "after"),
    Kill("while an old checkpoint goes", "trainer.checkpoint:shutil.rmtree", 4),
    Kill("last checkpoint", "trainer.checkpoint:write", 3, "after"),
    Kill("closing evaluation", "recipes.job:Job.end", 1),
    Kill("closing picture", "recipes.runlog:draw_curves", 1),
    Kill(
        "twice: in a rollout, and as the resumed run trims its files",
        *("recipes.task:Task.rewards", 4, "before"),
        again=("recipes.durable:os.replace", 1, "before"),
    ),
    Kill(
        "twice: in an update, and in the resumed run's first one",
        *("trainer.trainer:Trainer.step", 6, "before"),
        again=("trainer.optimizer:AdamW.step", 1, "after"),
    ),
    Kill(
        "after the last checkpoint, which is then damaged",
        *("recipes.job:Job.end", 1, "before"),
        damage=True,
    ),
    Kill(
        "dynamic sampling, between two rounds of a step",
        *("recipes.task:Task.rewards", 8, "before"),
        words=DYNAMIC,
    ),
    Kill(
        "dynamic sampling, in the last step's update",
        *("trainer.trainer:Trainer.step", 11, "after"),
        words=DYNAMIC,
    ),
)


def write_data(folder: Path) -> None:
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", HELD_OUT)):
        lines = [json.dumps(problem(split, index)) for index in range(rows)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def run(
    scratch: Path, out: str, words: Sequence[str], kill: tuple[str, int, str] | None = None
) -> int:
    """The exit code of one run of the recipe into scratch/out; negative for a signal."""
    module = ["recipes.grpo_gsm8k"]
    if kill:
        module = ["benchmarks.kill_runner", *map(str, kill), "--"]
    command = [sys.executable, "-m", *module, *words, "--out", str(scratch / out)]
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (scratch / f"{out}.log").open("ab") as log:
        return subprocess.run(
            command,
            cwd=PROJECT,
            env=os.environ | threads,
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode


def settings(scratch: Path, device: str, words: Sequence[str]) -> list[str]:
    """Of a run of the matrix. words: settings of its own."""
    return [*SETTINGS, "--device", device, "--data", str(scratch / "data"), *words]


def killed_and_resumed(scratch: Path, kill: Kill, out: str, words: Sequence[str]) -> None:
    """Die, perhaps twice, and go on to the end. words: every setting of the run.

    Raises:
        RuntimeError: the run did not die where it should, or did not end well.
    """
    deaths = [(kill.target, kill.call, kill.how), *([kill.again] if kill.again else [])]
    for number, death in enumerate(deaths):
        resume = ("--resume", "auto") if number else ()
        code = run(scratch, out, [*words, *resume], kill=death)
        if code != -signal.SIGKILL:
            raise RuntimeError(f"{kill.name}: exit code {code}, not killed; {_tail(scratch, out)}")
    if kill.damage:
        _damage_newest(scratch / out / "checkpoints")
    code = run(scratch, out, [*words, "--resume", "auto"])
    if code:
        raise RuntimeError(f"{kill.name}: the resumed run ended with {code}; {_tail(scratch, out)}")


def _tail(scratch: Path, out: str) -> str:
    return (scratch / f"{out}.log").read_text(errors="replace")[-500:]


def _damage_newest(checkpoints: Path) -> None:
    file = max(checkpoints.glob("step-*")) / "training.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def outcome(folder: Path) -> dict[str, Any]:
    """What a run leaves, without times: file digests, lines, and names of all files."""
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    return {
        "last checkpoint": json.loads((checkpoint / "digests.json").read_text()),
        "metrics": without_timings(folder / "metrics.jsonl"),
        "completions": (folder / "completions.jsonl").read_text(),
        "evaluations": (folder / "evaluations.jsonl").read_text(),
        "summary": json.loads((folder / "summary.json").read_text()),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
    }


def without_timings(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMINGS)} for row in rows]


def reference_run(
    scratch: Path, words: tuple[str, ...] = (), device: str = "cpu"
) -> dict[str, Any]:
    """The outcome of a run left alone.

    Raises:
        RuntimeError: it failed, or is no test: it must learn, and see an epoch's edge and lag.
    """
    out = "dynamic" if words else "reference"
    if code := run(scratch, out, settings(scratch, device, words)):
        raise RuntimeError(f"the run left alone ended with {code}; {_tail(scratch, out)}")
    left = outcome(scratch / out)
    rows = left["metrics"]
    if not all(row["lag/versions_max"] == 1 for row in rows) or not rows[0]["grad_norm"] > 0:
        raise RuntimeError("the run left alone has no gradient or no lag, so it tests nothing")
    return left


def compare(
    scratch: Path, kill: Kill, wanted: dict[str, Any], out: str, device: str = "cpu"
) -> list[str]:
    """Names of the parts that differ from the run left alone."""
    killed_and_resumed(scratch, kill.on(device), out, settings(scratch, device, kill.words))
    got = outcome(scratch / out)
    return [name for name in wanted if got[name] != wanted[name]]


def run_kills(scratch: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The report: every wanted kill, `given.workers` at a time, beside the runs left alone."""
    write_data(scratch / "data")
    kills = [kill for kill in KILLS if not given.only or kill.name in given.only]

    def row_of(numbered: tuple[int, Kill]) -> dict[str, Any]:
        number, kill = numbered
        kill, began = kill.on(given.device), time.perf_counter()
        try:
            differing = compare(scratch, kill, wanted[kill.words], f"run{number}", given.device)
        except RuntimeError as error:  # the other kills still tell something
            differing = [str(error)]
        seconds = time.perf_counter() - began
        print(f"{kill.name:<60} {', '.join(differing) or 'equal'}  {seconds:.0f} s", flush=True)
        row = {"kill": kill.name, "target": kill.target, "call": kill.call, "how": kill.how}
        return row | {"differing": differing}

    with ThreadPoolExecutor(given.workers) as pool:
        words = ((), DYNAMIC)
        left = pool.map(lambda each: reference_run(scratch, each, given.device), words)
        wanted = dict(zip(words, left, strict=True))
        rows = list(pool.map(row_of, enumerate(kills)))
    return {
        "environment": environment(given.device, given.commit),
        "settings": [*SETTINGS, "--device", given.device],
        "digests": wanted[()]["last checkpoint"],
        "dynamic sampling": wanted[DYNAMIC]["last checkpoint"],
        "kills": rows,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", help="names of kills; all without it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs beside each other")
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results, of all kills")
    parser.add_argument("--commit", help="default: git's HEAD")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        report = run_kills(Path(name), given)
    kills = report["kills"]
    wrong = sum(bool(row["differing"]) for row in kills)
    print(f"{len(kills)} kills, {wrong} of them ended otherwise than the run left alone")
    output = given.output or (None if given.only else RESULTS / f"resume_{given.device}.json")
    if output:
        output.write_text(json.dumps(report, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
