"""embedding: y[t] = w[token_ids[t]].

Contract: a copy, no sums. Backward: the gradient of a row adds its tokens in increasing order of t
in float32, without atomics.
"""

from types import ModuleType

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.embedding import reference


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("embedding", x) if x.is_cuda else reference


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token_ids_T, w_VD):
        ctx.save_for_backward(token_ids_T)
        ctx.rows, ctx.dtype = w_VD.shape[0], w_VD.dtype
        return _schedules(w_VD).forward(token_ids_T, w_VD)

    @staticmethod
    def backward(ctx, *grads):
        dw_VD = _schedules(grads[0]).backward(grads[0], *ctx.saved_tensors, ctx.rows)
        return None, dw_VD.to(ctx.dtype)


def embedding(token_ids_T: Tensor, w_VD: Tensor) -> Tensor:
    """Look tokens up.

    Args:
        token_ids_T: [T] int64, each in [0, V).
        w_VD: [V, D].

    Returns:
        [T, D] in the dtype of `w_VD`.
    """
    if not torch.is_grad_enabled():
        return _schedules(w_VD).forward(token_ids_T, w_VD)
    return _Embedding.apply(token_ids_T, w_VD)
