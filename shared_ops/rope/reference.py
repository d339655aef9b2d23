"""rope in plain torch (contract: op.py)."""

import torch
from torch import Tensor


def forward(x_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    first_THR, second_THR = x_THE.float().chunk(2, dim=-1)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    rotated_THE = torch.cat(
        (
            first_THR * cos_T1R - second_THR * sin_T1R,
            second_THR * cos_T1R + first_THR * sin_T1R,
        ),
        dim=-1,
    )
    return rotated_THE.to(x_THE.dtype)


def backward(dy_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor, out_THE=None) -> Tensor:
    """out_THE: where the gradient is put."""
    dx_THE = forward(dy_THE, cos_TR, -sin_TR)
    return dx_THE if out_THE is None else out_THE.copy_(dx_THE)
