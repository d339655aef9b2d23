"""swiglu: y = silu(gate) * up, silu(g) = g / (1 + exp(-g))  (Shazeer 2020, "GLU variants").

Contract: no sums. exp, the division and the product are each rounded to float32, one rounding to
the input's dtype at the end. CPU: exp is that of `shared_ops.elementary`. CUDA: exp is the
hardware's power of two, good to 2 units in the last place. silu is spelled with exp because torch's
silu and sigmoid give an element other bits in a vector's tail than in its body.
"""

from types import ModuleType

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.swiglu import reference


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("swiglu", x) if x.is_cuda else reference


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_T2F):
        ctx.save_for_backward(gate_up_T2F)
        return _schedules(gate_up_T2F).forward(gate_up_T2F)

    @staticmethod
    def backward(ctx, *grads):
        return _schedules(grads[0]).backward(grads[0], *ctx.saved_tensors)


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """Gate the second half of the last axis with the first.

    Args:
        gate_up_T2F: [T, 2 F], gate first; float32, bfloat16 or float16.

    Returns:
        [T, F] in the dtype of the input.
    """
    if not torch.is_grad_enabled():
        return _schedules(gate_up_T2F).forward(gate_up_T2F)
    return _Swiglu.apply(gate_up_T2F)
