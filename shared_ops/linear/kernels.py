"""linear on CUDA (contract: op.py). The products are those of `shared_ops.products`."""

import torch
from torch import Tensor

from shared_ops.products import product


def forward(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    y_MN = product(x_TK.reshape(-1, x_TK.shape[-1]), w_NK, bias_N)
    return y_MN.view(*x_TK.shape[:-1], w_NK.shape[0])


def backward(dy_TN: Tensor, x_TK: Tensor, w_NK: Tensor, needs):
    """dw and dbias are one library call each: a fixed order for fixed shapes, no atomics."""
    dy_MN = dy_TN.reshape(-1, dy_TN.shape[-1]).contiguous()
    x_MK = x_TK.reshape(-1, x_TK.shape[-1])
    dx_TK = product(dy_MN, w_NK.T).view(x_TK.shape) if needs[0] else None
    dw_NK = torch.mm(dy_MN.T, x_MK) if needs[1] else None
    dbias_N = dy_MN.sum(0, dtype=torch.float32).to(w_NK.dtype) if needs[2] else None
    return dx_TK, dw_NK, dbias_N
