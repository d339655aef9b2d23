"""rope in plain torch (contract: op.py)."""

import torch
from torch import Tensor

from shared_ops.primitives import by_rows


def forward(x_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    out_THE = torch.empty_like(x_THE, memory_format=torch.contiguous_format)
    cos_T1E = torch.cat((cos_TR, cos_TR), -1).unsqueeze(1)
    sin_T1E = torch.cat((-sin_TR, sin_TR), -1).unsqueeze(1)
    by_rows(_rotate, x_THE, cos_T1E, sin_T1E, out_THE)
    return out_THE


def _rotate(x_THE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, out_THE: Tensor) -> None:
    """x1 cos + x2 (-sin) is x1 cos - x2 sin to the bit."""
    x_THE = x_THE.float()
    first_THR, second_THR = x_THE.chunk(2, dim=-1)
    turned_THE = torch.cat((second_THR, first_THR), -1).mul_(sin_T1E)
    torch.add(x_THE * cos_T1E, turned_THE, out=out_THE)


def backward(dy_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor, out_THE=None) -> Tensor:
    """out_THE: where the gradient is put."""
    dx_THE = forward(dy_THE, cos_TR, -sin_TR)
    return dx_THE if out_THE is None else out_THE.copy_(dx_THE)
