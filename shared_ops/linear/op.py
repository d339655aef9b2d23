"""linear: y[t, n] = sum_k x[t, k] w[n, k] (+ bias[n]).

Contract: K in increasing order, in blocks of C; each block is one float32 product with one
accumulator per output; blocks are added left to right in float32; the bias is added in float32;
one rounding to the input's dtype at the end. CPU: C = 192, a block is a chain of fused
multiply-adds (`shared_ops.cpu_products`), and all of it rests on IEEE 754. CUDA: C = K (one
accumulator).
A row's bits depend on that row and the weight only.
CUDA schedules: Triton tiles of any shape, and cuBLAS where it does not split K; which of them runs
follows from the row count, and all are bit-equal (`shared_ops.products`). float32 inputs are
multiplied in float32, not TF32.

Backward: dx obeys the same contract over n. dw sums over tokens; it is bit-equal from run to run
for one packing. CPU: in increasing order in blocks of 192 tokens, for any number of threads, and
dbias in lanes (`shared_ops.primitives`). CUDA: in the order of one library product for the shape.
"""

from types import ModuleType

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.linear import reference


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("linear", x) if x.is_cuda else reference


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, w_NK, bias_N):
        ctx.save_for_backward(x_TK, w_NK)
        ctx.has_bias = bias_N is not None
        return _schedules(x_TK).forward(x_TK, w_NK, bias_N)

    @staticmethod
    def backward(ctx, *grads):
        x_TK, w_NK = ctx.saved_tensors
        dx_TK, dw_NK, dbias_N = _schedules(x_TK).backward(
            grads[0], x_TK, w_NK, needs=ctx.needs_input_grad
        )
        return dx_TK, dw_NK, dbias_N if ctx.has_bias else None


def linear(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Apply a weight to packed tokens.

    Args:
        x_TK: [T, K] float32, bfloat16 or float16.
        w_NK: [N, K] of the same dtype.
        bias_N: [N] of the same dtype, or None.

    Returns:
        [T, N] in the dtype of `x_TK`.

    Raises:
        ValueError: the widths of `x_TK` and `w_NK` differ.
    """
    if x_TK.shape[-1] != w_NK.shape[-1]:
        raise ValueError(
            f"linear: input width {x_TK.shape[-1]} and weight width {w_NK.shape[-1]} differ"
        )
    if not torch.is_grad_enabled():
        return _schedules(x_TK).forward(x_TK, w_NK, bias_N)
    return _Linear.apply(x_TK, w_NK, bias_N)
