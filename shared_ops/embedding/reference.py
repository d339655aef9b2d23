"""embedding in plain torch (contract: op.py)."""

import torch
from torch import Tensor


def forward(token_ids_T: Tensor, w_VD: Tensor) -> Tensor:
    return w_VD.index_select(0, token_ids_T)


def backward(dy_TD: Tensor, token_ids_T: Tensor, rows: int) -> Tensor:
    dw_VD = dy_TD.new_zeros((rows, dy_TD.shape[1]), dtype=torch.float32)
    return dw_VD.index_add_(0, token_ids_T, dy_TD.float())
