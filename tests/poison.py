"""`torch.empty` filled with NaN, so that an element that no kernel writes cannot pass a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def _poisoned(make):
    def wrapper(*args, **kwargs) -> Tensor:
        made = make(*args, **kwargs)
        if made.is_floating_point():
            return made.fill_(float("nan"))
        return made.fill_(1 if made.dtype == torch.bool else torch.iinfo(made.dtype).max // 2)

    return wrapper


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block, uninitialised tensors hold NaN (integers: a huge value)."""
    places = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, _poisoned(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
