"""checksum: 128 bits of a tensor's bytes, the same on every device.

Contract. The bytes in row-major order, filled up with zeros to words of 8, are the words w_0, w_1,
... (little endian). Modulo 2^64, with >> a logical shift and f(x, s) = x xor (x >> s):

    x_i = f(f((w_i + (i + 1) G) A, 32) B, 29),   low = sum_i x_i,   high = sum_i f(x_i C, 32)

G, A and B are those of SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom
Number Generators"), C is another odd number. Integer addition has no order, so any schedule agrees.
What is summed is a one-to-one function of the word: one changed word always changes both sums.
Other changes (words that change places, a shift) go unseen about as rarely as 128 random bits
agree; it is no defence against an adversary. The number of bytes is not in it: whoever compares two
must compare shapes and dtypes.

CPU: one thread, chunks that stay in the cache. CUDA: one launch for all tensors, one copy to the
host; where triton is missing, the CPU's way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.checksum import reference

WORD = 8


def checksums(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(low, high) of each tensor, of any shape, strides, dtype and device; 0 <= each < 2^64."""
    words = [words_of(tensor) for tensor in tensors]
    found: dict[int, tuple[int, int]] = {}
    for device in {each.device for each in words}:
        places = [place for place, each in enumerate(words) if each.device == device]
        found |= zip(places, _sums([words[place] for place in places], device), strict=True)
    return [found[place] for place in range(len(words))]


def words_of(tensor: Tensor) -> Tensor:
    """The bytes as int64 words [W]: a view where they are contiguous, aligned and whole words."""
    bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    count = len(bytes_N)
    if all(at % WORD == 0 for at in (count, bytes_N.data_ptr(), bytes_N.storage_offset())):
        return bytes_N.view(torch.int64)
    padded_N = bytes_N.new_zeros(-(-count // WORD) * WORD)
    padded_N[:count] = bytes_N
    return padded_N.view(torch.int64)


def _sums(words: list[Tensor], device: torch.device) -> list[tuple[int, int]]:
    if device.type == "cuda" and cuda.has_triton():
        from shared_ops.checksum import kernels

        return kernels.sums(words)
    return [reference.sums(each.cpu()) for each in words]
