# pyright: reportMissingImports=false, reportIndexIssue=false
"""fused on CUDA (see op.py). Tiles, warps and the order of a sum are those of the ops' own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_ops.logprob.kernels import (
    CHUNK,
    chosen_logit,
    exponentials,
    row_and_chunk,
    row_sum,
    scaled,
)
from shared_ops.primitives import aligned
from shared_ops.products import NEVER, Tile
from shared_ops.sample.kernels import gumbel, philox, row_key

TILE_VALUES = 1024  # of 4 warps, 16 bytes a thread: a row's sum is laid out as in rmsnorm's tiles
# (most K, tile): the fastest measured on an H200 at 8 and 32 rows.
GATED_TILES = ((1024, Tile(16, 32, 128, 4, 5, False)), (NEVER, Tile(16, 64, 128, 4, 5, True)))


def _tile(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"ROWS": max(1, TILE_VALUES // padded), "WIDTH": padded, "num_warps": 4}


def add_rmsnorm(x_TD: Tensor, y_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (rows, width), tile = x_TD.shape, _tile(x_TD.shape[1])
    sum_TD, normed_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    if rows:
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        _add_rmsnorm[grid](
            aligned(x_TD),
            aligned(y_TD),
            aligned(w_D),
            sum_TD,
            normed_TD,
            rows,
            width,
            eps,
            **tile,
        )
    return sum_TD, normed_TD


def rotated_heads(qkv_TN, heads, norms, angles, eps: float, places=None):
    cos_TR, sin_TR = angles
    tokens, half = cos_TR.shape
    count, tile = sum(heads), _tile(2 * half)
    kept = heads[0] if places else count
    out_THE = torch.empty((tokens, kept, 2 * half), dtype=qkv_TN.dtype, device=qkv_TN.device)
    if tokens:
        q_norm_E, k_norm_E = (aligned(w_E) for w_E in norms) if norms else (cos_TR, cos_TR)
        _rotated_heads[(tokens, triton.cdiv(count, tile["ROWS"]))](
            aligned(qkv_TN), q_norm_E, k_norm_E, cos_TR.contiguous(), sin_TR.contiguous(), out_THE,
            *(places or (out_THE, out_THE, out_THE)), heads[0], count, qkv_TN.shape[1], half,
            2 * half, eps, NORM=norms is not None, PAGED=places is not None,
            HALF=triton.next_power_of_2(half), **tile,
        )  # fmt: skip
    return out_THE[:, : heads[0]], None if places else out_THE[:, heads[0] :]


def gated_linear(x_TD: Tensor, w_2FD: Tensor) -> Tensor:
    rows, (depth, columns) = len(x_TD), (x_TD.shape[1], w_2FD.shape[0] // 2)
    tile = next(tile for most, tile in GATED_TILES if depth <= most)
    y_TF = torch.empty((rows, columns), dtype=x_TD.dtype, device=x_TD.device)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    if rows:
        _gated_linear[grid](
            aligned(x_TD), w_2FD, y_TF, rows, columns, depth, ROWS=tile.rows,
            COLUMNS=tile.columns, DEPTH=tile.depth, SWAPPED=tile.swapped,
            EVEN=depth % tile.depth == 0, num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=False,
        )  # fmt: skip
    return y_TF


def draw_scored(logits_BV, temperature_B, greedy_B, keys_B2, positions_B, vocab_limit: int):
    (rows, vocabulary), device = logits_BV.shape, logits_BV.device
    chunks = triton.cdiv(vocabulary, CHUNK)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        logits_BV, temperature_B = aligned(logits_BV), temperature_B.contiguous()
        parts_3BJ = torch.empty((3, rows, chunks), dtype=torch.float32, device=device)
        index_BJ = torch.empty((rows, chunks), dtype=torch.int32, device=device)
        _draw_chunk[(rows, chunks)](
            logits_BV, temperature_B, greedy_B.contiguous(), keys_B2.contiguous(),
            positions_B.contiguous(), *parts_3BJ, index_BJ, vocabulary, vocab_limit, chunks,
            CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
        _draw_row[(rows,)](
            logits_BV, temperature_B, *parts_3BJ, index_BJ, tokens_B, logprobs_B, vocabulary,
            vocab_limit, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1,
        )  # fmt: skip
    return tokens_B, logprobs_B


@triton.jit
def _inverse_rms(x, width, eps):
    mean = tl.sum(x * x, 1) / width
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _product(a, b):
    """Rounded before it can become part of a fused multiply-add."""
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def _add_rmsnorm(
    x_ptr, y_ptr, w_ptr, sum_ptr, normed_ptr, rows, width, eps, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = (r[:, None] < rows) & (d[None, :] < width)
    at = (r * width)[:, None] + d[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + at, rounded, mask=inside)
    x = rounded.to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < width, other=0.0).to(tl.float32)
    y = x * _inverse_rms(x, width, eps)[:, None] * w[None, :]
    tl.store(normed_ptr + at, y.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["query_heads", "heads"])
def _rotated_heads(
    x_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, y_ptr, k_pages_ptr, v_pages_ptr, slots_ptr,
    query_heads, heads, stride, half, width, eps, NORM: tl.constexpr, PAGED: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token, one tile of its heads: a head's square sum over whole rows, then its halves.

    PAGED: y has the query heads only, and keys and their values, which lie behind the keys, go to
    the token's slot.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, HALF)
    dtype = y_ptr.dtype.element_ty
    inside = (h[:, None] < heads) & (r[None, :] < half)
    x_ptrs = x_ptr + t * stride + h[:, None] * width + r[None, :]
    first = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        d = tl.arange(0, WIDTH)
        whole = (h[:, None] < heads) & (d[None, :] < width)
        row_ptrs = x_ptr + t * stride + h[:, None] * width + d[None, :]
        x = tl.load(row_ptrs, mask=whole, other=0.0).to(tl.float32)
        inverse = _inverse_rms(x, width, eps)[:, None]
        is_query = h[:, None] < query_heads
        q1 = tl.load(q_norm_ptr + r, mask=r < half, other=0.0).to(tl.float32)
        q2 = tl.load(q_norm_ptr + half + r, mask=r < half, other=0.0).to(tl.float32)
        k1 = tl.load(k_norm_ptr + r, mask=r < half, other=0.0).to(tl.float32)
        k2 = tl.load(k_norm_ptr + half + r, mask=r < half, other=0.0).to(tl.float32)
        first = first * inverse * tl.where(is_query, q1[None, :], k1[None, :])
        second = second * inverse * tl.where(is_query, q2[None, :], k2[None, :])
        first = first.to(dtype).to(tl.float32)
        second = second.to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + t * half + r, mask=r < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + t * half + r, mask=r < half, other=0.0)[None, :]
    cos = tl.broadcast_to(cos, first.shape)
    sin = tl.broadcast_to(sin, first.shape)
    left = _product(first, cos) - _product(second, sin)
    right = _product(second, cos) + _product(first, sin)
    kept = query_heads if PAGED else heads
    is_kept = inside & (h[:, None] < kept)
    y_ptrs = y_ptr + (t * kept + h[:, None]) * width + r[None, :]
    tl.store(y_ptrs, left.to(dtype), mask=is_kept)
    tl.store(y_ptrs + half, right.to(dtype), mask=is_kept)
    if PAGED:
        kv_heads = heads - query_heads
        is_key = inside & (h[:, None] >= query_heads)
        slot = tl.load(slots_ptr + t).to(tl.int64)
        to = (slot * kv_heads + h[:, None] - query_heads) * width + r[None, :]
        tl.store(k_pages_ptr + to, left.to(dtype), mask=is_key)
        tl.store(k_pages_ptr + to + half, right.to(dtype), mask=is_key)
        v_ptrs = x_ptrs + kv_heads * width
        tl.store(v_pages_ptr + to, tl.load(v_ptrs, mask=is_key), mask=is_key)
        tl.store(v_pages_ptr + to + half, tl.load(v_ptrs + half, mask=is_key), mask=is_key)


@triton.jit(do_not_specialize=["limit", "chunks"])
def _draw_chunk(
    logits_ptr, temperature_ptr, greedy_ptr, keys_ptr, positions_ptr, score_ptr, top_ptr, sum_ptr,
    index_ptr, vocabulary, limit, chunks, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk's best score and its lowest token, and the maximum and sum of `logprob`."""
    row, v, at = row_and_chunk(vocabulary, CHUNK)
    x = scaled(logits_ptr, temperature_ptr, row, v, at, vocabulary, limit)
    top, _, p = exponentials(x)
    k0, k1, position = row_key(keys_ptr, positions_ptr, row)
    block = tl.program_id(1) * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    w0, w1, w2, w3 = philox(block.to(tl.uint32), position, k0, k1)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (CHUNK,))
    score = x + tl.where(tl.load(greedy_ptr + row) != 0, 0.0, gumbel(word))
    best = tl.max(score, 0)
    to = row * chunks + tl.program_id(1)
    tl.store(score_ptr + to, best)
    tl.store(index_ptr + to, tl.min(tl.where(score == best, v, 0x7FFFFFFF), 0))
    tl.store(top_ptr + to, top)
    tl.store(sum_ptr + to, tl.sum(p, 0))


@triton.jit(do_not_specialize=["limit", "chunks"])
def _draw_row(
    logits_ptr, temperature_ptr, score_ptr, top_ptr, sum_ptr, index_ptr, tokens_ptr, logprobs_ptr,
    vocabulary, limit, chunks, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, CHUNKS)
    at = row * chunks + j
    score = tl.load(score_ptr + at, mask=j < chunks, other=float("-inf"))
    index = tl.load(index_ptr + at, mask=j < chunks, other=0x7FFFFFFF)
    token = tl.min(tl.where(score == tl.max(score, 0), index, 0x7FFFFFFF), 0)
    token = tl.minimum(token, limit - 1).to(tl.int64)
    _, _, _, top, total = row_sum(top_ptr, sum_ptr, at, j < chunks)
    chosen = chosen_logit(logits_ptr, temperature_ptr, row, token, vocabulary)
    tl.store(tokens_ptr + row, token)
    tl.store(logprobs_ptr + row, chosen - top - tl.log(total))


@triton.jit(do_not_specialize=["rows"])
def _gated_linear(
    x_ptr, w_ptr, y_ptr, rows, columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SWAPPED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Gate and up by `linear`'s contract, each rounded as its result is, then swiglu."""
    row_tiles = tl.cdiv(rows, ROWS)
    m = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    n = (tl.program_id(0) // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * depth + k[None, :]
    gate_rows = w_ptr + tl.minimum(n, columns - 1).to(tl.int64) * depth
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate_ptrs, up_ptrs = gate_rows[:, None] + k[None, :], up_rows[:, None] + k[None, :]
    gate = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        inside = k[None, :] < depth - start
        x = tl.load(x_ptrs) if EVEN else tl.load(x_ptrs, mask=inside, other=0.0)
        w_gate = tl.load(gate_ptrs) if EVEN else tl.load(gate_ptrs, mask=inside, other=0.0)
        w_up = tl.load(up_ptrs) if EVEN else tl.load(up_ptrs, mask=inside, other=0.0)
        if SWAPPED:
            gate = tl.dot(w_gate, x.T, gate, input_precision="ieee")
            up = tl.dot(w_up, x.T, up, input_precision="ieee")
        else:
            gate = tl.dot(x, w_gate.T, gate, input_precision="ieee")
            up = tl.dot(x, w_up.T, up, input_precision="ieee")
        x_ptrs += DEPTH
        gate_ptrs += DEPTH
        up_ptrs += DEPTH
    dtype = y_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    y = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    if SWAPPED:
        y = y.T
    y_ptrs = y_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(y_ptrs, y.to(dtype), mask=(m[:, None] < rows) & (n[None, :] < columns))
