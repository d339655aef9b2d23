"""sample in plain torch (contract: op.py)."""

import numpy
import torch
from torch import Tensor

from shared_ops.elementary import log_of_float64

MASK = numpy.uint64(0xFFFFFFFF)
HALF = numpy.uint64(32)
MULTIPLIERS = numpy.uint64(0xD2511F53), numpy.uint64(0xCD9E8D57)
KEY_STEPS = numpy.uint64(0x9E3779B9), numpy.uint64(0xBB67AE85)
ROUNDS = 10

Words = tuple[numpy.ndarray, ...]


def philox(counters: tuple[Tensor, ...], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words; four output words."""
    counter_words, key_words = (
        tuple(x.numpy().view(numpy.uint64) for x in given) for given in (counters, keys)
    )
    words = _philox(counter_words, key_words)
    return tuple(torch.from_numpy(word.view(numpy.int64)) for word in words)


def _philox(counters: Words, keys: Words) -> Words:
    """On uint64 arrays, which hold a product of two words; shapes need to fit only."""
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(ROUNDS):
        wide0, wide1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (wide1 >> HALF) ^ (c1 ^ k0), (wide0 >> HALF) ^ (c3 ^ k1)
        wide0 &= MASK
        wide1 &= MASK
        c1, c3 = wide1, wide0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def gumbel(keys_B2: Tensor, positions_B: Tensor, vocabulary: int) -> Tensor:
    """float32 [B, vocabulary]. The inner log is taken in float64: near u = 1 it decides winners."""
    keys, positions = (x.numpy().view(numpy.uint64) for x in (keys_B2, positions_B))
    blocks_1W = numpy.arange(-(-vocabulary // 4), dtype=numpy.uint64)[None]
    zero_11 = numpy.zeros((1, 1), dtype=numpy.uint64)
    counters = (blocks_1W, positions[:, None], zero_11, zero_11)
    words_BW4 = numpy.empty((len(keys), blocks_1W.shape[1], 4))
    for index, word_BW in enumerate(_philox(counters, (keys[:, :1], keys[:, 1:]))):
        words_BW4[..., index] = word_BW
    uniform_BV = torch.from_numpy(words_BW4).flatten(1).add_(0.5).mul_(2.0**-32)
    noise_BV = log_of_float64(log_of_float64(uniform_BV).neg_()).neg_().float()
    return noise_BV[:, :vocabulary]


def draw(logits_BV: Tensor, keys_B2: Tensor, positions_B: Tensor) -> Tensor:
    return first_argmax(logits_BV + gumbel(keys_B2, positions_B, logits_BV.shape[1]))


def first_argmax(scores_BV: Tensor) -> Tensor:
    """The lowest index among a row's maxima; torch.argmax promises none in particular."""
    vocabulary = scores_BV.shape[1]
    is_top_BV = scores_BV == scores_BV.amax(-1, keepdim=True)
    index_1V = torch.arange(vocabulary, device=scores_BV.device).unsqueeze(0)
    return torch.where(is_top_BV, index_1V, vocabulary).amin(-1)
