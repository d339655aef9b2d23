"""logprob in plain torch (contract: op.py)."""

import torch
from torch import Tensor

from shared_ops.elementary import exp, log
from shared_ops.primitives import fixed_product, row_sum, token_product

LOGITS_LIMIT = 1 << 20


def head_logits(hidden_BD: Tensor, head_VD: Tensor) -> Tensor:
    return fixed_product(hidden_BD, head_VD.T)


def scaled_logits(hidden_BD, head_VD, temperature_B: Tensor, vocab_limit: int) -> Tensor:
    logits_BV = head_logits(hidden_BD, head_VD).div_(temperature_B.unsqueeze(-1))
    if vocab_limit < logits_BV.shape[1]:
        logits_BV[:, vocab_limit:] = float("-inf")
    return logits_BV


def _normalised(logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits - maximum, their exponentials, and the exponentials' sums [B, 1]."""
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    exp_BV = exp(shifted_BV)
    return shifted_BV, exp_BV, row_sum(exp_BV)


def select_logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    shifted_BV, _, sum_B1 = _normalised(logits_BV)
    return _chosen(shifted_BV, log(sum_B1), tokens_B)


def _chosen(shifted_BV: Tensor, log_sum_B1: Tensor, tokens_B: Tensor) -> Tensor:
    return (shifted_BV.gather(1, tokens_B.unsqueeze(1)) - log_sum_B1).squeeze(1)


def _row_blocks(rows: int, vocabulary: int) -> list[slice]:
    step = max(16, LOGITS_LIMIT // vocabulary // 16 * 16)
    return [slice(start, start + step) for start in range(0, rows, step)]


def token_logprobs(hidden_TD, head_VD, targets_T, temperature_T, vocab_limit: int):
    """Log probabilities, entropies, and nothing that the backward needs."""
    logprobs_T = torch.empty(len(targets_T), dtype=torch.float32, device=hidden_TD.device)
    entropy_T = torch.empty_like(logprobs_T)
    for rows in _row_blocks(len(targets_T), head_VD.shape[0]):
        logits_BV = scaled_logits(hidden_TD[rows], head_VD, temperature_T[rows], vocab_limit)
        shifted_BV, exp_BV, sum_B1 = _normalised(logits_BV)
        log_sum_B1 = log(sum_B1)
        logprobs_T[rows] = _chosen(shifted_BV, log_sum_B1, targets_T[rows])
        entropy_T[rows] = _entropy(shifted_BV, exp_BV, sum_B1, log_sum_B1)
    return logprobs_T, entropy_T, None


def _entropy(shifted_BV: Tensor, exp_BV: Tensor, sum_B1: Tensor, log_sum_B1: Tensor) -> Tensor:
    """-sum p log p = log(sum) - sum(exp x shifted) / sum; a masked entry counts as 0. Uses up
    `exp_BV` and `shifted_BV`."""
    weighted_B1 = row_sum(exp_BV.mul_(shifted_BV.clamp_(min=-1e4)))
    return (log_sum_B1 - weighted_B1.div_(sum_B1)).squeeze(1)


def token_logprobs_backward(
    grad_T,
    hidden_TD,
    head_VD,
    targets_T,
    temperature_T,
    _saved,
    vocab_limit: int,
    grad_entropy_T=None,
    needs_head: bool = True,
):
    """d logprob / d logits = (onehot - softmax) / temperature; the entropy's as in op.py."""
    dhidden_TD = torch.empty_like(hidden_TD)
    dhead_VD = torch.zeros_like(head_VD, dtype=torch.float32) if needs_head else None
    for rows in _row_blocks(len(targets_T), head_VD.shape[0]):
        logits_BV = scaled_logits(hidden_TD[rows], head_VD, temperature_T[rows], vocab_limit)
        shifted_BV, exp_BV, sum_B1 = _normalised(logits_BV)
        p_BV = exp_BV.div_(sum_B1)
        dlogits_BV = -p_BV
        dlogits_BV[torch.arange(len(dlogits_BV)), targets_T[rows]] += 1.0
        dlogits_BV *= (grad_T[rows] / temperature_T[rows]).unsqueeze(-1)
        if grad_entropy_T is not None:
            scale_B = grad_entropy_T[rows] / temperature_T[rows]
            dlogits_BV -= _entropy_slope(shifted_BV, p_BV).mul_(scale_B.unsqueeze(-1))
        dhidden_TD[rows] = fixed_product(dlogits_BV, head_VD).to(hidden_TD.dtype)
        if dhead_VD is not None:
            dhead_VD += token_product(dlogits_BV, hidden_TD[rows])
    return dhidden_TD, None if dhead_VD is None else dhead_VD.to(head_VD.dtype)


def _entropy_slope(shifted_BV: Tensor, p_BV: Tensor) -> Tensor:
    """-d entropy / d logits = p (s - sum p s); a masked entry counts as 0."""
    shifted_BV = shifted_BV.clamp(min=-1e4)
    return (shifted_BV - row_sum(p_BV * shifted_BV)).mul_(p_BV)
