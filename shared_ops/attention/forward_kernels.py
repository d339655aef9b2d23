# pyright: reportMissingImports=false, reportIndexIssue=false
"""Attention's forward on CUDA (contract: op.py): one kernel for packed rows, prefill and decode.

A state (top, total, acc) is a running maximum of scaled scores in base 2, the sum of p and p @ v,
both at the scale of that maximum. Row sums are taken on the tensor cores like p @ v itself: a sum
over a register layout would depend on the rows and warps of the tile.
"""

import triton
import triton.language as tl


@triton.jit
def _places(first, limit, start, pages_ptr, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Where a tile's positions lie; those at or after the limit are not to be read."""
    n = first + tl.arange(0, TILE)
    if PAGE == 0:
        return (start + n).to(tl.int64)
    if PAGE % TILE == 0:
        page = tl.load(pages_ptr + first // PAGE).to(tl.int64)
        return page * PAGE + first % PAGE + tl.arange(0, TILE)
    page = tl.load(pages_ptr + n // PAGE, mask=n < limit, other=0).to(tl.int64)
    return page * PAGE + n % PAGE


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
        place = _places(first, high, start, pages_ptr, TILE, PAGE)[:, None]
        k_ptrs = k_ptr + place * stride_k + e[None, :]
        v_ptrs = v_ptr + place * stride_v + e[None, :]
        inside = (n[:, None] < high) & (e[None, :] < width)
        if MASKED:
            k = tl.load(k_ptrs, mask=inside, other=0.0)
        else:
            k = tl.load(k_ptrs) if width == WIDE else tl.load(k_ptrs, mask=inside, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee")
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
def _chunk(
    low, high, seen_by_all, q, last, k_ptr, v_ptr, start, pages_ptr, stride_k, stride_v,
    width: tl.constexpr, scale, ROWS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, ONE_LOOP: tl.constexpr,
):  # fmt: skip
    """The state of positions low to high, from nothing: tiles that all rows see, then the rest.

    ONE_LOOP: no tile apart, so that the pipeline of loads is filled only once.
    """
    middle = low if ONE_LOOP else tl.maximum(tl.minimum(seen_by_all, high), low)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 16), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    if not ONE_LOOP:
        top, total, acc = _advance(
            top, total, acc, q, last, low, middle, k_ptr, v_ptr, start, pages_ptr, stride_k,
            stride_v, width, scale, TILE, WIDE, PAGE, False,
        )  # fmt: skip
    top, total, acc = _advance(
        top, total, acc, q, last, middle, high, k_ptr, v_ptr, start, pages_ptr, stride_k, stride_v,
        width, scale, TILE, WIDE, PAGE, True,
    )  # fmt: skip
    return top, tl.max(total, 1), acc


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
              PAGED: tl.constexpr, DECODE: tl.constexpr):  # fmt: skip
    """Of this program: sequence, its first token, context, and each row's query, head, validity.

    Rows past the end repeat the last query; they are not stored. DECODE: sequence i is token i.
    """
    sequence = tl.program_id(0)
    start = sequence
    first = 0
    queries = 1
    if not DECODE:
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


@triton.jit(do_not_specialize=["stride_table"])
def forward(
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
    SINGLE: tl.constexpr,
    LSE: tl.constexpr,
    DECODE: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    """SINGLE: no row of these tiles sees a second chunk, and merging one changes no bit."""
    sequence, start, before, query, head, valid, lowest, highest = _row_tile(
        tiles_ptr, starts_ptr, contexts_ptr, GROUP, ROWS, PAGE > 0, DECODE
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
    if SINGLE:
        top, total, acc = _chunk(
            0, stop, seen_by_all, q, last, k_base, v_base, start, pages, stride_k, stride_v, width,
            scale, ROWS, TILE, WIDE, PAGE, ONE_LOOP,
        )  # fmt: skip
    else:
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, WIDE), tl.float32)
        chunk_low = tl.program_id(2) * CHUNK if SPLIT else 0
        chunk_stop = tl.minimum(stop, chunk_low + CHUNK) if SPLIT else stop
        for low in range(chunk_low, chunk_stop, CHUNK):
            high = tl.minimum(stop, low + CHUNK)
            chunk_top, chunk_total, chunk_acc = _chunk(
                low, high, seen_by_all, q, last, k_base, v_base, start, pages, stride_k, stride_v,
                width, scale, ROWS, TILE, WIDE, PAGE, ONE_LOOP,
            )  # fmt: skip
            top, total, acc = _merge(top, total, acc, chunk_top, chunk_total, chunk_acc)
    if SPLIT:
        slot = (tl.program_id(0) * tl.num_programs(1) + kv_head) * tl.num_programs(2)
        base = state_ptr + (slot + tl.program_id(2)).to(tl.int64) * ROWS * (WIDE + 2)
        r = tl.arange(0, ROWS)
        if tl.program_id(2) * CHUNK < stop:
            tl.store(base + r[:, None] * WIDE + e[None, :], acc)
            tl.store(base + ROWS * WIDE + r, top)
            tl.store(base + ROWS * (WIDE + 1) + r, total)
    else:
        _finish(
            top, total, acc, o_ptr, lse_ptr, start + query, head, valid, heads, width, WIDE, LSE
        )


@triton.jit
def write_pages(
    k_pages_ptr, v_pages_ptr, slots_ptr, k_ptr, v_ptr, stride_k, stride_v, values,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    to = tl.load(slots_ptr + token) * values + n
    k = tl.load(k_ptr + token * stride_k + n, mask=n < values)
    v = tl.load(v_ptr + token * stride_v + n, mask=n < values)
    tl.store(k_pages_ptr + to, k, mask=n < values)
    tl.store(v_pages_ptr + to, v, mask=n < values)


@triton.jit(do_not_specialize=["chunks"])
def merge_chunks(
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
    DECODE: tl.constexpr,
):
    _, start, _, query, head, valid, _, highest = _row_tile(
        tiles_ptr, starts_ptr, contexts_ptr, GROUP, ROWS, PAGED, DECODE
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
