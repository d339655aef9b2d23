"""A run on Weights & Biases, from the driver only, and only when asked for."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.durable import write_text

MODES = ("disabled", "offline", "online")
PROJECT = "zerokl"
LOGIN_SECONDS = 30
ID_FILE = "wandb_id"


class WandbError(ValueError):
    """Weights & Biases cannot be used as --wandb asks."""


class WandbLog:
    """Metrics and all completions of each step; nothing at all in mode "disabled".

    A resumed run goes on under the id that the folder keeps. `step` is the x axis, and no step
    number is given to the library: it would throw away the steps that a resumed run repeats.
    A failure after the start is said once and never stops the training.
    """

    def __init__(self, folder: Path, mode: str, config: Mapping[str, Any], say: Callable):
        if mode not in MODES:
            raise WandbError(f"--wandb {mode}: use one of {', '.join(MODES)}")
        self._run: Any = None
        self._wandb: Any = None
        self._say = say
        if mode != "disabled":
            self._wandb = _library(mode)
            self._run = self._start(folder, mode, config)
            self._run.define_metric("*", step_metric="step")
            say(f"W&B {mode}: {self._run.url or self._run.settings.sync_dir}")

    def _start(self, folder: Path, mode: str, config: Mapping[str, Any]) -> Any:
        kept = folder / ID_FILE
        identity = kept.read_text().strip() if kept.exists() else secrets.token_hex(4)
        try:
            run = self._wandb.init(
                project=PROJECT,
                dir=str(folder),
                mode=mode,
                config=dict(config),
                id=identity,
                resume="allow",
                name=folder.name,
                settings=self._wandb.Settings(silent=True, init_timeout=LOGIN_SECONDS),
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise WandbError(
                f"--wandb {mode}: cannot start ({reason}): "
                "run `wandb login`, or use --wandb offline or disabled"
            ) from error
        write_text(kept, identity + "\n")
        return run

    def log(self, record: Mapping[str, Any], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Sends one record, with a table of all the completions if there are any."""
        if self._run is None:
            return
        try:
            values = {name: value for name, value in record.items() if value is not None}
            if completions:
                columns = list(completions[0])
                rows = [[_cell(one.get(name)) for name in columns] for one in completions]
                values["completions"] = self._wandb.Table(columns=columns, data=rows)
            self._run.log(values)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            self._run = None
            self._say(f"warning: W&B stopped taking the log ({reason}); the files go on")

    def finish(self, exit_code: int) -> None:
        """Sends what is left and closes the run; a second time does nothing."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)
            if run.settings.mode == "offline":
                self._say(
                    f"W&B offline run kept; upload it with: wandb sync {run.settings.sync_dir}"
                )


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)


def _library(mode: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise WandbError(f"--wandb {mode}: wandb is not installed: pip install wandb") from error
    return wandb
