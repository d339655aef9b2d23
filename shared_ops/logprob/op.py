"""logprob: log softmax(head(hidden) / temperature) at a chosen token.

Contract: logits are float32 products in linear's contract, divided by the temperature, and -inf at
vocabulary rows >= `vocab_limit` (padding that no tokenizer entry stands for). The maximum of a row
has no order; exp(logit - maximum) is summed in an order that depends on V only; the log
probability is (chosen - maximum) - log(sum), each operation rounded to float32. Nothing is ever
rounded below float32. A row's bits depend on that row, its temperature and the head only.
CPU: sums in lanes (`shared_ops.primitives`), exp and log those of `shared_ops.elementary`.
CUDA: the vocabulary is reduced in chunks of 4096, each against its own maximum, and the chunks'
sums are brought to the row's maximum and added in one fixed order.

The sampler calls `scaled_logits`, draws, and calls `select_logprobs` (or `fused.draw_scored`, which
does the three at once); the trainer calls `token_logprobs`, which does the same on row blocks and
keeps no [T, V] array.
Backward: logits are recomputed per row block; sums over tokens run in increasing order. CUDA:
d logits is rounded to the input's dtype and both products are the library's; the blocks of d head
are added in float32. It is bit-equal from run to run for one packing. The entropy's gradient, with
s = logits - maximum, p the softmax and h what arrives, is -h p (s - sum p s) / temperature on the
logits, added in float32; where nothing arrives nothing is computed for it, and no bit changes.
"""

from types import ModuleType

import torch
from torch import Tensor

from shared_ops import cuda
from shared_ops.logprob import reference, restricted
from shared_ops.logprob.restricted import Restriction


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("logprob", x) if x.is_cuda else reference


def head_logits(hidden_BD: Tensor, head_VD: Tensor) -> Tensor:
    """float32 [B, V]: the head's products as they are; arguments as in `scaled_logits`."""
    return _schedules(hidden_BD).head_logits(hidden_BD, head_VD)


def scaled_logits(
    hidden_BD: Tensor, head_VD: Tensor, temperature_B: Tensor, vocab_limit: int
) -> Tensor:
    """float32 [B, V] logits / temperature, -inf from `vocab_limit` on.

    Args:
        hidden_BD: [B, D] float32, bfloat16 or float16.
        head_VD: [V, D] of the same dtype.
        temperature_B: [B] float32, above 0.
        vocab_limit: number of vocabulary rows that a token may come from, 1..V.
    """
    return _schedules(hidden_BD).scaled_logits(hidden_BD, head_VD, temperature_B, vocab_limit)


def select_logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    """float32 [B]: log softmax of each row at its token.

    Args:
        logits_BV: [B, V] float32, as `scaled_logits` returns.
        tokens_B: [B] int64.
    """
    return _schedules(logits_BV).select_logprobs(logits_BV, tokens_B)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, head_VD, targets_T, temperature_T, vocab_limit):
        logprobs_T, entropy_T, saved_2T = _schedules(hidden_TD).token_logprobs(
            hidden_TD, head_VD, targets_T, temperature_T, vocab_limit
        )
        ctx.save_for_backward(hidden_TD, head_VD, targets_T, temperature_T, saved_2T)
        ctx.vocab_limit = vocab_limit
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx, *grads):
        grad_T, grad_entropy_T = grads
        if grad_T is None:
            grad_T = torch.zeros_like(grad_entropy_T)
        dhidden_TD, dhead_VD = _schedules(grad_T).token_logprobs_backward(
            grad_T,
            *ctx.saved_tensors,
            ctx.vocab_limit,
            grad_entropy_T,
            needs_head=ctx.needs_input_grad[1],
        )
        return dhidden_TD, dhead_VD, None, None, None


class _RestrictedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, head_VD, targets_T, temperature_T, vocab_limit, restriction):
        tensors = hidden_TD, head_VD, targets_T, temperature_T
        ctx.save_for_backward(*tensors)
        ctx.rest = vocab_limit, restriction
        ctx.set_materialize_grads(False)
        return restricted.forward(_schedules(hidden_TD), *tensors, *ctx.rest)

    @staticmethod
    def backward(ctx, *grads):
        grad_T, grad_entropy_T = grads
        if grad_T is None:
            grad_T = torch.zeros_like(grad_entropy_T)
        inputs = (_schedules(grad_T), *ctx.saved_tensors, *ctx.rest)
        needs_head = ctx.needs_input_grad[1]
        both = restricted.backward(grad_T, grad_entropy_T, *inputs, needs_head=needs_head)
        return (*both, None, None, None, None)


def token_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor,
    vocab_limit: int,
    restriction: Restriction | None = None,
) -> tuple[Tensor, Tensor]:
    """Log probabilities of given tokens, without a [T, V] array.

    Args:
        hidden_TD: [T, D] float32, bfloat16 or float16; differentiable.
        head_VD: [V, D] of the same dtype; differentiable.
        targets_T: [T] int64, the token that each hidden state predicts.
        temperature_T: [T] float32, above 0.
        vocab_limit: number of vocabulary rows that a token may come from, 1..V.
        restriction: biases and kept sets that the tokens were drawn under (restricted.py).

    Returns:
        float32 [T] log probabilities, and float32 [T] entropies in nats, both differentiable.
    """
    inputs = hidden_TD, head_VD, targets_T, temperature_T, vocab_limit
    if restriction is not None:
        return _RestrictedLogprobs.apply(*inputs, restriction)
    return _TokenLogprobs.apply(*inputs)
