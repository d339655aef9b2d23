# pyright: reportMissingImports=false, reportIndexIssue=false
"""rope on CUDA (contract: op.py). Fused multiply-add is off: each operation is rounded."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def forward(x_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    return _launch(x_THE, cos_TR, sin_TR, negate=False)


def backward(dy_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor, out_THE=None) -> Tensor:
    """out_THE: where the gradient is put; its heads lie side by side."""
    return _launch(dy_THE, cos_TR, sin_TR, negate=True, out_THE=out_THE)


def _launch(x_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor, negate: bool, out_THE=None) -> Tensor:
    tokens, heads, width = x_THE.shape
    if x_THE.stride(2) != 1 or x_THE.stride(1) != width:
        x_THE = x_THE.contiguous()
    y_THE = out_THE
    if y_THE is None:
        y_THE = torch.empty((tokens, heads, width), dtype=x_THE.dtype, device=x_THE.device)
    if tokens:
        _rotate[(tokens,)](
            x_THE,
            cos_TR.contiguous(),
            sin_TR.contiguous(),
            y_THE,
            heads,
            x_THE.stride(0),
            y_THE.stride(0),
            width // 2,
            NEGATE=negate,
            HEADS=triton.next_power_of_2(heads),
            HALF=triton.next_power_of_2(width // 2),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y_THE


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    heads,
    stride_t,
    stride_y,
    half,
    NEGATE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    r = tl.arange(0, HALF)[None, :]
    inside = (h < heads) & (r < half)
    cos = tl.load(cos_ptr + t * half + r, mask=r < half, other=0.0)
    sin = tl.load(sin_ptr + t * half + r, mask=r < half, other=0.0)
    if NEGATE:
        sin = -sin
    x_ptrs = x_ptr + t * stride_t + h * (2 * half) + r
    first = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + half, mask=inside, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + t * stride_y + h * (2 * half) + r
    dtype = y_ptr.dtype.element_ty
    tl.store(y_ptrs, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(y_ptrs + half, (second * cos + first * sin).to(dtype), mask=inside)
