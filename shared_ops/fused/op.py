"""fused: neighbouring ops in one launch, with the bits of the ops one by one.

No contract of its own: `add_rmsnorm` is the rounded sum of the residual and then `rmsnorm`;
`rotated_heads` is `rmsnorm` of every query and key head (where the model has that), then `rope`,
and `rotated_queries` then the copy of keys and values into pages; `gated_linear` is `linear` and
then `swiglu`; `draw_scored` is `scaled_logits` after the head's product, then `draw` or `greedy`,
then `select_logprobs`, reading the logits once.
CUDA only, and without gradients. Sums run in the register layout of `rmsnorm`, and `rope`'s
products are kept from fused multiply-add, so equality is expected; it is used only where the
attestation saw it (`allow`).
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from shared_ops import cuda

GATED_ROWS = 32  # above, the vendor library's product and a pass of its own are faster
SPECIALISED = 16  # widths that are multiples of it are laid out in registers as rmsnorm's are


class Widths(NamedTuple):
    """What the equality was proved for: hidden size, head width, dtype."""

    hidden: int
    head: int
    dtype: torch.dtype


class Places(NamedTuple):
    """Where T tokens' keys and values go: pages [P, S, K, E], and int64 page x S + place in it."""

    k_pages_PSKE: Tensor
    v_pages_PSKE: Tensor
    slots_T: Tensor


_allowed: set[Widths | int] = set()


def allow(widths: Widths | int, is_equal: bool) -> None:
    """The attestation's verdict; a number is the vocabulary that `draw_scored` was tried with."""
    (_allowed.add if is_equal else _allowed.discard)(widths)


def can_be(widths: Widths) -> bool:
    return not any(width % SPECIALISED for width in widths[:2])


def is_allowed(x_TD: Tensor, head: int, needs_proof: bool = True) -> bool:
    """Whether a forward may use these ops for tokens like x."""
    if not x_TD.is_cuda or torch.is_grad_enabled():
        return False
    widths = Widths(x_TD.shape[-1], head, x_TD.dtype)
    return widths in _allowed if needs_proof else can_be(widths)


def may_draw(head_VD: Tensor, needs_proof: bool = True) -> bool:
    """Whether `draw_scored` may be used with this head."""
    return head_VD.is_cuda and (head_VD.shape[0] in _allowed or not needs_proof)


def may_gate(x_TD: Tensor) -> bool:
    """Whether `gated_linear` serves tokens like x, where fused launches are allowed."""
    return len(x_TD) <= GATED_ROWS and x_TD.dtype != torch.float32


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


def rotated_queries(
    qkv_TN: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor],
    eps: float,
    places: Places,
) -> Tensor:
    """[T, H, E]: as `rotated_heads`, but keys, and values as they are, are put in their places."""
    return _schedules(qkv_TN).rotated_heads(qkv_TN, heads, norms, angles, eps, places)[0]


def gated_linear(x_TD: Tensor, w_2FD: Tensor) -> Tensor:
    """swiglu(x w^T).

    Args:
        x_TD: [T, D] bfloat16 or float16 on CUDA; meant for at most GATED_ROWS rows.
        w_2FD: [2 F, D] of the same dtype, contiguous: the gate's rows, then up's.

    Returns:
        [T, F] in the dtype of `x_TD`.
    """
    return _schedules(x_TD).gated_linear(x_TD, w_2FD)


def draw_scored(
    logits_BV: Tensor,
    temperature_B: Tensor,
    greedy_B: Tensor,
    keys_B2: Tensor,
    positions_B: Tensor,
    vocab_limit: int,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row, and its logprob.

    Args:
        logits_BV: [B, V] float32 on CUDA, the head's products, not scaled.
        temperature_B: [B] float32, above 0.
        greedy_B: [B] bool: take the likeliest token.
        keys_B2: [B, 2] int64, as `draw` takes them.
        positions_B: [B] int64, likewise.
        vocab_limit: number of vocabulary rows that a token may come from, 1..V.

    Returns:
        int64 [B] tokens below the limit, and their float32 [B] logprobs.
    """
    given = temperature_B, greedy_B, keys_B2, positions_B
    return _schedules(logits_BV).draw_scored(logits_BV, *given, vocab_limit)
