# pyright: reportMissingImports=false, reportIndexIssue=false
"""swiglu on CUDA (contract: op.py). Fused multiply-add is off: each operation is rounded."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def forward(gate_up_T2F: Tensor) -> Tensor:
    rows_R2F = gate_up_T2F.reshape(-1, gate_up_T2F.shape[-1]).contiguous()
    rows, width = rows_R2F.shape[0], rows_R2F.shape[1] // 2
    y_RF = torch.empty((rows, width), dtype=rows_R2F.dtype, device=rows_R2F.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _forward[grid](rows_R2F, y_RF, width, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)
    return y_RF.view(*gate_up_T2F.shape[:-1], width)


def backward(dy_TF: Tensor, gate_up_T2F: Tensor) -> Tensor:
    rows_R2F = gate_up_T2F.reshape(-1, gate_up_T2F.shape[-1]).contiguous()
    rows, width = rows_R2F.shape[0], rows_R2F.shape[1] // 2
    d_R2F = torch.empty_like(rows_R2F)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _backward[grid](dy_TF.contiguous(), rows_R2F, d_R2F, width, BLOCK=BLOCK, num_warps=4)
    return d_R2F.view(gate_up_T2F.shape)


@triton.jit
def _gate_and_up(gate_up_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = gate_up_ptr + row * 2 * width
    gate = tl.load(base + f, mask=f < width, other=0.0).to(tl.float32)
    up = tl.load(base + width + f, mask=f < width, other=0.0).to(tl.float32)
    return row, f, gate, up


@triton.jit
def _forward(gate_up_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row, f, gate, up = _gate_and_up(gate_up_ptr, width, BLOCK)
    y = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + f, y.to(y_ptr.dtype.element_ty), mask=f < width)


@triton.jit
def _backward(dy_ptr, gate_up_ptr, d_ptr, width, BLOCK: tl.constexpr):
    row, f, gate, up = _gate_and_up(gate_up_ptr, width, BLOCK)
    dy = tl.load(dy_ptr + row * width + f, mask=f < width, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    d_ptrs = d_ptr + row * 2 * width + f
    tl.store(d_ptrs, dgate.to(d_ptr.dtype.element_ty), mask=f < width)
    tl.store(d_ptrs + width, (dy * silu).to(d_ptr.dtype.element_ty), mask=f < width)
