"""From hidden states to tokens and their logprobs.

The logprob of a drawn token is taken from the very logits it was drawn from, at the request's
temperature, in float32; a greedy row has the logits of temperature 1. Biases come first, then the
filters cut, and the logprob is that of the kept set, renormalised.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollout.batch import Draws, Filters
from shared_ops.fused.op import draw_scored, may_draw
from shared_ops.logprob.restricted import add_bias, keep
from shared_ops.opset import OpSet
from shared_ops.sample.kept import kept_thresholds
from shared_ops.sample.op import draw, greedy


class Drawn(NamedTuple):
    """tokens_B int64 below the vocabulary limit, their float32 logprobs_B (NaN where logits are),
    and the float32 threshold_B of their kept sets, None where no row has a filter."""

    tokens_B: Tensor
    logprobs_B: Tensor
    threshold_B: Tensor | None = None


def sample(hidden_BD: Tensor, head_VD: Tensor, draws: Draws, vocab_limit: int, ops: OpSet) -> Drawn:
    """Draw one token a row."""
    if not len(hidden_BD):
        return Drawn(draws.positions_B, draws.temperature_B, draws.temperature_B)
    is_plain = draws.bias is None and draws.filters is None
    if is_plain and ops.fuses and may_draw(head_VD, ops.needs_proof):
        logits_BV = ops.head_logits(hidden_BD, head_VD)
        given = draws.temperature_B, draws.greedy_B, draws.keys_B2, draws.positions_B
        return Drawn(*draw_scored(logits_BV, *given, vocab_limit))
    logits_BV = ops.scaled_logits(hidden_BD, head_VD, draws.temperature_B, vocab_limit)
    if draws.bias is not None:
        add_bias(logits_BV, draws.temperature_B, draws.bias)
    threshold_B = None
    if draws.filters is not None:
        threshold_B = cut(logits_BV, draws.filters)
        keep(logits_BV, threshold_B)
    tokens_B = greedy(logits_BV) if draws.any_greedy else None
    if not draws.all_greedy:
        drawn_B = draw(logits_BV, draws.keys_B2, draws.positions_B)
        tokens_B = drawn_B if tokens_B is None else torch.where(draws.greedy_B, tokens_B, drawn_B)
    assert tokens_B is not None
    tokens_B = tokens_B.clamp(max=vocab_limit - 1)  # a row of NaN has no argmax
    return Drawn(tokens_B, ops.select_logprobs(logits_BV, tokens_B), threshold_B)


def cut(logits_BV: Tensor, filters: Filters) -> Tensor:
    """float32 thresholds; only the rows that have a filter are sorted."""
    threshold_B = torch.full_like(filters.top_p_B, float("-inf"), dtype=torch.float32)
    rows = filters.is_on_B.nonzero().squeeze(1)
    chosen = (x_B[rows] for x_B in (filters.top_k_B, filters.top_p_B, filters.min_p_B))
    threshold_B[rows] = kept_thresholds(logits_BV[rows], *chosen)
    return threshold_B
