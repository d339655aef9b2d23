"""Fused launches against the ops one by one, in the dtype that they round to."""

from collections.abc import Callable

import torch
from torch import Tensor

from shared_ops.fused.op import (
    GATED_ROWS,
    Places,
    Widths,
    add_rmsnorm,
    gated_linear,
    rotated_heads,
    rotated_queries,
)
from shared_ops.linear.op import linear
from shared_ops.model.config import ModelConfig
from shared_ops.rmsnorm.op import rmsnorm
from shared_ops.rope.op import rope
from shared_ops.swiglu.op import swiglu

VALUES = 1_000_000
ROWS = (1, 7, 130)
Pairs = list[tuple[Tensor, Tensor]]


def widths_of(config: ModelConfig, dtype: torch.dtype) -> Widths:
    return Widths(config.hidden_size, config.head_dim, dtype)


def residuals(config: ModelConfig, random: Callable[..., Tensor]) -> Pairs:
    """(got, wanted): the sum and its norm, at several row counts."""
    width = config.hidden_size
    rows = max(300, VALUES // width)
    x_TD, y_TD, w_D = random(rows, width), random(rows, width), random(width)
    pairs = []
    for count in (*ROWS, rows):
        got = add_rmsnorm(x_TD[:count], y_TD[:count], w_D, config.norm_eps)
        wanted = x_TD[:count] + y_TD[:count]
        pairs += zip(got, (wanted, rmsnorm(wanted, w_D, config.norm_eps)), strict=True)
    return pairs


def heads(config: ModelConfig, random: Callable[..., Tensor]) -> Pairs:
    """(got, wanted): rotated queries and keys, normalised or not, side by side and with keys and
    values in pages, at several row counts."""
    counts, width = (config.num_heads, config.num_kv_heads, config.num_kv_heads), config.head_dim
    rows = max(300, -(-VALUES // (sum(counts[:2]) * width)))
    qkv_TN, w_2E = random(rows, sum(counts) * width), random(2, width)
    angles = [random(rows, width // 2).float() for _ in range(2)]
    norms = (w_2E[0].clone(), w_2E[1].clone()) if config.qk_norm else None
    pairs = []
    for count in (*ROWS, rows):
        some, eps = (angles[0][:count], angles[1][:count]), config.norm_eps
        parts = qkv_TN[:count].view(count, -1, width).split(counts, dim=1)
        wanted = list(parts[:2])
        if norms:
            wanted = [rmsnorm(x, w, eps) for x, w in zip(wanted, norms, strict=True)]
        wanted = [rope(x, *some) for x in wanted]
        got = rotated_heads(qkv_TN[:count], counts[:2], norms, some, eps)
        pages = qkv_TN.new_zeros((2, count, 1, counts[1], width))
        places = Places(pages[0], pages[1], torch.arange(count, device=qkv_TN.device).flip(0))
        q_THE = rotated_queries(qkv_TN[:count], counts[:2], norms, some, eps, places)
        k_TKE, v_TKE = pages[:, :, 0].flip(1)
        pairs += zip((*got, q_THE, k_TKE, v_TKE), (*wanted, *wanted, parts[2]), strict=True)
    return pairs


def gated(config: ModelConfig, random: Callable[..., Tensor]) -> Pairs:
    """(got, wanted): swiglu of the gate's and up's products, at several row counts."""
    counts, (width, inner) = (1, 7, 17, GATED_ROWS), (config.hidden_size, config.intermediate_size)
    w_2FD = random(2 * inner, width) * width**-0.5
    pairs = []
    for _ in range(-(-VALUES // (sum(counts) * inner))):
        x_TD = random(GATED_ROWS, width)
        wanted_TF = swiglu(linear(x_TD, w_2FD))
        pairs += [(gated_linear(x_TD[:count], w_2FD), wanted_TF[:count]) for count in counts]
    return pairs
