"""attention: causal softmax(q k^T / sqrt(E)) v with grouped KV heads.

Contract: KV positions form tiles of `KV_TILE` from absolute position 0 (CPU: 192, CUDA: 64). A
score is a float32 product over E in blocks of C added left to right, times the scale. CPU: C = 128.
CUDA: C = E. The row maximum has no order. p = exp(score - maximum); positions after the query's own
have p = 0 exactly. Row sums and p @ v are taken inside each tile (one float32 accumulator) and
added over tiles left to right; zeros after a row's last position change nothing. The output is the
accumulated sum over the row sum, rounded once to the input's dtype.
A query row's bits depend on that row and on the keys and values at its own and earlier positions:
not on batch mates, the number of query rows, chunking, paging or trailing positions.

CUDA computes the same sum online: exp is a power of two of score x log2(e), taken as one fused
multiply-add with the running maximum; p is rounded to the input's dtype before its sums; a row sum
is the tensor core product of p with ones, so that it does not depend on how rows lie in registers.
Positions form chunks of 1024, each with a fresh state, and chunks are merged left to right: that
is what lets few long sequences be split among programs. A context of up to 1024 is one chunk and
pays nothing; prompts of 3000 pay 3 to 6% on an H200, and one sequence of 32768 is decoded 8 heads
at a time without it.

Backward (packed only): scores are recomputed; sums over query rows run in blocks of rows in
increasing order, those over positions in KV tiles in increasing order, none with atomics. It is
bit-equal from run to run for one packing. The CPU takes sum(p dp) where CUDA takes sum(do o).
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.attention import reference


class PagedLayout(NamedTuple):
    """Where the sequences of a paged batch lie.

    Example: a prefill chunk of 3 tokens that completes a context of 5, beside one decode token at
    context 9, pages of 4: query_starts [0, 3, 4], context_lens [5, 9],
    page_table_BP [[7, 2, 0], [1, 4, 5]] (entries past a context are ignored but must be valid).

    query_starts_B1, contexts_B: the same numbers, int32 on the CUDA device, where they are already
    (a captured graph reads them anew at each replay; the lists then bound them and choose the
    schedule, which cannot change a bit). None: they are copied from the lists.
    kept: an empty dictionary, where a schedule may keep what it works out of the rest for the next
    layer.
    """

    query_starts: list[int]
    context_lens: list[int]
    page_table_BP: Tensor
    query_starts_B1: Tensor | None = None
    contexts_B: Tensor | None = None
    kept: dict[Any, Any] | None = None


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("attention", x) if x.is_cuda else reference


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THE, k_TKE, v_TKE, starts):
        o_THE, lse_TH = _schedules(q_THE).packed_forward(q_THE, k_TKE, v_TKE, starts)
        ctx.save_for_backward(q_THE, k_TKE, v_TKE, o_THE, lse_TH)
        ctx.starts = starts
        return o_THE

    @staticmethod
    def backward(ctx, *grads):
        backward = _schedules(grads[0]).packed_backward
        return (*backward(grads[0], *ctx.saved_tensors, starts=ctx.starts), None)


def packed_attention(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, starts: list[int]) -> Tensor:
    """Attend within packed sequences.

    Args:
        q_THE: [T, H, E] float32, bfloat16 or float16.
        k_TKE: [T, K, E] of the same dtype; H is a multiple of K.
        v_TKE: [T, K, E] of the same dtype.
        starts: B + 1 cumulative lengths, from 0 to T.

    Returns:
        [T, H, E] in the dtype of `q_THE`.

    Raises:
        ValueError: `starts` does not cover the tokens.
    """
    if starts[0] != 0 or starts[-1] != q_THE.shape[0]:
        raise ValueError(f"packed_attention: starts must run from 0 to {q_THE.shape[0]}")
    return _PackedAttention.apply(q_THE, k_TKE, v_TKE, starts)


def write_pages(
    k_pages_PSKE: Tensor, v_pages_PSKE: Tensor, slots_T: Tensor, k_TKE: Tensor, v_TKE: Tensor
) -> None:
    """Put keys and values where their tokens' pages are, in place.

    Args:
        k_pages_PSKE: [P, S, K, E], contiguous.
        v_pages_PSKE: [P, S, K, E], contiguous.
        slots_T: [T] int64, page x S + place in the page.
        k_TKE: [T, K, E] of the same dtype.
        v_TKE: [T, K, E] of the same dtype.
    """
    _schedules(k_TKE).write_pages(k_pages_PSKE, v_pages_PSKE, slots_T, k_TKE, v_TKE)


def paged_attention(
    q_THE: Tensor, k_pages_PSKE: Tensor, v_pages_PSKE: Tensor, layout: PagedLayout
) -> Tensor:
    """Attend over paged keys and values; the queries of a sequence are the end of its context.

    Args:
        q_THE: [T, H, E] float32, bfloat16 or float16.
        k_pages_PSKE: [P, S, K, E] of the same dtype, this step's keys already written.
        v_pages_PSKE: [P, S, K, E] likewise.
        layout: where each sequence's queries and pages are.

    Returns:
        [T, H, E] in the dtype of `q_THE`; not differentiable.

    Raises:
        ValueError: `layout` does not cover the tokens.
    """
    if layout.query_starts[-1] != q_THE.shape[0]:
        raise ValueError(f"paged_attention: query_starts must run from 0 to {q_THE.shape[0]}")
    with torch.no_grad():
        return _schedules(q_THE).paged_forward(q_THE, k_pages_PSKE, v_pages_PSKE, layout)
