"""rope in plain torch (contract: op.py)."""

import torch
from torch import Tensor

from shared_ops.primitives import row_blocks


def forward(x_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    out_THE = torch.empty_like(x_THE, memory_format=torch.contiguous_format)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    for some in row_blocks(x_THE.shape[0], x_THE[:1].numel()):
        first_THR, second_THR = x_THE[some].float().chunk(2, dim=-1)
        out_first_THR, out_second_THR = out_THE[some].chunk(2, dim=-1)
        cos, sin = cos_T1R[some], sin_T1R[some]
        out_first_THR.copy_((first_THR * cos).sub_(second_THR * sin))
        out_second_THR.copy_((second_THR * cos).add_(first_THR * sin))
    return out_THE


def backward(dy_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor, out_THE=None) -> Tensor:
    """out_THE: where the gradient is put."""
    dx_THE = forward(dy_THE, cos_TR, -sin_TR)
    return dx_THE if out_THE is None else out_THE.copy_(dx_THE)
