"""The sampler's CUDA kernels with nothing held to a contract: what exactness costs is the ratio.

Products are the vendor library's, in one call, which splits K as it likes; decode attention is
split among programs by load, in chunks shorter than the contract's where few sequences run. All
else, fused launches and captured decode steps included, is what an exact engine runs, and needs no
proof here. Bits move with the batch where the library or the split does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_ops import cuda
from shared_ops.opset import EXACT, OpSet
from shared_ops.ordinary import ORDINARY

# Programs below which some of 132 multiprocessors idle, and the positions of a program then.
ONE_WAVE = 132
SHORT_CHUNK = 256


def library_product(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[M, N] in `out_dtype`, which is that of x or float32."""
    if x_MK.dtype == out_dtype:
        return F.linear(x_MK, w_NK)
    return torch.mm(x_MK, w_NK.T, out_dtype=out_dtype)


def head_logits(hidden_BD: Tensor, head_VD: Tensor) -> Tensor:
    """As `logprob.op.head_logits`, on CUDA, without gradients."""
    return library_product(hidden_BD, head_VD, torch.float32)


def scaled_logits(
    hidden_BD: Tensor, head_VD: Tensor, temperature_B: Tensor, vocab_limit: int
) -> Tensor:
    """As `logprob.op.scaled_logits`, on CUDA, without gradients."""
    schedules = cuda.kernels("logprob", hidden_BD)
    return schedules.scaled_logits(
        hidden_BD, head_VD, temperature_B, vocab_limit, multiply=library_product
    )


def paged_attention(q_THE: Tensor, k_pages_PSKE: Tensor, v_pages_PSKE: Tensor, layout) -> Tensor:
    """As `attention.op.paged_attention`, on CUDA, without gradients."""
    is_small = len(layout.context_lens) * k_pages_PSKE.shape[2] < ONE_WAVE
    return cuda.kernels("attention", q_THE).paged_forward(
        q_THE, k_pages_PSKE, v_pages_PSKE, layout, chunk=SHORT_CHUNK if is_small else None
    )


UNCONSTRAINED = EXACT._replace(
    linear=ORDINARY.linear,
    lora=ORDINARY.lora,
    paged_attention=paged_attention,
    head_logits=head_logits,
    scaled_logits=scaled_logits,
    needs_proof=False,
)


def sampler_ops(exact: bool, device: torch.device) -> OpSet:
    """What an engine runs: contracts, or else nothing held on CUDA and torch's own ops on a CPU."""
    if exact:
        return EXACT
    return UNCONSTRAINED if device.type == "cuda" else ORDINARY
