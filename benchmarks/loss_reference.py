"""Every loss, weight and sum of the trainer once more, from the papers, in any dtype.

One completion at a time, with Python floats for what is not differentiated: what tests and
benchmarks/bench_losses.py compare the trainer's objective with in float64.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainer.config import TrainerConfig
from trainer.loss import Denominators
from trainer.objective import Given, objective

Columns = dict[str, Tensor]

LENGTHS = [5, 1, 9, 3, 7]
ADVANTAGES = [1.2, -0.7, -1.5, 0.4, 0.0]
MASKED = [False, False, True, False, False]
MICRO_BATCHES = ([range(i, i + 1) for i in range(5)], [range(0, 2), range(2, 5)])
TOKENS = sum(LENGTHS)
COUNTED = [n for n, masked in zip(LENGTHS, MASKED, strict=True) if not masked]


def columns(seed: int = 0) -> Columns:
    """Log-probabilities whose ratios fall inside and outside every clip width in use."""
    generator = torch.Generator().manual_seed(seed)
    now = -3 * torch.rand(TOKENS, generator=generator) - 0.01
    noise = [torch.randn(TOKENS, generator=generator) for _ in range(4)]
    return {
        "now": now,
        "behaviour": now + 0.5 * noise[0],
        "old": now + 0.3 * noise[1],
        "reference": now + 0.4 * noise[2],
        "proximal": now + 0.2 * noise[3],
        "entropy": 2 * torch.rand(TOKENS, generator=generator),
    }


def spans() -> list[slice]:
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS) + 1)]
    return [slice(*pair) for pair in pairwise(starts)]


def policy_terms(config: TrainerConfig, now: Tensor, old: Tensor, advantage: float) -> Tensor:
    """Losses of one completion's tokens."""
    ratio = (now - old).exp()
    if config.loss == "gspo":
        ratio = (now - old).mean().exp().expand(len(now))
    if config.loss == "cispo":
        return -ratio.detach().clamp(max=config.cispo_cap) * advantage * now
    low, high = 1 - config.clip_low, 1 + config.clip_high
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if config.dual_clip and advantage < 0:
        surrogate = torch.maximum(
            surrogate, torch.full_like(surrogate, config.dual_clip * advantage)
        )
    return -surrogate


def weights_of(config: TrainerConfig, log_ratio: Tensor) -> list[float]:
    scheme = config.lag_correction if config.mode == "bitwise" else config.mode
    if scheme in ("ppo", "none"):
        return [1.0] * len(log_ratio)
    logs = log_ratio.double().tolist()
    if config.correction_level != "token":
        total = math.fsum(logs)
        total = total if config.correction_level == "sequence" else total / len(logs)
        logs = [total] * len(logs)
    ratios = [math.exp(min(max(log, -20.0), 20.0)) for log in logs]
    if scheme == "tis":
        return [min(ratio, config.tis_cap) for ratio in ratios]
    if scheme == "mis":
        return [r if config.mis_low <= r <= config.mis_high else 0.0 for r in ratios]
    return ratios


def reference_loss(config: TrainerConfig, now: Tensor, entropy: Tensor, data: Columns) -> Tensor:
    dtype, total = now.dtype, torch.zeros((), dtype=now.dtype)
    for span, advantage, masked in zip(spans(), ADVANTAGES, MASKED, strict=True):
        if masked and config.mask_truncated:
            continue
        behaviour, scored = data["behaviour"][span].to(dtype), data[scored_by(config)][span]
        scored = scored.to(dtype)
        old = behaviour if config.mode == "bitwise" and config.lag_correction == "ppo" else scored
        weight = torch.tensor(weights_of(config, scored - behaviour), dtype=dtype)
        terms = weight * policy_terms(config, now[span], old, advantage)
        if config.beta:
            log_ratio = data["reference"][span].to(dtype) - now[span]
            terms = terms + config.beta * (log_ratio.exp() - log_ratio - 1)
        terms = terms - config.entropy_coefficient * entropy[span]
        total = total + terms.sum() / denominator(config, len(terms))
    return total


def scored_by(config: TrainerConfig) -> str:
    """Whose values stand between behaviour and now: the drawing version's, or the batch's first."""
    return "proximal" if config.mode == "bitwise" else "old"


def denominator(config: TrainerConfig, length: int) -> float:
    lengths = COUNTED if config.mask_truncated else LENGTHS
    if config.aggregation == "token":
        return sum(lengths)
    if config.aggregation == "sequence":
        return len(lengths) * length
    return len(lengths) * (config.max_completion_tokens or 1)


def spread(values: Sequence[float], lengths: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))


def our_loss(config: TrainerConfig, now: Tensor, entropy: Tensor, data: Columns) -> Tensor:
    """The trainer's objective, all completions in one micro-batch."""
    return sum_of_micro_batches(config, now, entropy, data, [range(len(LENGTHS))])


def sum_of_micro_batches(
    config: TrainerConfig, now: Tensor, entropy: Tensor, data: Columns, batches: list[range]
) -> Tensor:
    """The trainer's objective over runs of whole completions."""
    counted = COUNTED if config.mask_truncated else LENGTHS
    totals = Denominators(len(counted), sum(counted))
    places = spans()
    loss = torch.zeros(())
    for batch in batches:
        lengths = LENGTHS[batch.start : batch.stop]
        span = slice(places[batch.start].start, places[batch.stop - 1].stop)
        counts = [not (MASKED[index] and config.mask_truncated) for index in batch]
        given = Given(
            lengths=lengths,
            behaviour_N=data["behaviour"][span],
            kept_N=data["old"][span],
            proximal_N=data["proximal"][span],
            age_N=torch.ones(sum(lengths), dtype=torch.int64),
            advantage_N=spread(ADVANTAGES[batch.start : batch.stop], lengths),
            counts_N=spread(counts, lengths).bool(),
            scale_N=spread([totals.token_scale(config, length) for length in lengths], lengths),
        )
        reference = data["reference"][span] if config.beta else None
        loss = loss + objective(config, given, now[span], entropy[span], reference)[0]
    return loss


def value_and_gradient(
    function: Callable[..., Tensor], config: TrainerConfig, data: Columns, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """float64 loss, and its gradient [2, T] in log-probabilities and entropies."""
    leaves = [data[name].to(dtype).requires_grad_() for name in ("now", "entropy")]
    loss = function(config, *leaves, data)
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach().double(), torch.stack(found).double()


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence", "clip_high": 0.2},
    "dapo": {"mask_truncated": True},
    "dr_grpo": {"aggregation": "constant", "max_completion_tokens": 12},
    "dual clip": {"dual_clip": 1.3},
    "gspo": {"loss": "gspo", "aggregation": "sequence", "clip_low": 0.01, "clip_high": 0.02},
    "gspo masked": {"loss": "gspo", "mask_truncated": True},
    "cispo": {"loss": "cispo", "cispo_cap": 1.2},
    "reference": {"beta": 0.3, "mask_truncated": True},
    "entropy bonus": {"entropy_coefficient": 0.2, "mask_truncated": True},
    "decoupled": {"lag_correction": "decoupled"},
    "decoupled gspo": {"lag_correction": "decoupled", "loss": "gspo", "clip_high": 0.02},
    "lag tis token": {"lag_correction": "tis", "tis_cap": 1.1},
    "lag tis sequence": {"lag_correction": "tis", "correction_level": "sequence", "tis_cap": 1.2},
    "lag mis token": {"lag_correction": "mis", "mis_low": 0.8, "mis_high": 1.3},
    "lag mis geometric": {
        **{"lag_correction": "mis", "correction_level": "geometric"},
        **{"mis_low": 0.9, "mis_high": 1.1},
    },
    "none": {"mode": "none"},
    "tis token": {"mode": "tis", "tis_cap": 1.1},
    "tis sequence": {"mode": "tis", "correction_level": "sequence"},
    "tis geometric": {"mode": "tis", "correction_level": "geometric", "tis_cap": 1.02},
    "mis token": {"mode": "mis", "mis_low": 0.8, "mis_high": 1.3, "beta": 0.1},
    "mis sequence": {"mode": "mis", "correction_level": "sequence", "mis_low": 0.0, "mis_high": 3},
    "mis geometric": {"mode": "mis", "correction_level": "geometric", "mis_low": 0.9},
}
