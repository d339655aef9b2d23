"""swiglu in plain torch (contract: op.py)."""

import torch
from torch import Tensor

from shared_ops.elementary import exp


def forward(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return (gate_TF / (1.0 + exp(-gate_TF)) * up_TF).to(gate_up_T2F.dtype)


def backward(dy_TF: Tensor, gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    dy_TF = dy_TF.float()
    sigmoid_TF = 1.0 / (1.0 + exp(-gate_TF))
    silu_TF = gate_TF * sigmoid_TF
    dgate_TF = dy_TF * up_TF * (sigmoid_TF + silu_TF * (1.0 - sigmoid_TF))
    return torch.cat((dgate_TF, dy_TF * silu_TF), dim=-1).to(gate_up_T2F.dtype)
