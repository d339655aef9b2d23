"""The run on the screen: a progress bar on a terminal, plain lines anywhere else."""

from collections.abc import Mapping
from typing import Any, TextIO

FILE_WIDTH = 160
LOSS_NOTE = (
    "note: on fresh samples a GRPO loss near 0 is right (a group's advantages sum to 0 and ratios "
    "are 1; lengths leave a rest); learning shows in reward, a live gradient in grad_norm"
)


class Console:
    """Prints a run's lines, above a progress bar where the stream is a terminal.

    Lines are never wrapped or cut, so that a log file holds each of them whole.
    """

    def __init__(self, stream: TextIO | None = None):
        from rich.console import Console as RichConsole

        self._rich = RichConsole(file=stream, highlight=False, markup=False, emoji=False)
        if not self._rich.is_terminal:
            self._rich.width = FILE_WIDTH
        self._progress: Any = None

    def line(self, text: str, style: str | None = None) -> None:
        """Prints one line."""
        self._rich.print(text, style=style, soft_wrap=True)

    def advance(self) -> None:
        """One step more is done."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    def table(self, title: str, rows: Mapping[str, Any]) -> None:
        """Prints name and value, one row each."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, box=box.SIMPLE, show_header=False, title_justify="left")
        for name, value in rows.items():
            table.add_row(Text(name), Text(str(value)))
        self._rich.print(table)

    def close(self) -> None:
        """Takes the progress bar away; a second time does nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def start_bar(self, total_steps: int, done: int) -> None:
        """Shows the progress bar from now on; on a stream that is no terminal there is none."""
        if not self._rich.is_terminal:
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._rich,
            refresh_per_second=2,
            transient=True,
        )
        self._progress.add_task("steps", total=total_steps, completed=done)
        self._progress.start()


def step_line(step: int, total_steps: int, metrics: Mapping[str, Any]) -> str:
    """`step 3/30  reward 0.41  ...  parity: 0 of 5,321 tokens differ | kl 0.0`.

    metrics: the step's record; names that it lacks are left out.
    """
    width = len(str(total_steps))
    parts = [f"step {step:>{width}}/{total_steps}"]
    for label, name, form in (
        ("reward", "reward", "{:.3f}"),
        ("length", "completions/mean_length", "{:.0f}"),
        ("cut", "completions/clipped_ratio", "{:.0%}"),
        ("loss", "loss", "{:+.1e}"),
        ("grad_norm", "grad_norm", "{:.3f}"),
        ("s", "step_time", "{:.1f}"),
    ):
        value = metrics.get(name)
        if value is not None:
            shown = form.format(value)
            parts.append(f"{shown} s" if label == "s" else f"{label} {shown}")
    return "  ".join(parts) + f"  {parity_phrase(metrics)}"


def parity_phrase(metrics: Mapping[str, Any]) -> str:
    """`parity: 0 of 5,321 tokens differ | kl 0.0`; a KL of 0 is shown only where it is exact.

    Stale tokens that were scored again under the weights that drew them are among them.
    """
    kl = metrics["kl/sampler_trainer"]
    shown = "0.0" if kl == 0 else "nan" if kl is None else f"{kl:.2e}"
    stale = metrics.get("parity/lag_rescored_compared") or 0
    compared = metrics["parity/tokens_compared"] + stale
    differing = metrics["parity/tokens_differing"]
    differing += metrics.get("parity/lag_rescored_differing") or 0
    phrase = f"parity: {differing:,} of {compared:,} tokens differ"
    if stale:
        phrase += f" ({stale:,} stale, under their own weights)"
    return f"{phrase} | kl {shown}"
