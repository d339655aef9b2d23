"""Where a sampling filter cuts: one threshold a row (used as `shared_ops.logprob.restricted` says).

Contract: with s = logits - maximum in float32, sorted from the largest, top-k keeps the first k;
of these top-p keeps the shortest beginning that holds at least top_p of their mass (Holtzman et
al. 2020, "The curious case of neural text degeneration"); min-p keeps s >= log(min_p), that is
probabilities of at least min_p times the largest (Nguyen et al. 2024, "Turning up the heat"). The
kept set is the intersection, with every token that ties with its last. Masses are whole numbers,
floor(exp(s) 2^40) in int64: their sums have no rounding, hence no order, so that a row's threshold
depends on that row only. Tokens less likely than 2^-40 of the largest have no mass.
"""

import torch
from torch import Tensor

MASS_UNIT = 2.0**40
KEEP_ALL = float("-inf")


def kept_thresholds(logits_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """float32 [B], at most 0: a row keeps the tokens whose logit - maximum is at least this.

    Args:
        logits_BV: [B, V] float32, scaled and biased.
        top_k_B: [B] int64; 0 keeps all.
        top_p_B: [B] float64 in (0, 1]; 1 keeps all.
        min_p_B: [B] float64 in [0, 1]; 0 keeps all.
    """
    threshold_B = torch.log(min_p_B).float()
    if bool(((top_k_B > 0) | (top_p_B < 1)).any()):
        threshold_B = torch.maximum(threshold_B, _cut(logits_BV, top_k_B, top_p_B))
    return threshold_B


def _cut(logits_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """The smallest s that top-k and top-p keep; -inf where neither is set."""
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    shifted_BV = shifted_BV.sort(dim=-1, descending=True).values
    vocabulary = shifted_BV.shape[1]
    rank_1V = torch.arange(vocabulary, device=shifted_BV.device).unsqueeze(0)
    kept_BV = rank_1V < torch.where(top_k_B > 0, top_k_B, vocabulary).unsqueeze(1)
    mass_BV = (torch.exp(shifted_BV).double() * MASS_UNIT).long().masked_fill_(~kept_BV, 0)
    up_to_BV = mass_BV.cumsum(-1)
    enough_B1 = (top_p_B * up_to_BV[:, -1].double()).unsqueeze(1)
    before_BV = (up_to_BV - mass_BV).double()
    kept_BV &= (before_BV < enough_B1) | (top_p_B == 1).unsqueeze(1)
    last_B1 = (kept_BV.sum(-1, keepdim=True) - 1).clamp_(min=0)
    threshold_B = shifted_BV.gather(1, last_B1).squeeze(1)
    return threshold_B.masked_fill((top_k_B == 0) & (top_p_B == 1), KEEP_ALL)
