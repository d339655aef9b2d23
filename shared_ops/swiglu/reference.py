"""swiglu in plain torch (contract: op.py)."""

import torch
from torch import Tensor

from shared_ops.elementary import exp
from shared_ops.primitives import row_blocks


def forward(gate_up_T2F: Tensor) -> Tensor:
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[-1] // 2
    out_TF = gate_up_T2F.new_empty((*gate_up_T2F.shape[:-1], width))
    for some in row_blocks(rows, gate_up_T2F[:1].numel()):
        gate_TF, up_TF = gate_up_T2F[some].float().chunk(2, dim=-1)
        below_TF = exp(-gate_TF).add_(1.0)
        out_TF[some] = torch.div(gate_TF, below_TF, out=below_TF).mul_(up_TF)
    return out_TF


def backward(dy_TF: Tensor, gate_up_T2F: Tensor) -> Tensor:
    out_T2F = torch.empty_like(gate_up_T2F, memory_format=torch.contiguous_format)
    for some in row_blocks(gate_up_T2F.shape[0], gate_up_T2F[:1].numel()):
        _backward(dy_TF[some].float(), gate_up_T2F[some].float(), out_T2F[some])
    return out_T2F


def _backward(dy_TF: Tensor, gate_up_T2F: Tensor, out_T2F: Tensor) -> None:
    (gate_TF, up_TF), (dgate_TF, dup_TF) = gate_up_T2F.chunk(2, -1), out_T2F.chunk(2, -1)
    sigmoid_TF = exp(-gate_TF).add_(1.0).reciprocal_()
    silu_TF = gate_TF * sigmoid_TF
    dup_TF.copy_(dy_TF * silu_TF)
    slope_TF = silu_TF.mul_(1.0 - sigmoid_TF).add_(sigmoid_TF)
    dgate_TF.copy_((dy_TF * up_TF).mul_(slope_TF))
