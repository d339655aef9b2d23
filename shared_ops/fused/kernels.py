# pyright: reportMissingImports=false, reportIndexIssue=false
"""fused on CUDA (see op.py). Tiles, warps and the order of a sum are those of rmsnorm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_ops.primitives import aligned

TILE_VALUES = 4096


def _tile(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"ROWS": max(1, TILE_VALUES // padded), "WIDTH": padded, "num_warps": 4}


def add_rmsnorm(x_TD: Tensor, y_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (rows, width), tile = x_TD.shape, _tile(x_TD.shape[1])
    sum_TD, normed_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    if rows:
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        _add_rmsnorm[grid](
            aligned(x_TD), aligned(y_TD), aligned(w_D), sum_TD, normed_TD, rows, width, eps, **tile
        )
    return sum_TD, normed_TD


def rotated_heads(qkv_TN, heads, norms, angles, eps: float) -> tuple[Tensor, Tensor]:
    cos_TR, sin_TR = angles
    tokens, half = cos_TR.shape
    count, tile = sum(heads), _tile(2 * half)
    out_THE = torch.empty((tokens, count, 2 * half), dtype=qkv_TN.dtype, device=qkv_TN.device)
    if tokens:
        q_norm_E, k_norm_E = (aligned(w_E) for w_E in norms) if norms else (cos_TR, cos_TR)
        _rotated_heads[(tokens, triton.cdiv(count, tile["ROWS"]))](
            aligned(qkv_TN), q_norm_E, k_norm_E, cos_TR.contiguous(), sin_TR.contiguous(), out_THE,
            heads[0], count, qkv_TN.shape[1], half, 2 * half, eps, NORM=norms is not None,
            HALF=triton.next_power_of_2(half), **tile,
        )  # fmt: skip
    return out_THE[:, : heads[0]], out_THE[:, heads[0] :]


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
    x_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, y_ptr, query_heads, heads, stride, half,
    width, eps, NORM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token, one tile of its heads: a head's square sum over whole rows, then its halves."""
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
    y_ptrs = y_ptr + (t * heads + h[:, None]) * width + r[None, :]
    left = _product(first, cos) - _product(second, sin)
    right = _product(second, cos) + _product(first, sin)
    tl.store(y_ptrs, left.to(dtype), mask=inside)
    tl.store(y_ptrs + half, right.to(dtype), mask=inside)
