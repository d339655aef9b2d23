"""fused: neighbouring ops in one launch, with the bits of the ops one by one.

No contract of its own: `add_rmsnorm` is the rounded sum of the residual and then `rmsnorm`;
`rotated_heads` is `rmsnorm` of every query and key head (where the model has that) and then `rope`.
CUDA only, and without gradients. Sums run in the register layout of `rmsnorm`, and `rope`'s
products are kept from fused multiply-add, so equality is expected; it is used only where the
attestation saw it (`allow`).
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from shared_ops import cuda

SPECIALISED = 16  # widths that are multiples of it are laid out in registers as rmsnorm's are


class Widths(NamedTuple):
    """What the equality was proved for: hidden size, head width, dtype."""

    hidden: int
    head: int
    dtype: torch.dtype


_allowed: set[Widths] = set()


def allow(widths: Widths, is_equal: bool) -> None:
    """The attestation's verdict."""
    (_allowed.add if is_equal else _allowed.discard)(widths)


def can_be(widths: Widths) -> bool:
    return not any(width % SPECIALISED for width in widths[:2])


def is_allowed(x_TD: Tensor, head: int, needs_proof: bool = True) -> bool:
    """Whether a forward may use these ops for tokens like x."""
    if not x_TD.is_cuda or torch.is_grad_enabled():
        return False
    widths = Widths(x_TD.shape[-1], head, x_TD.dtype)
    return widths in _allowed if needs_proof else can_be(widths)


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("fused", x)


def add_rmsnorm(x_TD: Tensor, y_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its rmsnorm.

    Args:
        x_TD: [T, D] bfloat16, float16 or float32 on CUDA, contiguous.
        y_TD: [T, D] likewise.
        w_D: [D] of the same dtype.
        eps: added to the mean square.

    Returns:
        Two [T, D] in the dtype of `x_TD`.
    """
    return _schedules(x_TD).add_rmsnorm(x_TD, y_TD, w_D, eps)


def rotated_heads(
    qkv_TN: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Query and key heads of the fused projection, normalised and rotated.

    Args:
        qkv_TN: [T, (H + 2 K) E] bfloat16, float16 or float32 on CUDA, contiguous.
        heads: H and K.
        norms: [E] weights of the queries' and the keys' rmsnorm, or None.
        angles: float32 [T, E / 2] cosines and sines.
        eps: of rmsnorm.

    Returns:
        [T, H, E] and [T, K, E], views of one array.
    """
    return _schedules(qkv_TN).rotated_heads(qkv_TN, heads, norms, angles, eps)
