"""rope: rotate the halves of each head by its position's angles (Su et al. 2021, "rotate half").

Contract: no sums. y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin with each product and sum rounded to
float32 (no fused multiply-add), one rounding to the input's dtype at the end. The angles come
from `shared_ops.model.rope_table`, a function of the position only.

Backward: the rotation by the opposite angle.
"""

from types import ModuleType

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.rope import reference


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("rope", x) if x.is_cuda else reference


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THE, cos_TR, sin_TR):
        ctx.save_for_backward(cos_TR, sin_TR)
        return _schedules(x_THE).forward(x_THE, cos_TR, sin_TR)

    @staticmethod
    def backward(ctx, *grads):
        return _schedules(grads[0]).backward(grads[0], *ctx.saved_tensors), None, None


def rope(x_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate queries or keys.

    Args:
        x_THE: [T, H, E] float32, bfloat16 or float16.
        cos_TR: [T, E / 2] float32.
        sin_TR: [T, E / 2] float32.

    Returns:
        The shape and dtype of `x_THE`.
    """
    if not torch.is_grad_enabled():
        return _schedules(x_THE).forward(x_THE, cos_TR, sin_TR)
    return _Rope.apply(x_THE, cos_TR, sin_TR)
