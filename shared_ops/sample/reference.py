"""sample in plain torch (contract: op.py)."""

import torch
from torch import Tensor

from shared_ops.elementary import log_of_float64

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * x; x is split so that int64 never overflows."""
    low = factor * (x & 0xFFFF)
    high = factor * (x >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counters: tuple[Tensor, ...], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words; four output words."""
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def gumbel(keys_B2: Tensor, positions_B: Tensor, vocabulary: int) -> Tensor:
    """float32 [B, vocabulary]. The inner log is taken in float64: near u = 1 it decides winners."""
    blocks_1W = torch.arange(-(-vocabulary // 4), device=keys_B2.device).unsqueeze(0)
    zeros_1W = torch.zeros_like(blocks_1W)
    counters = (blocks_1W, positions_B.unsqueeze(1) + zeros_1W, zeros_1W, zeros_1W)
    words = philox(counters, (keys_B2[:, :1], keys_B2[:, 1:]))
    words_BV = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocabulary]
    uniform_BV = (words_BV.double() + 0.5) * 2.0**-32
    return -log_of_float64(-log_of_float64(uniform_BV)).float()


def draw(logits_BV: Tensor, keys_B2: Tensor, positions_B: Tensor) -> Tensor:
    return first_argmax(logits_BV + gumbel(keys_B2, positions_B, logits_BV.shape[1]))


def first_argmax(scores_BV: Tensor) -> Tensor:
    """The lowest index among a row's maxima; torch.argmax promises none in particular."""
    vocabulary = scores_BV.shape[1]
    is_top_BV = scores_BV == scores_BV.amax(-1, keepdim=True)
    index_1V = torch.arange(vocabulary, device=scores_BV.device).unsqueeze(0)
    return torch.where(is_top_BV, index_1V, vocabulary).amin(-1)
