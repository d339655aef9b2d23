"""What the bit tests compare with: exact counts, at given thread counts."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int64: torch.int64}


def differing(got: Tensor, wanted: Tensor) -> int:
    """Values whose bits differ, or that are NaN; shapes and dtypes must agree."""
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
