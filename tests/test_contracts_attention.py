"""Bits of attention: a query row depends on itself and on the keys and values it may see.

packed alone == packed beside others == packed beginning of a longer sequence == paged in one go ==
paged in chunks == decoded token by token, for any page size, order, thread count and piece size.
Slots of the cache that nothing was written to hold NaN.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from bits import THREAD_COUNTS, differing, differing_in_control, threads
from poison import poisoned_memory
from reordered import REORDERED
from torch import Tensor

from shared_ops.attention import reference
from shared_ops.attention.op import PagedLayout
from shared_ops.opset import EXACT, OpSet

LENGTHS = [1, 63, 64, 65, 2, 129, 200, 1]
SHAPES = [(1, 1, 16), (4, 2, 64), (3, 1, 10), (7, 1, 80), (2, 1, 256)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _poisoned_memory():
    with poisoned_memory():
        yield


class Sequences(NamedTuple):
    """q [n, H, E], k and v [n, K, E] of each sequence."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    def cut(self, spans: list[slice]) -> Sequences:
        """Queries of `spans`; the keys and values up to their ends."""
        q = [x[span] for x, span in zip(self.q, spans, strict=True)]
        k, v = ([x[: s.stop] for x, s in zip(xs, spans, strict=True)] for xs in (self.k, self.v))
        return Sequences(q, k, v)

    def pick(self, chosen: list[int]) -> Sequences:
        return Sequences(*([xs[i] for i in chosen] for xs in self))


@functools.cache
def sequences(heads: int, kv_heads: int, width: int, dtype=torch.float32) -> Sequences:
    generator = torch.Generator().manual_seed(heads * width)

    def random(rows: int) -> list[Tensor]:
        shapes = [(length, rows, width) for length in LENGTHS]
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    return Sequences(random(heads), random(kv_heads), random(kv_heads))


def cumulative(rows: list[Tensor]) -> list[int]:
    return [0, *itertools.accumulate(len(x) for x in rows)]


def packed(ops: OpSet, given: Sequences) -> Tensor:
    return ops.packed_attention(*(torch.cat(xs) for xs in given), cumulative(given.q))


def paged(ops: OpSet, given: Sequences, page_size: int = 16) -> Tensor:
    """Pages in shuffled order, unused ones and unwritten slots full of NaN, a table too wide."""
    contexts = [len(k) for k in given.k]
    counts = [-(-context // page_size) for context in contexts]
    free = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    table_BP = torch.full((len(contexts), max(counts) + 1), free.pop())
    pages = [
        x[0].new_full((len(free) + 1, page_size, *x[0].shape[1:]), float("nan")) for x in given[1:]
    ]
    for index, context in enumerate(contexts):
        for place, start in enumerate(range(0, context, page_size)):
            table_BP[index, place] = free.pop()
            for cache, x in zip(pages, given[1:], strict=True):
                written = x[index][start : start + page_size]
                cache[table_BP[index, place], : len(written)] = written
    layout = PagedLayout(cumulative(given.q), contexts, table_BP)
    return ops.paged_attention(torch.cat(given.q), *pages, layout)


@functools.cache
def alone(shape: tuple[int, int, int], dtype=torch.float32) -> list[Tensor]:
    """The plain schedule: each sequence packed by itself, on one thread."""
    given = sequences(*shape, dtype=dtype)
    with threads(1):
        return [packed(EXACT, given.pick([index])) for index in range(len(given.q))]


def steps(ops: OpSet, given: Sequences, position: int) -> tuple[Tensor, list[int]]:
    """One decode step at `position` of every sequence that is long enough, and which those are."""
    chosen = [index for index, q in enumerate(given.q) if len(q) > position]
    spans = [slice(position, position + 1)] * len(chosen)
    return paged(ops, given.pick(chosen).cut(spans)), chosen


@pytest.fixture(params=THREAD_COUNTS)
def thread_count(request):
    with threads(request.param):
        yield request.param


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def shape(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_packed_beside_others_in_any_order(shape, dtype, thread_count):
    given = sequences(*shape, dtype=dtype)
    wanted = alone(shape, dtype)
    for order in (range(len(LENGTHS)), [6, 0, 3, 1, 7, 2, 5, 4], [4, 1]):
        got = packed(EXACT, given.pick(list(order)))
        assert got.numel() > 0
        assert differing(got, torch.cat([wanted[i] for i in order])) == 0


def test_packed_in_small_pieces(shape, thread_count, monkeypatch):
    given = sequences(*shape)
    wanted = torch.cat(alone(shape))
    for limit in (1 << 14, 1 << 16):
        monkeypatch.setattr(reference, "SCORES_LIMIT", limit)
        assert differing(packed(EXACT, given), wanted) == 0
        assert differing(paged(EXACT, given), wanted) == 0


def test_what_follows_a_token_does_not_change_it(shape):
    given = sequences(*shape)
    wanted = alone(shape)[6]
    for length in (1, 2, 17, 63, 64, 65, 128, 199):
        got = packed(EXACT, given.pick([6]).cut([slice(0, length)]))
        assert differing(got, wanted[:length]) == 0


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_paged_in_one_go(shape, page_size, thread_count):
    given = sequences(*shape)
    got = paged(EXACT, given, page_size)
    assert got.numel() > 0
    assert differing(got, torch.cat(alone(shape))) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_decoded_token_by_token(shape, dtype, thread_count):
    given = sequences(*shape, dtype=dtype)
    wanted = alone(shape, dtype)
    for position in (0, 1, 62, 63, 64, 128, 199):
        got, chosen = steps(EXACT, given, position)
        assert got.numel() > 0
        assert differing(got, torch.stack([wanted[i][position] for i in chosen])) == 0


@pytest.mark.parametrize("chunk", [1, 7, 17, 64, 100])
def test_prefilled_in_chunks_beside_a_decode(chunk, thread_count):
    given = sequences(4, 2, 64)
    wanted = alone((4, 2, 64))
    for start in range(0, 200, max(chunk, 21 - 21 % chunk)):
        span = slice(start, min(200, start + chunk))
        got = paged(EXACT, given.pick([5, 6]).cut([slice(128, 129), span]), page_size=4)
        assert differing(got, torch.cat((wanted[5][128:], wanted[6][span]))) == 0


def test_attention_in_another_order_fails_the_same_checks():
    given = sequences(4, 2, 64)
    wanted = [packed(REORDERED, given.pick([index])) for index in range(len(LENGTHS))]
    got, chosen = steps(REORDERED, given, 64)
    assert differing_in_control(got, torch.stack([wanted[i][64] for i in chosen])) > 0
    beginning = packed(REORDERED, given.pick([6]).cut([slice(0, 65)]))
    assert differing_in_control(beginning, wanted[6][:65]) > 0


def _gradients(given: Sequences) -> list[Tensor]:
    leaves = [torch.cat(xs).requires_grad_() for xs in given]
    out = EXACT.packed_attention(*leaves, cumulative(given.q))
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_gradients_are_equal_from_run_to_run_and_for_any_thread_count(shape, dtype):
    given = sequences(*shape, dtype=dtype)
    with threads(1):
        wanted = _gradients(given)
    for count in THREAD_COUNTS:
        with threads(count):
            got = _gradients(given)
        assert [differing(g, w) for g, w in zip(got, wanted, strict=True)] == [0, 0, 0]


def test_gradients_do_not_reach_into_other_sequences(monkeypatch):
    given = sequences(4, 2, 64)
    monkeypatch.setattr(reference, "SCORES_LIMIT", 1)
    whole = _gradients(given)
    assert [int(x.isnan().sum()) for x in whole] == [0, 0, 0]
    spoiled = Sequences(*([x * (1 if i == 6 else 3) for i, x in enumerate(xs)] for xs in given))
    span = slice(*cumulative(given.q)[6:8])
    again = _gradients(spoiled)
    assert [differing(g[span], w[span]) for g, w in zip(again, whole, strict=True)] == [0, 0, 0]


def test_sequences_without_tokens_take_no_part():
    given = sequences(4, 2, 64)
    starts = cumulative(given.q)
    inputs = [torch.cat(xs) for xs in given]
    with_empty = sorted([*starts, *starts])
    assert differing(EXACT.packed_attention(*inputs, with_empty), packed(EXACT, given)) == 0
    nothing = [x[:0] for x in inputs]
    assert EXACT.packed_attention(*nothing, [0]).shape == (0, 4, 64)
    assert EXACT.packed_attention(*nothing, [0, 0]).shape == (0, 4, 64)


def test_starts_must_cover_the_tokens():
    q, k, v = (torch.cat(xs) for xs in sequences(4, 2, 64))
    with pytest.raises(ValueError, match="starts must run from 0 to"):
        EXACT.packed_attention(q, k, v, [0, 5])
    layout = PagedLayout([0, 5], [5], torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="query_starts must run from 0 to"):
        EXACT.paged_attention(q, k.unsqueeze(1), v.unsqueeze(1), layout)
