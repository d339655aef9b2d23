"""lora on CUDA (contract: op.py). The products are those of `shared_ops.products`."""

import torch
from torch import Tensor

from shared_ops.lora.spans import pieces
from shared_ops.products import product


def forward(y_TN: Tensor, x_TK: Tensor, a_QK: Tensor, b_MR: Tensor, spans, scale: float):
    """Scale and sum are launches of their own, so no fused multiply-add takes a rounding away."""
    z_TQ, out_TN = product(x_TK, a_QK), y_TN.clone()
    for columns, z_TR, b_NR in pieces(spans, z_TQ, b_MR):
        delta_TN = product(z_TR, b_NR, out_dtype=torch.float32).mul_(scale)
        out_TN[:, columns] = delta_TN.add_(y_TN[:, columns])
    return out_TN, z_TQ


def backward(dy_TN: Tensor, x_TK, z_TQ, a_QK, b_MR, spans, scale: float, needs_dx: bool):
    """dA and dB are one library call each: a fixed order for fixed shapes, no atomics."""
    dz_TQ, db_MR = torch.empty_like(z_TQ), torch.empty_like(b_MR)
    gradients = pieces(spans, dz_TQ, db_MR)
    for (columns, z_TR, b_NR), (_, dz_TR, db_NR) in zip(
        pieces(spans, z_TQ, b_MR), gradients, strict=True
    ):
        dy_TP = dy_TN[:, columns].contiguous()
        dz_TR.copy_(product(dy_TP, b_NR.T, out_dtype=torch.float32).mul_(scale))
        db_NR.copy_(torch.mm(dy_TP.T, z_TR).mul_(scale))
    dx_TK = product(dz_TQ, a_QK.T) if needs_dx else None
    return dx_TK, torch.mm(dz_TQ.T, x_TK), db_MR
