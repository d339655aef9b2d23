"""logprob over a restricted vocabulary: biases, and a kept set that is drawn from.

Contract, after `scaled_logits` (op.py) and before its softmax:
1. bias: at each listed (row, token), z = z + bias / temperature, each operation rounded to float32;
   a bias of -inf bans the token.
2. threshold: with m the row's maximum, token v is kept where z[v] - m >= threshold[row] in float32
   (a maximum has no order, a subtraction and a comparison of one element neither), so every token
   that ties with the last kept one is kept; -inf keeps all. The given token is always kept: under
   the weights that it was drawn with it is in the set anyway, under others its log probability
   stays finite. Everything else becomes -inf.
The log probability is that of the kept set, renormalised, and `select_logprobs` computes it from
the logits so restricted. Sampler and trainer both call `restrict`, so their bits agree.

One float32 a token thus stands for its whole kept set. It is relative to the maximum, since adding
a constant to all logits changes no distribution. Under newer weights the same threshold can keep
other tokens than it did when the token was drawn; only fresh tokens are exact.

The backward holds biases and kept set constant: with p the softmax over the kept set,
d logprob / d logits = (onehot - p) / temperature, and the entropy's as in op.py.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from shared_ops.elementary import exp, log
from shared_ops.primitives import fixed_product, row_sum, token_product

LOGITS_LIMIT = 1 << 26
ROW_TILE = 128


class Bias(NamedTuple):
    """What is added to logits before the temperature: J entries, float32 values (-inf bans).

    rows_J, tokens_J: int64. A pair may be listed twice if one of its values is -inf.
    """

    rows_J: Tensor
    tokens_J: Tensor
    values_J: Tensor


class Restriction(NamedTuple):
    """What restricts R rows; threshold_R: float32, at most 0, or None where nothing is cut."""

    threshold_R: Tensor | None = None
    bias: Bias | None = None

    def at(self, rows: slice) -> "Restriction":
        """That of some of the rows."""
        threshold = None if self.threshold_R is None else self.threshold_R[rows]
        if self.bias is None:
            return Restriction(threshold)
        rows_J = self.bias.rows_J
        chosen_J = (rows_J >= rows.start) & (rows_J < rows.stop)
        bias = Bias(rows_J[chosen_J] - rows.start, *(x[chosen_J] for x in self.bias[1:]))
        return Restriction(threshold, bias)


def add_bias(logits_RV: Tensor, temperature_R: Tensor, bias: Bias) -> Tensor:
    """The logits with every bias added, in place."""
    values_J = bias.values_J / temperature_R[bias.rows_J]
    return logits_RV.index_put_((bias.rows_J, bias.tokens_J), values_J, accumulate=True)


def keep(logits_RV: Tensor, threshold_R: Tensor, tokens_R: Tensor | None = None) -> Tensor:
    """The logits with -inf outside the kept set, in place; tokens_R are kept whatever they are."""
    top_R1 = logits_RV.amax(-1, keepdim=True)
    dropped_RV = (logits_RV - top_R1) < threshold_R.unsqueeze(-1)
    if tokens_R is not None:
        dropped_RV.scatter_(1, tokens_R.unsqueeze(1), False)
    return logits_RV.masked_fill_(dropped_RV, float("-inf"))


def restrict(
    logits_RV: Tensor, temperature_R: Tensor, restriction: Restriction, tokens_R: Tensor
) -> Tensor:
    """`scaled_logits` under a restriction, in place."""
    if restriction.bias is not None:
        add_bias(logits_RV, temperature_R, restriction.bias)
    if restriction.threshold_R is not None:
        keep(logits_RV, restriction.threshold_R, tokens_R)
    return logits_RV


def _row_blocks(rows: int, vocabulary: int) -> list[slice]:
    step = max(ROW_TILE, LOGITS_LIMIT // vocabulary // ROW_TILE * ROW_TILE)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]


class _Rows(NamedTuple):
    """The inputs of `token_logprobs`, of which blocks of rows are taken."""

    schedules: ModuleType
    hidden_TD: Tensor
    head_VD: Tensor
    targets_T: Tensor
    temperature_T: Tensor
    vocab_limit: int
    restriction: Restriction

    def logits(self, rows: slice) -> Tensor:
        temperature_B = self.temperature_T[rows]
        logits_BV = self.schedules.scaled_logits(
            self.hidden_TD[rows], self.head_VD, temperature_B, self.vocab_limit
        )
        return restrict(logits_BV, temperature_B, self.restriction.at(rows), self.targets_T[rows])


def _softmax(logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax p, s = logits - maximum (at least -1e4, so that p s is 0 where p is), log(sum)."""
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    p_BV = exp(shifted_BV)
    sum_B1 = row_sum(p_BV)
    return p_BV.div_(sum_B1), shifted_BV.clamp_(min=-1e4), log(sum_B1)


def forward(*inputs) -> tuple[Tensor, Tensor]:
    """float32 [T] log probabilities and entropies."""
    given = _Rows(*inputs)
    logprobs_T = torch.empty(len(given.targets_T), device=given.hidden_TD.device)
    entropy_T = torch.empty_like(logprobs_T)
    for rows in _row_blocks(len(given.targets_T), given.head_VD.shape[0]):
        logits_BV = given.logits(rows)
        logprobs_T[rows] = given.schedules.select_logprobs(logits_BV, given.targets_T[rows])
        p_BV, shifted_BV, log_sum_B1 = _softmax(logits_BV)
        entropy_T[rows] = (log_sum_B1 - row_sum(p_BV * shifted_BV)).squeeze(1)
    return logprobs_T, entropy_T


def backward(
    grad_T: Tensor, grad_entropy_T: Tensor | None, *inputs, needs_head: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden and head, blocks of rows in increasing order."""
    given = _Rows(*inputs)
    dhidden_TD = torch.empty_like(given.hidden_TD)
    dhead_VD = torch.zeros_like(given.head_VD, dtype=torch.float32) if needs_head else None
    for rows in _row_blocks(len(given.targets_T), given.head_VD.shape[0]):
        p_BV, shifted_BV, _ = _softmax(given.logits(rows))
        temperature_B1 = given.temperature_T[rows].unsqueeze(-1)
        grad_B1 = grad_T[rows].unsqueeze(-1) / temperature_B1
        dlogits_BV = p_BV * -grad_B1
        dlogits_BV.scatter_add_(1, given.targets_T[rows].unsqueeze(1), grad_B1)
        if grad_entropy_T is not None:
            slope_BV = (shifted_BV - row_sum(p_BV * shifted_BV)).mul_(p_BV)
            dlogits_BV -= slope_BV.mul_(grad_entropy_T[rows].unsqueeze(-1) / temperature_B1)
        dhidden_TD[rows] = _product(dlogits_BV, given.head_VD).to(dhidden_TD.dtype)
        if dhead_VD is not None:
            dhead_VD += _token_product(dlogits_BV, given.hidden_TD[rows])
    return dhidden_TD, None if dhead_VD is None else dhead_VD.to(given.head_VD.dtype)


def _product(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    return torch.mm(x_MK.to(w_KN.dtype), w_KN) if x_MK.is_cuda else fixed_product(x_MK, w_KN)


def _token_product(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    if dy_TN.is_cuda:
        return torch.mm(dy_TN.to(x_TK.dtype).T, x_TK).float()
    return token_product(dy_TN, x_TK)
