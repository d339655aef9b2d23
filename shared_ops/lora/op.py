"""lora: y + scale * (x A^T) B^T, the path beside a frozen product (Hu et al. 2021, "LoRA").

Contract: the path stays apart from the frozen weight, whose product y comes in already rounded.
z = x A^T obeys the contract of `linear` over K and is rounded to the input's dtype; z B^T obeys it
over the rank and stays float32; it is multiplied by scale (rounded to float32), y is added in
float32; one rounding to the input's dtype at the end. Several adapters of one input share the
product with A (their rows lie one after another), and each B writes its own columns of y; columns
without an adapter keep their bits. A row's bits depend on that row, A, B and scale only.

Backward: dy reaches y as it is. dz = scale * dy B obeys the contract of `linear` over the columns
of B, is multiplied in float32 and rounded once; dx = dz A obeys it over the rows of A. dA and dB
sum over tokens as dw of `linear` does: bit-equal from run to run for one packing.
"""

from types import ModuleType

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.lora import reference
from shared_ops.lora.spans import Spans, columns_of


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("lora", x) if x.is_cuda else reference


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_TN, x_TK, a_QK, b_MR, spans, scale):
        out_TN, z_TQ = _schedules(x_TK).forward(y_TN, x_TK, a_QK, b_MR, spans, scale)
        ctx.save_for_backward(x_TK, z_TQ, a_QK, b_MR)
        ctx.spans, ctx.scale = spans, scale
        return out_TN

    @staticmethod
    def backward(ctx, *grads):
        dx_TK, da_QK, db_MR = _schedules(grads[0]).backward(
            grads[0], *ctx.saved_tensors, ctx.spans, ctx.scale, needs_dx=ctx.needs_input_grad[1]
        )
        return grads[0], dx_TK, da_QK, db_MR, None, None


def lora(
    y_TN: Tensor, x_TK: Tensor, a_QK: Tensor, b_MR: Tensor, spans: Spans, scale: float
) -> Tensor:
    """Add the low-rank paths of one input to its product with the frozen weight.

    Args:
        y_TN: [T, N] float32, bfloat16 or float16.
        x_TK: [T, K] of the same dtype.
        a_QK: [Q, K], Q = (number of spans) R; the A of each span, one after another.
        b_MR: [M, R], M the columns of all spans together; the B of each, one after another.
        spans: (first, end) columns of y that each adapter adds to, in the order of A and B.
        scale: what the paths are multiplied by (alpha / rank).

    Returns:
        [T, N] in the dtype of `y_TN`.

    Raises:
        ValueError: widths that do not fit one another.
    """
    rank, columns = b_MR.shape[1], sum(columns_of(spans))
    if a_QK.shape != (rank * len(spans), x_TK.shape[-1]) or b_MR.shape[0] != columns:
        raise ValueError(
            f"lora: A {tuple(a_QK.shape)} and B {tuple(b_MR.shape)} do not fit an input of width "
            f"{x_TK.shape[-1]} and {len(spans)} spans of {columns} columns together"
        )
    if not torch.is_grad_enabled():
        return _schedules(x_TK).forward(y_TN, x_TK, a_QK, b_MR, spans, scale)[0]
    return _Lora.apply(y_TN, x_TK, a_QK, b_MR, spans, scale)
