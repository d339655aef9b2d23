"""lora in plain torch (contract: op.py)."""

import torch
from torch import Tensor

from shared_ops.lora.spans import pieces
from shared_ops.primitives import fixed_product, token_product


def forward(y_TN: Tensor, x_TK: Tensor, a_QK: Tensor, b_MR: Tensor, spans, scale: float):
    z_TQ = fixed_product(x_TK, a_QK.T).to(x_TK.dtype)
    wide_TN = y_TN.to(torch.float32, copy=True)
    for columns, z_TR, b_NR in pieces(spans, z_TQ, b_MR):
        wide_TN[:, columns] += fixed_product(z_TR, b_NR.T) * scale
    return wide_TN.to(y_TN.dtype), z_TQ


def backward(dy_TN: Tensor, x_TK, z_TQ, a_QK, b_MR, spans, scale: float, needs_dx: bool):
    dz_TQ, db_MR = torch.empty_like(z_TQ), torch.empty_like(b_MR)
    gradients = pieces(spans, dz_TQ, db_MR)
    for (columns, z_TR, b_NR), (_, dz_TR, db_NR) in zip(
        pieces(spans, z_TQ, b_MR), gradients, strict=True
    ):
        dz_TR.copy_(fixed_product(dy_TN[:, columns], b_NR) * scale)
        db_NR.copy_(token_product(dy_TN[:, columns], z_TR) * scale)
    dx_TK = fixed_product(dz_TQ, a_QK).to(x_TK.dtype) if needs_dx else None
    return dx_TK, token_product(dz_TQ, x_TK).to(a_QK.dtype), db_MR
