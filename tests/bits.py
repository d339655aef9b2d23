"""What the bit tests compare with: exact counts, at given thread counts."""

from __future__ import annotations

from contextlib import contextmanager

import tally
import torch
from torch import Tensor

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int64: torch.int64}
# One and two, and as many as this process was started with.
STARTED_WITH = torch.get_num_threads()
THREAD_COUNTS = tuple(sorted({1, 2, STARTED_WITH}))
_CAPABILITY = torch.backends.cpu.get_cpu_capability()
PLACE = f"{_CAPABILITY}, {STARTED_WITH} thread{'s' * (STARTED_WITH > 1)}"


def differing(got: Tensor, wanted: Tensor) -> int:
    """Values whose bits differ, or that are NaN; shapes and dtypes must agree."""
    wrong = differing_in_control(got, wanted)
    tally.add(got.numel(), wrong, PLACE)
    return wrong


def differing_in_control(got: Tensor, wanted: Tensor) -> int:
    """As `differing`, of values that are meant to differ: they stay out of the tally."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    word = WORDS[got.dtype]
    same = got.detach().contiguous().view(word) == wanted.detach().contiguous().view(word)
    return int((~same | got.isnan()).sum())


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
