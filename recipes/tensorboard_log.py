"""A run's metrics for TensorBoard, in the run's folder, when asked for."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"


class TensorboardError(ValueError):
    """TensorBoard's files cannot be written as --tensorboard asks."""


class TensorboardLog:
    """Every number of each record as a scalar at the record's step; completions stay in their file.

    Steps after `resume_step` (None: a new run) that a killed run had logged are hidden. A failure
    after the start is said once and never stops the training.
    """

    def __init__(self, folder: Path, resume_step: int | None, say: Callable[[str], None]):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TensorboardError(
                f"--tensorboard: cannot be imported ({error}): pip install tensorboard"
            ) from error
        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(folder / FOLDER), purge_step=purge)
        self._say = say

    def log(self, record: Mapping[str, Any], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Writes one record, which holds its step."""
        if self._writer is None:
            return
        try:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._writer.add_scalar(name, value, record["step"])
            self._writer.flush()
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            self._writer = None
            self._say(f"warning: TensorBoard stopped taking the log ({reason}); the files go on")

    def finish(self, exit_code: int) -> None:
        """Closes the file; a second time does nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
