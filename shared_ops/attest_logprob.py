"""Log softmax and draws on fresh random logits, as many as it takes for a million results."""

from collections.abc import Iterator

import torch
from torch import Tensor

from shared_ops.fused.op import draw_scored
from shared_ops.logprob.kernels import reduce
from shared_ops.sample.op import draw, greedy

LOGITS = 1 << 28
VALUES = 1_000_000
Pair = tuple[Tensor, Tensor]


def _logits(vocabulary: int, results: int, generator: torch.Generator) -> Iterator[Tensor]:
    """[B, V] float32 blocks of random logits, until their rows have VALUES results."""
    rows = min(max(300, LOGITS // vocabulary), 1 << 15)
    for _ in range(-(-VALUES // (rows * results))):
        yield torch.randn((rows, vocabulary), generator=generator, device="cuda").mul_(4)


def reductions(vocabulary: int, generator: torch.Generator) -> Iterator[Pair]:
    """(got, wanted) float32 [B, 4]: rows among others, and in three parts at other places."""
    for logits_BV in _logits(vocabulary, 4, generator):
        rows = len(logits_BV)
        tokens_B = torch.arange(rows, device="cuda") % vocabulary
        ones_B = torch.ones(rows, device="cuda")
        wanted = torch.stack(reduce(logits_BV, tokens_B, ones_B, vocabulary), 1)
        for part in (slice(0, 1), slice(1, 130), slice(130, rows)):
            given = logits_BV[part], tokens_B[part], ones_B[part]
            yield torch.stack(reduce(*given, vocabulary), 1), wanted[part]


def draws(vocabulary: int, generator: torch.Generator) -> Iterator[Pair]:
    """(got, wanted): tokens and logprobs of `draw_scored` and of the ops one by one; every third
    row is greedy."""
    limit, first = vocabulary - vocabulary // 50, 0
    for logits_BV in _logits(vocabulary, 2, generator):
        rows = len(logits_BV)
        positions_B = torch.arange(first, first + rows, device="cuda")
        keys_B2 = torch.stack((positions_B * 77, positions_B % 5), 1)
        heat_B = torch.rand(rows, generator=generator, device="cuda") + 0.3
        greedy_B = positions_B % 3 == 0
        got = draw_scored(logits_BV, heat_B, greedy_B, keys_B2, positions_B, limit)
        logits_BV.div_(heat_B.unsqueeze(1))[:, limit:] = float("-inf")
        drawn_B = draw(logits_BV, keys_B2, positions_B)
        tokens_B = torch.where(greedy_B, greedy(logits_BV), drawn_B)
        yield got[0], tokens_B
        yield got[1], reduce(logits_BV, tokens_B, torch.ones_like(heat_B), vocabulary)[0]
        first += rows
