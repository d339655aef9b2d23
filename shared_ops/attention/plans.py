"""How attention in plain torch lays sequences out: which rows of which arrays meet in a product.

Packed sequences lie one below another, the longest first. Queries go in blocks of positions; those
that reach a block are the first so many, and no query sees past its own block, so nothing is
computed for the padding but the ends of blocks. Paged ones are gathered page by page.
Indices only, no values: worked out once for all layers.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from shared_ops.cpu_products import K_BLOCK, TILE

# Queries of a block: sums over the rows of a KV head's group are one chain if they fit.
QUERIES = 32
# Paged queries of one sequence that are gathered for together.
PAGED_QUERIES = 64
# Contexts of one step's sequences that differ by less share their products.
CONTEXT_STEP = 128


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Piece(NamedTuple):
    """Queries at positions first..end - 1 of the first `sequences` of a block; they see `positions`
    (a multiple of TILE), of which those from `first` on are masked."""

    sequences: int
    first: int
    end: int
    positions: int


class PackedBlock(NamedTuple):
    """B sequences padded to N positions, the longest first.

    rows_L: int64 [B x K x N], of each (sequence, KV head, position) the row token x K + head;
        padding repeats the sequence's first token.
    padding_BN: bool. tokens_T: int64, the block's tokens. back_L: int64 [T x K], of each (token, KV
        head) its place in `rows_L`.
    """

    sequences: int
    positions: int
    rows_L: Tensor
    padding_BN: Tensor
    tokens_T: Tensor
    back_L: Tensor
    pieces: list[Piece]


@functools.lru_cache(maxsize=32)
def packed_blocks(
    starts: tuple[int, ...], heads: int, kv_heads: int, limit: int
) -> list[PackedBlock]:
    """Blocks of which a piece holds at most `limit` scores, or one sequence; empty ones in none."""
    lens = [end - start for start, end in itertools.pairwise(starts)]
    order = sorted((i for i, length in enumerate(lens) if length), key=lambda i: -lens[i])
    blocks, queries = [], _queries(heads // kv_heads)
    while order:
        longest = _round_up(lens[order[0]], TILE)
        most = max(1, limit // (heads * min(queries, longest) * longest))
        chosen = [i for i in order[:most] if 2 * lens[i] > longest - TILE]
        order = order[len(chosen) :]
        spans = [(starts[i], lens[i]) for i in chosen]
        blocks.append(_packed_block(spans, longest, kv_heads, queries))
    return blocks


def _queries(group: int) -> int:
    return max(1, min(QUERIES, K_BLOCK // group))


def _packed_block(
    spans: list[tuple[int, int]], longest: int, kv_heads: int, queries: int
) -> PackedBlock:
    start_B, len_B = numpy.array(spans).T
    place_N, head_K1 = numpy.arange(longest), numpy.arange(kv_heads)[:, None]
    real_BN = place_N < len_B[:, None]
    token_BN = start_B[:, None] + numpy.where(real_BN, place_N, 0)
    b_T, n_T = real_BN.nonzero()
    back_TK = (b_T[:, None] * kv_heads + head_K1.T) * longest + n_T[:, None]
    firsts = range(0, int(len_B[0]), queries)
    return PackedBlock(
        len(spans),
        longest,
        torch.from_numpy((token_BN[:, None] * kv_heads + head_K1).reshape(-1)),
        torch.from_numpy(~real_BN),
        torch.from_numpy(token_BN[real_BN]),
        torch.from_numpy(back_TK.reshape(-1)),
        [_piece(len_B, first, min(first + queries, longest)) for first in firsts],
    )


def _piece(len_B: numpy.ndarray, first: int, end: int) -> Piece:
    return Piece(int((len_B > first).sum()), first, end, _round_up(end, TILE))


@functools.lru_cache(maxsize=64)
def causal_mask(queries: int, positions: int, group: int) -> Tensor:
    """[R, N] to add to scores of rows (query, head of the group): -inf after the query's place."""
    hidden_QN = torch.arange(positions) > torch.arange(queries).unsqueeze(1)
    return _as_addend(hidden_QN).repeat_interleave(group, dim=0)


def _as_addend(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


class PagedBlock(NamedTuple):
    """B spans of Q queries each, with N positions of their pages.

    tokens_L: int64 [B x Q], tokens, padding repeats the span's first; None: all of them, Q = 1.
    real_L: int64, places in `tokens_L` that are no padding; None: all.
    pages_L: int64, for each span the pages of N positions; past its context the first again.
    mask_BRN: to add to scores, R = 1 (Q = 1) or rows (query, head of the group).
    past_BN: bool, positions past the context: what their slots hold is nobody's.
    """

    sequences: int
    queries: int
    positions: int
    tokens_L: Tensor | None
    real_L: Tensor | None
    pages_L: Tensor
    mask_BRN: Tensor
    past_BN: Tensor


class Spans(NamedTuple):
    """int64 of each span of queries: its sequence, first token, number, and context at its end."""

    sequence: numpy.ndarray
    token: numpy.ndarray
    count: numpy.ndarray
    context: numpy.ndarray

    def at(self, chosen) -> "Spans":
        return Spans(*(x[chosen] for x in self))


def paged_blocks(
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    page_table_BP: Tensor,
    page_size: int,
    heads: tuple[int, int],
    limit: int,
) -> list[PagedBlock]:
    """Blocks of spans of like size, of at most `limit` scores or one span."""
    spans, blocks = _spans(query_starts, context_lens), []
    table_BP, total = page_table_BP.numpy(), query_starts[-1]
    for alike in _groups(spans):
        queries = int(alike.count.max())
        positions = _round_up(int(alike.context.max()), TILE)
        most = max(1, limit // (heads[0] * queries * positions))
        for first in range(0, len(alike.count), most):
            part = alike.at(slice(first, first + most))
            is_whole = len(part.count) == total
            group = heads[0] // heads[1]
            blocks.append(_paged_block(part, table_BP, page_size, positions, group, is_whole))
    return blocks


def _spans(query_starts: Sequence[int], context_lens: Sequence[int]) -> Spans:
    """Of each sequence with queries; long ones in several."""
    starts_B1, context_B = numpy.array(query_starts), numpy.array(context_lens)
    count_B = numpy.diff(starts_B1)
    if count_B.max(initial=0) <= PAGED_QUERIES:
        chosen = count_B.nonzero()[0]
        return Spans(chosen, starts_B1[:-1][chosen], count_B[chosen], context_B[chosen])
    pieces = [
        (index, start + first, min(PAGED_QUERIES, count - first), context - count + first)
        for index, (start, count, context) in enumerate(
            zip(query_starts, count_B.tolist(), context_lens, strict=False)
        )
        for first in range(0, count, PAGED_QUERIES)
    ]
    sequence, token, count, before = numpy.array(pieces).T
    return Spans(sequence, token, count, before + count)


def _groups(spans: Spans) -> Iterator[Spans]:
    """Spans of like counts and contexts; the step between contexts is an eighth of their octave."""
    octave = numpy.frexp(spans.context.astype(numpy.float64))[1]
    step = numpy.maximum(CONTEXT_STEP, 1 << numpy.maximum(octave - 3, 0))
    context = -(-spans.context // step) * step
    count = numpy.where(spans.count == 1, 1, -(-spans.count // TILE) * TILE)
    key = context * (PAGED_QUERIES + 1) + count
    for each in numpy.unique(key):
        yield spans.at(key == each)


def _paged_block(
    spans: Spans,
    table_BP: numpy.ndarray,
    page_size: int,
    positions: int,
    group: int,
    is_whole: bool,
) -> PagedBlock:
    queries = int(spans.count.max())
    context_B1, count_B1 = spans.context[:, None], spans.count[:, None]
    query_1Q, place_1N = numpy.arange(queries)[None], numpy.arange(positions)[None]
    is_real_BQ = query_1Q < count_B1
    last_BQ = context_B1 - count_B1 + numpy.where(is_real_BQ, query_1Q, 0)
    hidden_BQN = torch.from_numpy(place_1N > last_BQ[..., None])
    page_1P = numpy.arange(-(-positions // page_size))[None]
    page_BP = numpy.where(page_1P * page_size < context_B1, page_1P, 0)
    pages_BP = table_BP[spans.sequence[:, None], page_BP]
    tokens_BQ = spans.token[:, None] + numpy.where(is_real_BQ, query_1Q, 0)
    mask_BQN = _as_addend(hidden_BQN)
    return PagedBlock(
        len(spans.count),
        queries,
        positions,
        None if is_whole and queries == 1 else torch.from_numpy(tokens_BQ.reshape(-1)),
        None if is_real_BQ.all() else torch.from_numpy(is_real_BQ.reshape(-1).nonzero()[0]),
        torch.from_numpy(pages_BP.reshape(-1)),
        mask_BQN if queries == 1 else mask_BQN.repeat_interleave(group, dim=1),
        torch.from_numpy(place_1N >= context_B1),
    )
