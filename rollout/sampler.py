"""From hidden states to tokens and their logprobs.

The logprob of a drawn token is taken from the very logits it was drawn from, at the request's
temperature, in float32; a greedy row has the logits of temperature 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.batch import Draws
from shared_ops.opset import OpSet
from shared_ops.sample.op import draw, greedy


def sample(
    hidden_BD: Tensor, head_VD: Tensor, draws: Draws, vocab_limit: int, ops: OpSet
) -> tuple[Tensor, Tensor]:
    """tokens_B int64 below vocab_limit, and their float32 logprobs_B (NaN where logits are)."""
    if not len(hidden_BD):
        return draws.positions_B, draws.temperature_B
    logits_BV = ops.scaled_logits(hidden_BD, head_VD, draws.temperature_B, vocab_limit)
    if draws.filters is not None:
        logits_BV = keep_likeliest(logits_BV, draws.filters)
    tokens_B = greedy(logits_BV) if draws.any_greedy else None
    if not draws.all_greedy:
        drawn_B = draw(logits_BV, draws.keys_B2, draws.positions_B)
        tokens_B = drawn_B if tokens_B is None else torch.where(draws.greedy_B, tokens_B, drawn_B)
    assert tokens_B is not None
    tokens_B = tokens_B.clamp(max=vocab_limit - 1)  # a row of NaN has no argmax
    return tokens_B, ops.select_logprobs(logits_BV, tokens_B)


def keep_likeliest(logits_BV: Tensor, filters: list[tuple[float, int]]) -> Tensor:
    """-inf outside the kept set: the top_k likeliest, and of these the fewest that hold top_p.

    The logprob of what is drawn is then that of the kept set, renormalised (Holtzman et al. 2020,
    "The curious case of neural text degeneration"). Ties at the edge are broken by lower index.
    """
    top_p_B1 = logits_BV.new_tensor([[top_p] for top_p, _ in filters])
    vocabulary = logits_BV.shape[1]
    top_k_B1 = torch.tensor([[top_k or vocabulary] for _, top_k in filters], device=top_p_B1.device)
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    ranks_1V = torch.arange(vocabulary, device=logits_BV.device).unsqueeze(0)
    sorted_BV = sorted_BV.masked_fill(ranks_1V >= top_k_B1, float("-inf"))
    p_BV = sorted_BV.softmax(-1)
    before_BV = p_BV.cumsum(-1) - p_BV
    dropped_BV = (before_BV >= top_p_B1) & (ranks_1V > 0) & (top_p_B1 < 1)
    sorted_BV = sorted_BV.masked_fill(dropped_BV, float("-inf"))
    return torch.full_like(logits_BV, float("-inf")).scatter(1, order_BV, sorted_BV)
