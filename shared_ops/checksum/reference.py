"""checksum on the CPU (see op.py). numpy has unsigned words, whose shifts are logical."""

import numpy as np
from torch import Tensor

G, A, B, C = (
    np.uint64(odd)
    for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
MODULUS = 1 << 64
CHUNK = 1 << 15  # words; with its two copies inside a core's cache


def sums(words_W: Tensor, chunk: int = CHUNK) -> tuple[int, int]:
    """(low, high) of int64 words on the CPU."""
    array_W = words_W.numpy().view(np.uint64)
    size = min(chunk, len(array_W))
    places = np.arange(1, size + 1, dtype=np.uint64) * G
    space, shifted = np.empty(size, np.uint64), np.empty(size, np.uint64)
    low = high = 0
    for first in range(0, len(array_W), chunk):
        part = array_W[first : first + chunk]
        x, s = space[: len(part)], shifted[: len(part)]
        np.add(part, places[: len(part)], out=x)
        x += np.uint64(first * int(G) % MODULUS)
        _mix(x, s, A, 32)
        _mix(x, s, B, 29)
        low += int(x.sum())
        _mix(x, s, C, 32)
        high += int(x.sum())
    return low % MODULUS, high % MODULUS


def _mix(x, space, odd: np.uint64, shift: int) -> None:
    """x becomes f(x * odd, shift)."""
    x *= odd
    np.right_shift(x, np.uint64(shift), out=space)
    x ^= space
