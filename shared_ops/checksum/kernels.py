# pyright: reportMissingImports=false, reportIndexIssue=false
"""checksum on CUDA (see op.py). A program sums a piece of a tensor, the host adds pieces."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

G = tl.constexpr(0x9E3779B97F4A7C15)
A = tl.constexpr(0xBF58476D1CE4E5B9)
B = tl.constexpr(0x94D049BB133111EB)
C = tl.constexpr(0xD6E8FEB86659FD93)
PIECE = 1 << 16  # words: many pieces for every multiprocessor, few numbers for the host
BLOCK = 1024


def sums(words: list[Tensor], piece: int = PIECE) -> list[tuple[int, int]]:
    """(low, high) of each tensor of int64 words; all lie on one device."""
    counts = np.array([len(each) for each in words], np.int64)
    pieces = -(-counts // piece)
    owner_P = np.repeat(np.arange(len(words)), pieces)
    totals_2T = np.zeros((2, len(words)), np.uint64)
    if len(owner_P):
        first_P = np.arange(len(owner_P)) - np.repeat(pieces.cumsum() - pieces, pieces)
        first_P = first_P * piece
        address_P = np.array([each.data_ptr() for each in words], np.int64)[owner_P]
        length_P = np.minimum(piece, counts[owner_P] - first_P)
        found_2P = _piece_sums(np.stack((address_P, first_P, length_P)), words[0])
        for total_T, found_P in zip(totals_2T, found_2P, strict=True):
            np.add.at(total_T, owner_P, found_P)
    return [(int(low), int(high)) for low, high in totals_2T.T]


def _piece_sums(table_3P: np.ndarray, on: Tensor) -> np.ndarray:
    """[2, P] on the host, from addresses, first words and numbers of words on `on`'s device."""
    count = table_3P.shape[1]
    with torch.cuda.device_of(on):
        table = torch.from_numpy(table_3P).to(on.device)
        sums_2P = torch.empty((2, count), dtype=torch.int64, device=on.device)
        _sum_pieces[(count,)](table, sums_2P, count, BLOCK=BLOCK, num_warps=4)
        return sums_2P.cpu().numpy().view(np.uint64)


@triton.jit(do_not_specialize=["count"])
def _sum_pieces(table_ptr, sums_ptr, count, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    address = tl.load(table_ptr + p)
    first = tl.load(table_ptr + count + p)
    length = tl.load(table_ptr + 2 * count + p)
    words_ptr = address.to(tl.pointer_type(tl.int64)) + first
    low = tl.zeros((BLOCK,), tl.int64)
    high = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < length
        word = tl.load(words_ptr + at, mask=inside, other=0).to(tl.uint64)
        x = word + (first + at + 1).to(tl.uint64) * G
        x = x * A
        x = (x ^ (x >> 32)) * B
        x = x ^ (x >> 29)
        low += tl.where(inside, x.to(tl.int64), 0)
        x = x * C
        x = x ^ (x >> 32)
        high += tl.where(inside, x.to(tl.int64), 0)
    tl.store(sums_ptr + p, tl.sum(low, 0))
    tl.store(sums_ptr + count + p, tl.sum(high, 0))
