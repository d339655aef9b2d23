"""The record of a run: files that outlive a kill, the console, trackers when asked, a picture.

In the run's folder:

* metrics.jsonl: one line a step, parity first; complete on disk before `step` returns.
* completions.jsonl: every completion of every step.
* evaluations.jsonl: one line an evaluation, `eval/*`; step 0 is before the first update.
* curves.png, summary.json: at the end. stopped.json instead, where an error ended the run.
"""

import atexit
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipes.console import LOSS_NOTE, Console, step_line
from recipes.curves import draw_curves
from recipes.durable import (
    OutputError,
    append_lines,
    json_line,
    keep_steps,
    plain,
    read_lines,
    require_writable,
    write_text,
)
from recipes.health import complaints
from recipes.tensorboard_log import TensorboardLog
from recipes.trackio_log import TrackioLog
from recipes.wandb_log import WandbLog

PARITY = (
    "parity/tokens_compared",
    "parity/tokens_differing",
    "parity/max_ulp",
    "kl/sampler_trainer",
)
AT_THE_HEAD = ("parity/", "lag/", "kl/")
ENDS = 5
STOPPED = "stopped.json"


class RunLog:
    """Writes what happens in a run of `total_steps` into `folder`, which is made if need be.

    wandb_mode: "disabled", "offline" or "online". config: the run's settings, for W&B.
    resume_step: None for a new run; else the step that the loaded checkpoint was made after (0:
    none), and all that later steps had written is dropped, so that no step occurs twice.
    tensorboard, trackio: whether to write TensorBoard's, and trackio's, files into the folder too.
    Use it as a context manager, or call `finish` or `close`.
    Raises OutputError for a folder that cannot be written or holds another run, WandbError,
    TensorboardError, TrackioError.
    """

    def __init__(
        self,
        folder: str | Path,
        total_steps: int,
        wandb_mode: str = "disabled",
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        tensorboard: bool = False,
        trackio: bool = False,
    ):
        self.folder, self.total_steps = Path(folder).expanduser().absolute(), total_steps
        self.metrics_path = self.folder / "metrics.jsonl"
        self.completions_path = self.folder / "completions.jsonl"
        self.evaluations_path = self.folder / "evaluations.jsonl"
        self._last_step, self._said = resume_step or 0, set()
        require_writable(self.folder)
        self._align_files(resume_step)
        self._console = Console()
        settings = plain(config or {})
        self._wandb = WandbLog(self.folder, wandb_mode, settings, self.say)
        self._sinks: list[WandbLog | TensorboardLog | TrackioLog] = [self._wandb]
        if tensorboard:
            self._sinks.append(TensorboardLog(self.folder, resume_step, self.say))
        if trackio:
            self._sinks.append(TrackioLog(self.folder, settings, self._past(), self.say))
        self._console.start_bar(total_steps, self._last_step)
        atexit.register(self.close)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)

    def say(self, text: str) -> None:
        """Prints a line, above the progress bar where there is one."""
        self._console.line(text)

    def step(
        self, step: int, metrics: Mapping[str, Any], completions: Sequence[Mapping[str, Any]]
    ) -> None:
        """Records one step (from 1, rising): a line of metrics, and all its completions.

        metrics: must hold the four names in PARITY; one-element tensors and numpy scalars will do.
        completions: records with request_id, prompt, completion, tokens, reward, advantage and
        finish_reason; more fields are kept.
        Raises OutputError where a file cannot be written, ValueError for a repeated step.
        """
        record = self._record(step, metrics)
        rows = [{"step": step, **one} for one in completions]
        append_lines(self.completions_path, rows)
        append_lines(self.metrics_path, [record])
        self._last_step = step
        self._send(record, rows)
        self._show(step, record, completions)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records an evaluation after `step` updates (0: before any); a second one replaces it.

        metrics: `eval/<kind>` as a share, `eval/<kind>/low` and `/high` as its 95% interval.
        """
        record = {"step": step, **plain(metrics)}
        others = [row for row in read_lines(self.evaluations_path) if row["step"] != step]
        rows = sorted([*others, record], key=lambda row: row["step"])
        write_text(self.evaluations_path, "".join(map(json_line, rows)))
        self._send(record)

    def finish(self, summary: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Prints the closing table (own rows and `summary`), draws the picture; name -> path."""
        steps = list(read_lines(self.metrics_path))
        evaluations = list(read_lines(self.evaluations_path))
        rows = {**_own_rows(steps), **plain(summary or {})}
        summary_path = self.folder / "summary.json"
        write_text(summary_path, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        paths = {
            "metrics": self.metrics_path,
            "completions": self.completions_path,
            "evaluations": self.evaluations_path,
            "summary": summary_path,
            "curves": self.folder / "curves.png",
        }
        try:
            draw_curves(paths["curves"], steps, evaluations)
        except ImportError as error:
            self.say(f"warning: no curves.png ({error}): pip install matplotlib")
        written = {name: str(path) for name, path in paths.items() if path.exists()}
        self._end(rows, written)
        return written

    def stopped(self, reason: str) -> None:
        """Records what ended the run before its time, for its report."""
        record = {"step": self._last_step, "reason": reason}
        with suppress(OutputError):
            write_text(self.folder / STOPPED, json_line(record))

    def close(self, exit_code: int = 1) -> None:
        """Ends bar and W&B run of a run that stops early; after `finish` it does nothing."""
        atexit.unregister(self.close)
        for sink in self._sinks:
            sink.finish(exit_code)
        self._console.close()

    def _send(self, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()) -> None:
        for sink in self._sinks:
            sink.log(record, rows)

    def _past(self) -> list[dict[str, Any]]:
        rows = [*read_lines(self.evaluations_path), *read_lines(self.metrics_path)]
        return sorted(rows, key=lambda row: row["step"])

    def _align_files(self, resume_step: int | None) -> None:
        if resume_step is None and self.metrics_path.exists():
            raise OutputError(
                f"--out {self.folder}: already holds a run: choose another folder, or --resume auto"
            )
        for path in (self.metrics_path, self.completions_path, self.evaluations_path):
            keep_steps(path, resume_step or 0)
        (self.folder / STOPPED).unlink(missing_ok=True)

    def _record(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in PARITY if name not in metrics]
        if missing:
            raise ValueError(f"metrics of step {step}: lack {', '.join(missing)}, add them")
        if step <= self._last_step:
            raise ValueError(f"step {step}: {self._last_step} is recorded already, go on from it")
        head = [*PARITY, *(name for name in metrics if name.startswith(AT_THE_HEAD))]
        rest = {name: value for name, value in metrics.items() if name not in head}
        return plain({**{name: metrics[name] for name in head}, "step": step, **rest})

    def _show(self, step: int, record: Mapping[str, Any], completions) -> None:
        style = "red" if record["parity/tokens_differing"] else None
        self._console.line(step_line(step, self.total_steps, record), style)
        self._console.advance()
        for name, text in complaints(record, completions).items():
            self._once(name, f"warning: {text}")
        lost = [name for name, value in record.items() if value is None]
        if lost:
            self._once("no number", f"warning: NaN or infinite at step {step}: {', '.join(lost)}")
        if "loss" in record:
            self._once("loss", LOSS_NOTE)

    def _once(self, name: str, text: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self.say(text)

    def _end(self, rows: Mapping[str, Any], written: Mapping[str, str]) -> None:
        self._console.close()
        self._console.table("result", rows)
        for name, path in written.items():
            self.say(f"{name:<12} {path}")
        self.close(exit_code=0)


def _own_rows(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table's rows that follow from metrics.jsonl, over resumed parts of the run as well."""
    if not steps:
        return {"steps": 0}
    rewards = [row["reward"] for row in steps if row.get("reward") is not None]
    count = min(ENDS, max(1, len(rewards) // 2))
    rows: dict[str, Any] = {"steps": len(steps)}
    if rewards:
        first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
        ends = f"first and last {count} step{'s' * (count > 1)}"
        rows[f"reward, {ends}"] = f"{first:.3f}  ->  {last:.3f}"
    compared, differing, ulp, kl = ([row[name] for row in steps] for name in PARITY)
    rows["tokens compared"] = f"{sum(compared):,}"
    rows["tokens differing"] = f"{sum(differing):,}"
    stale = sum(row.get("parity/lag_rescored_compared") or 0 for row in steps)
    if stale:
        wrong = sum(row.get("parity/lag_rescored_differing") or 0 for row in steps)
        rows["stale tokens scored again, differing"] = f"{stale:,}, {wrong:,}"
    rows["largest difference"] = f"{max(ulp)} units in the last place"
    rows["largest KL(sampler || trainer)"] = max(abs(each or 0.0) for each in kl)
    return rows
