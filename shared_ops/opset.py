"""The ops a model calls, gathered into one record that is passed as an argument.

`EXACT` obeys the contracts in the op folders. `shared_ops.ordinary.ORDINARY` is torch's own way of
computing the same functions, `shared_ops.unconstrained.UNCONSTRAINED` our kernels with the vendor
library's products: for measurement and as controls that a parity check must catch.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from shared_ops.attention.op import packed_attention, paged_attention
from shared_ops.embedding.op import embedding
from shared_ops.linear.op import linear
from shared_ops.logprob.op import head_logits, scaled_logits, select_logprobs, token_logprobs
from shared_ops.lora.op import lora
from shared_ops.rmsnorm.op import rmsnorm
from shared_ops.rope.op import rope
from shared_ops.swiglu.op import swiglu


class OpSet(NamedTuple):
    linear: Callable[..., Tensor]
    lora: Callable[..., Tensor]
    rmsnorm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    embedding: Callable[..., Tensor]
    packed_attention: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    head_logits: Callable[..., Tensor]
    scaled_logits: Callable[..., Tensor]
    select_logprobs: Callable[..., Tensor]
    token_logprobs: Callable[..., tuple[Tensor, Tensor]]
    fuses: bool = False  # whether `shared_ops.fused` may stand for neighbouring ops
    needs_proof: bool = True  # only where the attestation saw equal bits


EXACT = OpSet(
    linear=linear,
    lora=lora,
    rmsnorm=rmsnorm,
    rope=rope,
    swiglu=swiglu,
    embedding=embedding,
    packed_attention=packed_attention,
    paged_attention=paged_attention,
    head_logits=head_logits,
    scaled_logits=scaled_logits,
    select_logprobs=select_logprobs,
    token_logprobs=token_logprobs,
    fuses=True,
)


def is_exact(ops: OpSet) -> bool:
    """Whether every op is `EXACT`'s."""
    return ops._replace(fuses=True) == EXACT
