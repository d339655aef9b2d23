"""What the bit tests of this process compared. Without torch, for the process that only reports."""

from __future__ import annotations

from typing import NamedTuple


class Tally(NamedTuple):
    compared: int = 0
    differing: int = 0
    place: str = ""

    def __str__(self) -> str:
        counts = f"{self.compared:,} values compared, {self.differing:,} differ"
        return f"bits: {counts} ({self.place})"


_total = Tally()


def add(compared: int, differing: int, place: str) -> None:
    """place: the instructions and threads that a process started with."""
    global _total
    _total = Tally(_total.compared + compared, _total.differing + differing, place or _total.place)


def total() -> Tally:
    return _total
