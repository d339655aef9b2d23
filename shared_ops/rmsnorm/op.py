"""rmsnorm: y[r, d] = x[r, d] / sqrt(mean_d x[r, d]^2 + eps) * w[d]  (Zhang & Sennrich 2019, eq. 4).

Contract: everything in float32; the squares of a row are summed in an order that depends on the
width only; y = (x * (1 / sqrt(mean + eps))) * w, each operation rounded to float32, one rounding
to the input's dtype at the end. A row's bits depend on that row and the weight only.

CPU: a row is summed in lanes (`shared_ops.primitives`), and the square root is IEEE 754's; nothing
else is relied on.

CUDA: a row is summed inside one program, in the order of a register layout that the width fixes.

Backward: rows by themselves; dw sums over rows, bit-equal from run to run (CPU: in lanes; CUDA:
runs of rows in parallel, their sums added in one fixed order).
"""

from types import ModuleType

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.rmsnorm import reference


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("rmsnorm", x) if x.is_cuda else reference


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, w_D, eps):
        ctx.save_for_backward(x_RD, w_D)
        ctx.eps = eps
        return _schedules(x_RD).forward(x_RD, w_D, eps)

    @staticmethod
    def backward(ctx, *grads):
        x_RD, w_D = ctx.saved_tensors
        dx_RD, dw_D = _schedules(x_RD).backward(grads[0], x_RD, w_D, ctx.eps)
        return dx_RD, dw_D, None


def rmsnorm(x_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """Normalise the last axis.

    Args:
        x_RD: [..., D] float32, bfloat16 or float16 (tokens, or tokens x heads for qk-norm).
        w_D: [D] of the same dtype.
        eps: added to the mean square.

    Returns:
        The shape and dtype of `x_RD`.
    """
    if not torch.is_grad_enabled():
        return _schedules(x_RD).forward(x_RD, w_D, eps)
    return _RmsNorm.apply(x_RD, w_D, eps)
