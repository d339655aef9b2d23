"""attention on CUDA (contract: op.py): one forward kernel for packed, prefill and decode.

A KV head's query heads share its keys: row r of a sequence is query r div GROUP, head r mod GROUP
of the group. A program takes a tile of rows and walks the KV tiles of its sequence from position
0. Few long sequences are split: a program takes one chunk of positions and a second kernel merges
the chunks, in the order in which the unsplit program does.

What may differ between schedules: rows in a tile, warps, stages, packed or paged, split or not.
"""

import functools
import itertools
from typing import NamedTuple

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_ops.attention import backward_kernels

KV_TILE = 64
CHUNK = 1024
LOG2_E = 1.4426950408889634
SPLIT_PROGRAMS = 264


class Schedule(NamedTuple):
    rows: int
    warps: int
    stages: int


SMALL = Schedule(16, 4, 3)
LARGE = Schedule(64, 4, 3)
BACKWARD_ROWS = Schedule(64, 4, 2)


class Source(NamedTuple):
    """Keys and values [tokens or pages x page_size, K, E] and how sequences find theirs."""

    k_NKE: Tensor
    v_NKE: Tensor
    starts: Tensor
    contexts: Tensor
    page_table: Tensor
    page_size: int


@functools.lru_cache(maxsize=64)
def _integers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 on the device; the layers of a forward ask for the same ones."""
    return torch.from_numpy(numpy.array(values, dtype=numpy.int32)).to(device)


@functools.lru_cache(maxsize=64)
def _tiles(lens: tuple[int, ...], step: int, low: int, high: int, device: torch.device) -> Tensor:
    """int32 [tiles, 2]: (sequence, first row) of the sequences with low < length <= high.

    The last tiles of the sequences come first, as these have the most to do.
    """
    lens_B = numpy.array(lens, dtype=numpy.int64)
    sequences = numpy.flatnonzero((lens_B > low) & (lens_B <= high))
    counts = -(-lens_B[sequences] // step)
    sequence = numpy.repeat(sequences, counts)
    first = (numpy.arange(counts.sum()) - numpy.repeat(counts.cumsum() - counts, counts)) * step
    order = numpy.argsort(-first, kind="stable")
    table = numpy.stack((sequence[order], first[order]), 1).astype(numpy.int32)
    return torch.from_numpy(table).to(device)


def _lengths(starts: list[int], group: int = 1) -> tuple[int, ...]:
    return tuple((end - start) * group for start, end in itertools.pairwise(starts))


def _rows_contiguous(x_THE: Tensor) -> Tensor:
    """Heads side by side; the token stride may be any (a view into the fused projection)."""
    whole = x_THE.stride(2) == 1 and x_THE.stride(1) == x_THE.shape[2]
    return x_THE if whole else x_THE.contiguous()


def packed_forward(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    starts: list[int],
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """o_THE, and the base-2 logarithms of the rows' sums of exponentials, lse_TH."""
    lens = _lengths(starts, q_THE.shape[1] // k_TKE.shape[1])
    begin = _integers(tuple(starts), q_THE.device)
    source = Source(_rows_contiguous(k_TKE), _rows_contiguous(v_TKE), begin, begin, begin, 0)
    o_THE = torch.empty(q_THE.shape, dtype=out_dtype or q_THE.dtype, device=q_THE.device)
    lse_TH = torch.empty(q_THE.shape[:2], dtype=torch.float32, device=q_THE.device)
    tiles = _tiles(lens, LARGE.rows, 0, 1 << 40, q_THE.device)
    attend(_rows_contiguous(q_THE), source, tiles, LARGE, o_THE, lse_TH)
    return o_THE, lse_TH


def paged_forward(
    q_THE: Tensor,
    k_pages_PSKE: Tensor,
    v_pages_PSKE: Tensor,
    layout,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    device, group = q_THE.device, q_THE.shape[1] // k_pages_PSKE.shape[2]
    lens = _lengths(layout.query_starts, group)
    contexts = tuple(layout.context_lens)
    source = Source(
        k_pages_PSKE.flatten(0, 1),
        v_pages_PSKE.flatten(0, 1),
        _integers(tuple(layout.query_starts), device),
        _integers(contexts, device),
        layout.page_table_BP,
        k_pages_PSKE.shape[1],
    )
    o_THE = torch.empty(q_THE.shape, dtype=out_dtype or q_THE.dtype, device=device)
    q_THE = _rows_contiguous(q_THE)
    small = SMALL._replace(rows=max(SMALL.rows, triton.next_power_of_2(group)))
    few = _tiles(lens, small.rows, 0, small.rows, device)
    chunks = -(-max(contexts) // CHUNK)
    split = chunks > 1 and len(few) * k_pages_PSKE.shape[2] < SPLIT_PROGRAMS
    attend(q_THE, source, few, small, o_THE, None, chunks if split else 1)
    attend(q_THE, source, _tiles(lens, LARGE.rows, small.rows, 1 << 40, device), LARGE, o_THE, None)
    return o_THE


def attend(
    q_THE: Tensor,
    source: Source,
    tiles: Tensor,
    schedule: Schedule,
    o_THE: Tensor,
    lse_TH: Tensor | None,
    chunks: int = 1,
) -> None:
    """Fill o_THE (and the base-2 log of the row sums) for the given tiles of rows.

    With `chunks` above 1 the positions are split among so many programs a tile.
    """
    if not len(tiles):
        return
    heads, width = q_THE.shape[1:]
    kv_heads = source.k_NKE.shape[1]
    wide = max(16, triton.next_power_of_2(width))
    state = o_THE
    if chunks > 1:
        values = len(tiles) * kv_heads * chunks * schedule.rows * (wide + 2)
        state = torch.empty(values, dtype=torch.float32, device=o_THE.device)
    shape = {"GROUP": heads // kv_heads, "ROWS": schedule.rows, "WIDE": wide, "CHUNK": CHUNK}
    common = (o_THE, o_THE if lse_TH is None else lse_TH, state, tiles, source.starts)
    contexts = (source.contexts, source.page_table, source.page_table.stride(0))
    _forward[(len(tiles), kv_heads, chunks)](
        q_THE, source.k_NKE, source.v_NKE, *common, *contexts, heads, width, q_THE.stride(0),
        source.k_NKE.stride(0), source.v_NKE.stride(0), width**-0.5 * LOG2_E,
        TILE=KV_TILE, PAGE=source.page_size, SPLIT=chunks > 1, LSE=lse_TH is not None, **shape,
        num_warps=schedule.warps, num_stages=schedule.stages,
    )  # fmt: skip
    if chunks > 1:
        _merge_chunks[(len(tiles), kv_heads)](
            *common, *contexts[:1], heads, width, chunks, PAGED=source.page_size > 0,
            LSE=lse_TH is not None, **shape, num_warps=4,
        )  # fmt: skip


def packed_backward(do_THE, q_THE, k_TKE, v_TKE, o_THE, lse_TH, starts: list[int]):
    """Two passes, none with atomics: rows gather dq, KV tiles gather dk and dv of a whole group."""
    q_THE, k_TKE, v_TKE = (_rows_contiguous(x) for x in (q_THE, k_TKE, v_TKE))
    do_THE = do_THE.contiguous()
    device, (tokens, heads, width) = q_THE.device, q_THE.shape
    kv_heads = k_TKE.shape[1]
    group = heads // kv_heads
    dq_THE, dk_TKE, dv_TKE = (
        torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q_THE, k_TKE, v_TKE)
    )
    delta_TH = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    wide = max(16, triton.next_power_of_2(width))
    if tokens:
        grid = (triton.cdiv(tokens * heads, 64),)
        backward_kernels.delta[grid](
            do_THE, o_THE, delta_TH, tokens * heads, width, ROWS=64, WIDE=wide
        )
    rest = (
        do_THE, lse_TH, delta_TH, _integers(tuple(starts), device), heads, width, q_THE.stride(0),
        k_TKE.stride(0), v_TKE.stride(0), width**-0.5,
    )  # fmt: skip
    shape = {"GROUP": group, "ROWS": BACKWARD_ROWS.rows, "TILE": KV_TILE, "WIDE": wide}
    options = {"num_warps": BACKWARD_ROWS.warps, "num_stages": BACKWARD_ROWS.stages}
    row_tiles = _tiles(_lengths(starts, group), BACKWARD_ROWS.rows, 0, 1 << 40, device)
    kv_tiles = _tiles(_lengths(starts), KV_TILE, 0, 1 << 40, device).flip(0).contiguous()
    if tokens:
        backward_kernels.gradient_of_queries[(len(row_tiles), kv_heads)](
            q_THE, k_TKE, v_TKE, dq_THE, row_tiles, *rest, **shape, **options
        )
        backward_kernels.gradient_of_keys[(len(kv_tiles), kv_heads)](
            q_THE, k_TKE, v_TKE, dk_TKE, dv_TKE, kv_tiles, *rest, **shape, **options
        )
    return dq_THE, dk_TKE, dv_TKE


@triton.jit
def _scores(q, k):
    return tl.dot(q, k.T, input_precision="ieee")


@triton.jit
def _offsets(n, limit, start, pages_ptr, stride, PAGE: tl.constexpr):
    """Where positions n lie in the keys; those at or after the limit repeat position 0's page."""
    if PAGE == 0:
        return (start + n).to(tl.int64) * stride
    page = tl.load(pages_ptr + n // PAGE, mask=n < limit, other=0).to(tl.int64)
    return (page * PAGE + n % PAGE) * stride


@triton.jit
def _advance(
    top,
    total,
    acc,
    q,
    last,
    low,
    high,
    k_ptr,
    v_ptr,
    start,
    pages_ptr,
    stride_k,
    stride_v,
    width: tl.constexpr,
    scale,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The online softmax over the tiles from `low` to `high` (Milakov & Gimelshein 2018).

    The multiply-adds are spelled out, so that no compiler choice can tell two schedules apart.
    Unmasked tiles are a shorter way to the same bits.
    """
    e = tl.arange(0, WIDE)
    ones = tl.full((TILE, 16), 1.0, q.dtype)
    for first in range(low, high, TILE):
        n = first + tl.arange(0, TILE)
        k_ptrs = k_ptr + _offsets(n, high, start, pages_ptr, stride_k, PAGE)[:, None] + e[None, :]
        v_ptrs = v_ptr + _offsets(n, high, start, pages_ptr, stride_v, PAGE)[:, None] + e[None, :]
        inside = (n[:, None] < high) & (e[None, :] < width)
        if MASKED:
            k = tl.load(k_ptrs, mask=inside, other=0.0)
        else:
            k = tl.load(k_ptrs) if width == WIDE else tl.load(k_ptrs, mask=inside, other=0.0)
        s = _scores(q, k)
        if MASKED:
            s = tl.where(n[None, :] <= last[:, None], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        level = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.exp2(tl.fma(s, scale, -level[:, None])).to(q.dtype)
        decay = tl.exp2(top - level)[:, None]
        if MASKED:
            v = tl.load(v_ptrs, mask=inside, other=0.0)
        else:
            v = tl.load(v_ptrs) if width == WIDE else tl.load(v_ptrs, mask=inside, other=0.0)
        total = tl.dot(p, ones, total * decay, input_precision="ieee")
        acc = tl.dot(p, v, acc * decay, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _merge(top, total, acc, chunk_top, chunk_total, chunk_acc):
    """Two states that cover neighbouring chunks, the left one first."""
    new_top = tl.maximum(top, chunk_top)
    level = tl.where(new_top == float("-inf"), 0.0, new_top)
    left = tl.exp2(top - level)
    right = tl.exp2(chunk_top - level)
    total = tl.fma(total, left, chunk_total * right)
    acc = tl.fma(acc, left[:, None], chunk_acc * right[:, None])
    return new_top, total, acc


@triton.jit
def _finish(
    top, total, acc, o_ptr, lse_ptr, token, head, valid, heads, width: tl.constexpr,
    WIDE: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, WIDE)
    row = token.to(tl.int64) * heads + head
    o = tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
    inside = valid[:, None] & (e[None, :] < width)
    o_ptrs = o_ptr + row[:, None] * width + e[None, :]
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=inside)
    if LSE:
        tl.store(lse_ptr + row, top + tl.log2(total), mask=valid)


@triton.jit
def _row_tile(tiles_ptr, starts_ptr, contexts_ptr, GROUP: tl.constexpr, ROWS: tl.constexpr,
              PAGED: tl.constexpr):  # fmt: skip
    """Of this program: sequence, its first token, context, and each row's query, head, validity.

    Rows past the end repeat the last query; they are not stored.
    """
    sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    context = tl.load(contexts_ptr + sequence) if PAGED else queries
    row = first + tl.arange(0, ROWS)
    query = tl.minimum(row // GROUP, queries - 1)
    head = tl.program_id(1) * GROUP + row % GROUP
    lowest = context - queries + first // GROUP
    highest = context - queries + tl.minimum((first + ROWS - 1) // GROUP, queries - 1)
    valid = row < queries * GROUP
    return sequence, start, context - queries, query, head, valid, lowest, highest


@triton.jit
def _forward(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    state_ptr,
    tiles_ptr,
    starts_ptr,
    contexts_ptr,
    pages_ptr,
    stride_table,
    heads,
    width: tl.constexpr,
    stride_q,
    stride_k,
    stride_v,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    LSE: tl.constexpr,
):
    sequence, start, before, query, head, valid, lowest, highest = _row_tile(
        tiles_ptr, starts_ptr, contexts_ptr, GROUP, ROWS, PAGE > 0
    )
    kv_head = tl.program_id(1)
    e = tl.arange(0, WIDE)
    q_ptrs = q_ptr + ((start + query).to(tl.int64) * stride_q + head * width)[:, None] + e[None, :]
    q = tl.load(q_ptrs, mask=e[None, :] < width, other=0.0)
    pages = pages_ptr + sequence.to(tl.int64) * stride_table
    k_base = k_ptr + kv_head * width
    v_base = v_ptr + kv_head * width
    last = before + query
    stop = highest + 1
    seen_by_all = (lowest + 1) // TILE * TILE
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    chunk_low = tl.program_id(2) * CHUNK if SPLIT else 0
    chunk_stop = tl.minimum(stop, chunk_low + CHUNK) if SPLIT else stop
    for low in range(chunk_low, chunk_stop, CHUNK):
        high = tl.minimum(stop, low + CHUNK)
        middle = tl.maximum(tl.minimum(seen_by_all, high), low)
        chunk_top = tl.full((ROWS,), float("-inf"), tl.float32)
        chunk_total = tl.zeros((ROWS, 16), tl.float32)
        chunk_acc = tl.zeros((ROWS, WIDE), tl.float32)
        chunk_top, chunk_total, chunk_acc = _advance(
            chunk_top, chunk_total, chunk_acc, q, last, low, middle, k_base, v_base, start, pages,
            stride_k, stride_v, width, scale, TILE, WIDE, PAGE, False,
        )  # fmt: skip
        chunk_top, chunk_total, chunk_acc = _advance(
            chunk_top, chunk_total, chunk_acc, q, last, middle, high, k_base, v_base, start, pages,
            stride_k, stride_v, width, scale, TILE, WIDE, PAGE, True,
        )  # fmt: skip
        top, total, acc = _merge(top, total, acc, chunk_top, tl.max(chunk_total, 1), chunk_acc)
    if SPLIT:
        slot = (tl.program_id(0) * tl.num_programs(1) + kv_head) * tl.num_programs(2)
        base = state_ptr + (slot + tl.program_id(2)).to(tl.int64) * ROWS * (WIDE + 2)
        r = tl.arange(0, ROWS)
        if chunk_low < stop:
            tl.store(base + r[:, None] * WIDE + e[None, :], acc)
            tl.store(base + ROWS * WIDE + r, top)
            tl.store(base + ROWS * (WIDE + 1) + r, total)
    else:
        _finish(
            top, total, acc, o_ptr, lse_ptr, start + query, head, valid, heads, width, WIDE, LSE
        )


@triton.jit(do_not_specialize=["chunks"])
def _merge_chunks(
    o_ptr,
    lse_ptr,
    state_ptr,
    tiles_ptr,
    starts_ptr,
    contexts_ptr,
    heads,
    width: tl.constexpr,
    chunks,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    PAGED: tl.constexpr,
    LSE: tl.constexpr,
):
    _, start, _, query, head, valid, _, highest = _row_tile(
        tiles_ptr, starts_ptr, contexts_ptr, GROUP, ROWS, PAGED
    )
    r = tl.arange(0, ROWS)
    e = tl.arange(0, WIDE)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    slot = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * chunks
    for chunk in range(0, tl.cdiv(highest + 1, CHUNK)):
        base = state_ptr + (slot + chunk).to(tl.int64) * ROWS * (WIDE + 2)
        chunk_acc = tl.load(base + r[:, None] * WIDE + e[None, :])
        chunk_top = tl.load(base + ROWS * WIDE + r)
        chunk_total = tl.load(base + ROWS * (WIDE + 1) + r)
        top, total, acc = _merge(top, total, acc, chunk_top, chunk_total, chunk_acc)
    _finish(top, total, acc, o_ptr, lse_ptr, start + query, head, valid, heads, width, WIDE, LSE)
