"""A run's metrics for trackio's dashboard, kept in the run's folder, when asked for."""

import io
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

FOLDER, PROJECT = "trackio", "zerokl"
ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioError(ValueError):
    """Trackio cannot be used as --trackio asks."""


class TrackioLog:
    """Every number of each record at the record's step; completions stay in their file.

    The folder holds one trackio run. A resumed run goes on in it, first written anew from `past`,
    the records that the run's own files keep: trackio writes from a thread, so that a kill can
    leave it with steps that were dropped since, or without steps that count.
    A failure after the start is said once and never stops the training.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        past: Sequence[Mapping[str, Any]],
        say: Callable[[str], None],
    ):
        self._say = say
        place = folder / FOLDER
        with _kept_in(place):
            self._trackio = _library(place)
            self._run = _start(self._trackio, folder.name, config)
        say(f"trackio: TRACKIO_DIR={shlex.quote(str(place))} trackio show --project {PROJECT}")
        for record in past:
            self.log(record)

    def log(self, record: Mapping[str, Any], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Queues one record, which holds its step."""
        if self._run is None:
            return
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        step = numbers.pop("step")
        try:
            self._run.log(numbers, step=step)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            self._run = None
            self._say(f"warning: trackio stopped taking the log ({reason}); the files go on")

    def finish(self, exit_code: int) -> None:
        """Writes what is queued and ends the run; a second time does nothing."""
        run, self._run = self._run, None
        if run is not None:
            with redirect_stdout(io.StringIO()):
                self._trackio.finish()


def _start(trackio: Any, name: str, config: Mapping[str, Any]) -> Any:
    """The folder's only run, empty; no samples of the machine's load."""
    try:
        with redirect_stdout(io.StringIO()):
            for earlier in _earlier(trackio):
                name = earlier.name
                earlier.delete()
            return trackio.init(
                project=PROJECT,
                name=name,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise TrackioError(f"--trackio: cannot start ({reason}): leave it out") from error


def _earlier(trackio: Any) -> list[Any]:
    with suppress(ValueError):  # no such project
        return list(trackio.Api().runs(PROJECT))
    return []


def _library(place: Path) -> Any:
    try:
        import trackio  # pyright: ignore[reportMissingImports]
        from trackio.utils import TRACKIO_DIR  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TrackioError(
            f"--trackio: cannot be imported ({error}): pip install trackio"
        ) from error
    if Path(TRACKIO_DIR) != place:
        raise TrackioError(
            f"--trackio: this process keeps trackio's files in {TRACKIO_DIR} already, and trackio "
            "takes one folder a process: start the run in a process of its own"
        )
    return trackio


@contextmanager
def _kept_in(place: Path) -> Iterator[None]:
    """Trackio reads its folder when it is imported; what sends the run elsewhere is set aside."""
    before = {name: os.environ.get(name) for name in ("TRACKIO_DIR", *ELSEWHERE)}
    os.environ["TRACKIO_DIR"] = str(place)
    for name in ELSEWHERE:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
