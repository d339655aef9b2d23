# pyright: reportMissingImports=false, reportIndexIssue=false
"""sample on CUDA (contract: op.py): the vocabulary in chunks, then the best of the chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


def draw(logits_BV: Tensor, keys_B2: Tensor, positions_B: Tensor) -> Tensor:
    return _search(logits_BV, keys_B2, positions_B, noise=True)


def first_argmax(scores_BV: Tensor) -> Tensor:
    rows = scores_BV.shape[0]
    unused_B2 = torch.empty((rows, 2), dtype=torch.int64, device=scores_BV.device)
    return _search(scores_BV, unused_B2, unused_B2, noise=False)


def _search(logits_BV: Tensor, keys_B2: Tensor, positions_B: Tensor, noise: bool) -> Tensor:
    rows, vocabulary = logits_BV.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    if rows == 0:
        return tokens_B
    score_BJ = torch.empty((rows, chunks), dtype=torch.float32, device=logits_BV.device)
    index_BJ = torch.empty((rows, chunks), dtype=torch.int32, device=logits_BV.device)
    _best_of_chunk[(rows, chunks)](
        logits_BV.contiguous(), keys_B2.contiguous(), positions_B.contiguous(), score_BJ, index_BJ,
        vocabulary, chunks, NOISE=noise, BLOCKS=CHUNK // 4, num_warps=4,
    )  # fmt: skip
    _best_of_row[(rows,)](
        score_BJ,
        index_BJ,
        tokens_B,
        vocabulary,
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    return tokens_B


def philox_words(keys_B2: Tensor, positions_B: Tensor, vocabulary: int) -> Tensor:
    """[B, vocabulary] int64 words that `draw` uses, for checking them against another device."""
    rows, blocks = keys_B2.shape[0], triton.cdiv(vocabulary, 4)
    words_BW4 = torch.empty((rows, blocks, 4), dtype=torch.int64, device=keys_B2.device)
    _write_words[(rows, triton.cdiv(blocks, 256))](
        keys_B2.contiguous(), positions_B.contiguous(), words_BW4, blocks, BLOCKS=256
    )
    return words_BW4.flatten(1)[:, :vocabulary]


@triton.jit
def philox(block, position, k0, k1):
    """Philox-4x32-10 at counter (block, position, 0, 0); all uint32."""
    c0 = block
    c1 = tl.zeros_like(block) + position
    c2 = tl.zeros_like(block)
    c3 = tl.zeros_like(block)
    for _ in tl.static_range(10):
        wide0 = c0.to(tl.uint64) * 0xD2511F53
        wide1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (wide1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = wide1.to(tl.uint32)
        c2 = (wide0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = wide0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def row_key(keys_ptr, positions_ptr, row):
    k0 = tl.load(keys_ptr + row * 2).to(tl.uint32)
    k1 = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32)
    return k0, k1, tl.load(positions_ptr + row).to(tl.uint32)


@triton.jit
def _write_words(keys_ptr, positions_ptr, words_ptr, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    b = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    k0, k1, position = row_key(keys_ptr, positions_ptr, row)
    w0, w1, w2, w3 = philox(b.to(tl.uint32), position, k0, k1)
    ptrs = words_ptr + (row * blocks + b) * 4
    tl.store(ptrs, w0.to(tl.int64), mask=b < blocks)
    tl.store(ptrs + 1, w1.to(tl.int64), mask=b < blocks)
    tl.store(ptrs + 2, w2.to(tl.int64), mask=b < blocks)
    tl.store(ptrs + 3, w3.to(tl.int64), mask=b < blocks)


@triton.jit
def gumbel(word):
    """-log(-log u), u = (word + 1/2) / 2^32.

    Above 1/2 the inner logarithm is -2 atanh(w / (2 - w)) with w = 1 - u, which is known exactly
    from the word: near u = 1 it decides winners and a float32 u would round to 1. Nine terms of
    the series leave 1e-9 of it.
    """
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = tl.minimum(w, 0.5)
    s = w / (2.0 - w)
    s2 = s * s
    series = tl.full(s.shape, 1.0 / 17, tl.float32)
    for odd in tl.static_range(15, 0, -2):
        series = series * s2 + 1.0 / odd
    exponential = tl.where(word < 0x80000000, -tl.log(u), 2.0 * s * series)
    return -tl.log(exponential)


@triton.jit
def _better(score, v, best, best_v):
    """The larger score; the lower token on ties."""
    wins = (score > best) | ((score == best) & (v < best_v))
    return tl.where(wins, score, best), tl.where(wins, v, best_v)


@triton.jit
def _best_of_chunk(
    logits_ptr,
    keys_ptr,
    positions_ptr,
    score_ptr,
    index_ptr,
    vocabulary,
    chunks,
    NOISE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    b = chunk * BLOCKS + tl.arange(0, BLOCKS)
    logits = logits_ptr + row.to(tl.int64) * vocabulary
    words = (b, b, b, b)
    if NOISE:
        k0, k1, position = row_key(keys_ptr, positions_ptr, row)
        words = philox(b.to(tl.uint32), position, k0, k1)
    best = tl.full((BLOCKS,), float("-inf"), tl.float32)
    best_v = tl.full((BLOCKS,), 0x7FFFFFFF, tl.int32)
    for j in tl.static_range(4):
        v = b * 4 + j
        score = tl.load(logits + v, mask=v < vocabulary, other=float("-inf"))
        if NOISE:
            score = score + gumbel(words[j])
        best, best_v = _better(score, v, best, best_v)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_v, 0x7FFFFFFF), 0)
    tl.store(score_ptr + row * chunks + chunk, top)
    tl.store(index_ptr + row * chunks + chunk, token)


@triton.jit
def _best_of_row(score_ptr, index_ptr, tokens_ptr, vocabulary, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    j = tl.arange(0, CHUNKS)
    score = tl.load(score_ptr + row * chunks + j, mask=j < chunks, other=float("-inf"))
    index = tl.load(index_ptr + row * chunks + j, mask=j < chunks, other=0x7FFFFFFF)
    token = tl.min(tl.where(score == tl.max(score, 0), index, 0x7FFFFFFF), 0)
    tl.store(tokens_ptr + row, tl.minimum(token, vocabulary).to(tl.int64))
