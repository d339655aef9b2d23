"""Files that a crash, a kill or a full disk leaves whole: appended line by line, or replaced."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class OutputError(ValueError):
    """The run's folder cannot take what is to be written; names --out."""


def output_error(path: Path, error: OSError) -> OutputError:
    """One line for a write that failed."""
    return OutputError(
        f"--out {path.parent}: cannot write {path.name} ({error.strerror or error}): "
        "free space there, or choose another folder"
    )


def require_writable(folder: Path) -> None:
    """Makes the folder if need be and tries it with a file.

    Raises OutputError where that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".write-test-") as file:
            file.write(b"\n" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(
            f"--out {folder}: cannot be written ({error.strerror or error}): "
            "choose another folder, or mend this one's rights and space"
        ) from error


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends one JSON line a record, all of them or none, and waits until they are on disk.

    Raises OutputError where the disk takes only a part; that part is cut off again.
    """
    data = "".join(json_line(record) for record in records).encode("utf-8", "replace")
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _write_all(handle, data)
        finally:
            os.close(handle)
    except OSError as error:
        raise output_error(path, error) from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file beside `path`, which then takes its place in one move.

    Raises OutputError where that fails; `path` is then as it was.
    """
    beside = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise output_error(path, error) from error
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_whole` for a text, as UTF-8."""
    write_whole(path, lambda beside: beside.write_text(text, "utf-8", "replace"))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON lines file, without a last line that a kill cut short."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    raise OutputError(
                        f"--out {path.parent}: {path.name} has a damaged line: "
                        "remove that line, or choose another folder"
                    ) from None


def keep_steps(path: Path, last_step: int) -> None:
    """Drops the records of later steps than `last_step`, so that resuming repeats none."""

    def write(beside: Path) -> None:
        with beside.open("w", encoding="utf-8", errors="replace") as file:
            for record in read_lines(path):
                if record["step"] <= last_step:
                    file.write(json_line(record))

    if path.exists():
        write_whole(path, write)


def json_line(record: Mapping[str, Any]) -> str:
    """One line of JSON; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(plain(record), ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """The value in JSON's own types: one-element tensors and numpy scalars as Python numbers."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _write_all(handle: int, data: bytes) -> None:
    size, left = os.fstat(handle).st_size, memoryview(data)
    try:
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    except OSError:
        with suppress(OSError):
            os.ftruncate(handle, size)
        raise
