"""swiglu in plain torch (contract: op.py)."""

import torch
from torch import Tensor

from shared_ops.elementary import exp
from shared_ops.primitives import by_rows


def forward(gate_up_T2F: Tensor) -> Tensor:
    shape = *gate_up_T2F.shape[:-1], gate_up_T2F.shape[-1] // 2
    out_TF = gate_up_T2F.new_empty(shape)
    by_rows(_forward, gate_up_T2F, out_TF)
    return out_TF


def _forward(gate_up_T2F: Tensor, out_TF: Tensor) -> None:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    below_TF = exp(-gate_TF).add_(1.0)
    torch.mul(torch.div(gate_TF, below_TF, out=below_TF), up_TF, out=out_TF)


def backward(dy_TF: Tensor, gate_up_T2F: Tensor) -> Tensor:
    out_T2F = torch.empty_like(gate_up_T2F, memory_format=torch.contiguous_format)
    by_rows(_backward, gate_up_T2F, dy_TF, out_T2F)
    return out_T2F


def _backward(gate_up_T2F: Tensor, dy_TF: Tensor, out_T2F: Tensor) -> None:
    dy_TF = dy_TF.float()
    (gate_TF, up_TF), (dgate_TF, dup_TF) = (x.chunk(2, -1) for x in (gate_up_T2F.float(), out_T2F))
    sigmoid_TF = exp(-gate_TF).add_(1.0).reciprocal_()
    silu_TF = gate_TF * sigmoid_TF
    torch.mul(dy_TF, silu_TF, out=dup_TF)
    slope_TF = silu_TF.mul_(1.0 - sigmoid_TF).add_(sigmoid_TF)
    torch.mul(dy_TF * up_TF, slope_TF, out=dgate_TF)
