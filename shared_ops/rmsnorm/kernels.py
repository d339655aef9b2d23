# pyright: reportMissingImports=false, reportIndexIssue=false
"""rmsnorm on CUDA (contract: op.py): each row is reduced inside one program.

How a row's squares are added follows from the tile and its register layout, and both follow from
the width alone: pointers and strides are brought to one alignment first and the row count is never
specialised on, so there is one compiled kernel for a width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_ops.primitives import aligned

TILE_VALUES = 4096
SPECIALISED = 16  # bytes of a pointer and values of a stride that triton specialises on
PROGRAMS = 512


def _tile(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"ROWS": max(1, TILE_VALUES // padded), "WIDTH": padded, "num_warps": 4}


def _is_read_in_place(x_RD: Tensor) -> bool:
    """Whether x is heads that lie side by side in wider tokens, aligned like a fresh tensor."""
    width = x_RD.shape[-1]
    is_view = x_RD.dim() == 3 and x_RD.stride(2) == 1 and x_RD.stride(1) == width
    return is_view and not any(n % SPECIALISED for n in (width, x_RD.stride(0), x_RD.data_ptr()))


def _rows_of(x_RD: Tensor) -> tuple[Tensor, int, int]:
    """x, how many rows lie side by side (heads of a token), and the stride between such groups."""
    if _is_read_in_place(x_RD):
        return x_RD, x_RD.shape[1], x_RD.stride(0)
    return aligned(x_RD), 1, x_RD.shape[-1]


def forward(x_RD: Tensor, w_D: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    width = x_RD.shape[-1]
    y_RD = torch.empty(x_RD.shape, dtype=out_dtype or x_RD.dtype, device=x_RD.device)
    rows = y_RD.numel() // width
    if rows:
        x_RD, heads, stride = _rows_of(x_RD)
        tile = _tile(width)
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        _forward[grid](x_RD, aligned(w_D), y_RD, rows, heads, stride, width, eps, **tile)
    return y_RD


def backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    w_D: Tensor,
    eps: float,
    residual_RD: Tensor | None = None,
    out_RD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dw: each program adds its own run of rows, the partial sums are added in one fixed order.

    residual_RD: added to dx, after dx was rounded; out_RD: where dx is put.
    """
    if out_RD is not None and not _is_read_in_place(out_RD):
        dx_RD, dw_D = backward(dy_RD, x_RD, w_D, eps, residual_RD)
        return out_RD.copy_(dx_RD), dw_D
    if residual_RD is not None and x_RD.dtype == torch.float32:
        # Nothing is rounded in between, so in the kernel it could become a fused multiply-add.
        dx_RD, dw_D = backward(dy_RD, x_RD, w_D, eps, out_RD=out_RD)
        return dx_RD.add_(residual_RD), dw_D
    width = x_RD.shape[-1]
    dx_RD, dx_heads, dx_stride = out_RD, 1, width
    if dx_RD is None:
        dx_RD = torch.empty(x_RD.shape, dtype=x_RD.dtype, device=x_RD.device)
    else:
        dx_heads, dx_stride = dx_RD.shape[1], dx_RD.stride(0)
    rows = dx_RD.numel() // width
    if rows == 0:
        return dx_RD, torch.zeros_like(w_D)
    x_RD, heads, stride = _rows_of(x_RD)
    added_RD = x_RD if residual_RD is None else aligned(residual_RD)
    tile = _tile(width)
    tiles = triton.cdiv(rows, tile["ROWS"])
    each = triton.cdiv(tiles, PROGRAMS)
    programs = triton.cdiv(tiles, each)
    partial_PD = torch.empty((programs, width), dtype=torch.float32, device=x_RD.device)
    _backward[(programs,)](
        aligned(dy_RD), x_RD, aligned(w_D), added_RD, dx_RD, partial_PD, rows, heads, stride,
        dx_heads, dx_stride, width, eps, each, RESIDUAL=residual_RD is not None, **tile,
    )  # fmt: skip
    return dx_RD, partial_PD.sum(0).to(w_D.dtype)


@triton.jit
def _inverse_rms(x, width, eps):
    mean = tl.sum(x * x, 1) / width
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit(do_not_specialize=["rows", "heads"])
def _forward(
    x_ptr, w_ptr, y_ptr, rows, heads, stride, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = (r[:, None] < rows) & (d[None, :] < width)
    x_ptrs = x_ptr + (r // heads * stride + r % heads * width)[:, None] + d[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < width, other=0.0).to(tl.float32)
    y = x * _inverse_rms(x, width, eps)[:, None] * w[None, :]
    y_ptrs = y_ptr + r[:, None] * width + d[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "heads", "dx_heads", "each"])
def _backward(
    dy_ptr,
    x_ptr,
    w_ptr,
    residual_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    heads,
    stride,
    dx_heads,
    dx_stride,
    width,
    eps,
    each,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    d = tl.arange(0, WIDTH)
    w = tl.load(w_ptr + d, mask=d < width, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in range(tl.program_id(0) * each, (tl.program_id(0) + 1) * each):
        r = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (r[:, None] < rows) & (d[None, :] < width)
        flat = r[:, None] * width + d[None, :]
        x_ptrs = x_ptr + (r // heads * stride + r % heads * width)[:, None] + d[None, :]
        x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + flat, mask=inside, other=0.0).to(tl.float32)
        inverse = _inverse_rms(x, width, eps)[:, None]
        normed = x * inverse
        scaled = dy * w[None, :]
        mean = tl.sum(scaled * normed, 1) / width
        dx = ((scaled - normed * mean[:, None]) * inverse).to(dx_ptr.dtype.element_ty)
        if RESIDUAL:
            added = tl.load(residual_ptr + flat, mask=inside, other=0.0).to(tl.float32)
            dx = (dx.to(tl.float32) + added).to(dx_ptr.dtype.element_ty)
        dx_at = (r // dx_heads * dx_stride + r % dx_heads * width)[:, None] + d[None, :]
        tl.store(dx_ptr + dx_at, dx, mask=inside)
        dw += dy * normed
    tl.store(partial_ptr + tl.program_id(0) * width + d, tl.sum(dw, 0), mask=d < width)
