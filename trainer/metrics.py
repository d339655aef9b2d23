"""What a step knows of each token, and the numbers made of it under their public names."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.optimizer import fixed_sum
from trainer.parity import (
    FirstDifference,
    ParityReport,
    differing,
    k3,
    locate,
    ulp_distance,
)
from trainer.ranks import Ranks
from trainer.sample import TrainSample


class TokenLog(NamedTuple):
    """Detached columns [N] over drawn tokens.

    Attributes:
        logprob: float32, log pi_theta.
        behaviour: float32, what the sampler drew with.
        kept: float32, old_logprobs of the sample, NaN where it has no value.
        age: int64, versions since the token was drawn.
        counts: bool, in the loss.
        entropy: float32, nats.
        loss: float32, weighted, without the denominator.
        scale: float64, one over the denominator.
        importance: float32, the importance weight in effect: that of tis and mis, else `ratio`.
        ratio: float32, importance ratio before clamping.
        limited: bool, the importance weight was clamped or masked.
        clipped_low, clipped_high: bool, the policy ratio was clipped.
        reference_kl: float32, k3 to the reference, 0 without one.
    """

    logprob: Tensor
    behaviour: Tensor
    kept: Tensor
    age: Tensor
    counts: Tensor
    entropy: Tensor
    loss: Tensor
    scale: Tensor
    importance: Tensor
    ratio: Tensor
    limited: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    reference_kl: Tensor


def in_sample_order(
    logs: Sequence[TokenLog], order: Sequence[int], lengths: Sequence[int]
) -> TokenLog:
    """One log, tokens in the order of the samples.

    Args:
        logs: of each micro-batch.
        order: sample indices in the order of the logs.
        lengths: drawn tokens of each sample, in sample order.
    """
    starts, total = {}, 0
    for index in order:
        starts[index] = total
        total += lengths[index]
    places = [torch.arange(starts[i], starts[i] + lengths[i]) for i in range(len(lengths))]
    place_N = torch.cat(places)
    columns = [torch.cat(column).cpu()[place_N] for column in zip(*logs, strict=True)]
    return TokenLog(*columns)


class Parity(NamedTuple):
    """Bit comparison over every rank: fresh tokens against the trainer's values now, and stale
    tokens that kept old_logprobs against those.

    kl: mean k3 over both; NaN where nothing was compared, which proves nothing.
    """

    fresh: ParityReport
    rescored_compared: int
    rescored_differing: int
    kl: float

    @property
    def total(self) -> ParityReport:
        return self.fresh._replace(
            tokens_compared=self.fresh.tokens_compared + self.rescored_compared,
            tokens_differing=self.fresh.tokens_differing + self.rescored_differing,
        )


def _proved(log: TokenLog) -> tuple[Tensor, Tensor, Tensor]:
    """fresh [N], rescored [N], and the trainer's value under the version that drew the token."""
    fresh_N = log.age == 0
    rescored_N = ~fresh_N & ~log.kept.isnan()
    return fresh_N, rescored_N, torch.where(rescored_N, log.kept, log.logprob)


def check_parity(log: TokenLog, ranks: Ranks) -> Parity:
    """Compare the bits of every token whose own version's value the trainer has."""
    fresh_N, rescored_N, own_N = _proved(log)
    differs_N = differing(log.behaviour, own_N)
    proved_N = fresh_N | rescored_N
    ulp_N = torch.where(proved_N, ulp_distance(log.behaviour, own_N), 0)
    kl_N = torch.where(proved_N, k3(log.behaviour, own_N), 0.0)
    masks = (fresh_N, fresh_N & differs_N, rescored_N, rescored_N & differs_N)
    *counts, kl = ranks.sum([float(mask.sum()) for mask in masks] + [fixed_sum(kl_N)])
    compared, unequal, rescored, rescored_unequal = (int(count) for count in counts)
    (max_ulp,) = ranks.max([float(ulp_N.max())])
    mean = kl / (compared + rescored) if compared + rescored else math.nan
    report = ParityReport(compared, unequal, int(max_ulp), mean, None)
    return Parity(report, rescored, rescored_unequal, mean)


def first_difference(log: TokenLog, samples: Sequence[TrainSample]) -> FirstDifference | None:
    """The first token of this rank, in sample order, that was compared and differs."""
    fresh_N, rescored_N, own_N = _proved(log)
    places = (differing(log.behaviour, own_N) & (fresh_N | rescored_N)).nonzero()
    if not len(places):
        return None
    return locate(samples, int(places[0]), log.behaviour, own_N)


def summarise(log: TokenLog, parity: Parity, ranks: Ranks) -> dict[str, float]:
    """Means and extremes over every rank, by public name (the glossary is in docs).

    Means are over the tokens in the loss, except: `kl/sampler_trainer`, `kl/mismatch` (the same),
    `sampling/sampling_logp_difference` and `training/rollout_probs_diff` over the tokens compared,
    `lag` over all, `kl/lag` over stale ones.
    """
    sums = _sums(log)
    total = dict(zip(sums, ranks.sum(list(sums.values())), strict=True))
    extremes = _extremes(log)
    top = dict(zip(extremes, ranks.max(list(extremes.values())), strict=True))
    return {
        "parity/tokens_compared": parity.fresh.tokens_compared,
        "parity/tokens_differing": parity.fresh.tokens_differing,
        "parity/max_ulp": parity.fresh.max_ulp,
        "kl/sampler_trainer": parity.kl,
        "parity/lag_rescored_compared": parity.rescored_compared,
        "parity/lag_rescored_differing": parity.rescored_differing,
        "loss": total["loss"],
        **_means(total),
        "kl/mismatch": parity.kl,
        **top,
        **_lag_counts(log, int(top["lag/versions_max"]), ranks),
        "sampling/importance_sampling_ratio/min": -top["sampling/importance_sampling_ratio/min"],
    }


def _where(mask: Tensor, values: Tensor) -> float:
    return fixed_sum(torch.where(mask, values.double(), 0.0))


def _sums(log: TokenLog) -> dict[str, float]:
    counts, stale = log.counts, log.age > 0
    fresh, rescored, own = _proved(log)
    proved, drew = fresh | rescored, torch.where(rescored, own, log.behaviour)
    return {
        "counted": float(counts.sum()),
        "proved": float(proved.sum()),
        "tokens": float(log.age.numel()),
        "stale": float(stale.sum()),
        "loss": _where(counts, log.loss.double() * log.scale),
        "entropy": _where(counts, log.entropy),
        "low": float((counts & log.clipped_low).sum()),
        "high": float((counts & log.clipped_high).sum()),
        "limited": float((counts & log.limited).sum()),
        "ratio": _where(counts, log.ratio),
        "used": _where(counts, log.importance),
        "used_squared": _where(counts, log.importance.double().square()),
        "reference_kl": _where(counts, log.reference_kl),
        "logp_difference": _where(proved, (own - log.behaviour).abs()),
        "probs_difference": _where(proved, (own.exp() - log.behaviour.exp()).abs()),
        "age": float(log.age.sum()),
        "lag_kl": _where(stale, k3(drew, log.logprob)),
    }


def _lag_counts(log: TokenLog, most: int, ranks: Ranks) -> dict[str, float]:
    """Tokens by the number of versions since they were drawn; empty where all are fresh."""
    counts = torch.bincount(log.age, minlength=most + 1).double().tolist()
    return {f"lag/tokens/{age}": n for age, n in enumerate(ranks.sum(counts))} if most else {}


def _means(total: dict[str, float]) -> dict[str, float]:
    counted, proved = max(total["counted"], 1.0), total["proved"] or math.nan
    squared = total["used_squared"]
    return {
        "entropy": total["entropy"] / counted,
        "clip_ratio/low_mean": total["low"] / counted,
        "clip_ratio/high_mean": total["high"] / counted,
        "clip_ratio/region_mean": (total["low"] + total["high"]) / counted,
        "sampling/importance_sampling_ratio/mean": total["ratio"] / counted,
        "sampling/limited_share": total["limited"] / counted,
        "sampling/effective_sample_size": total["used"] ** 2 / (counted * squared or math.inf),
        "sampling/sampling_logp_difference/mean": total["logp_difference"] / proved,
        "training/rollout_probs_diff_mean": total["probs_difference"] / proved,
        "kl": total["reference_kl"] / counted,
        "lag/versions_mean": total["age"] / max(total["tokens"], 1.0),
        "kl/lag": total["lag_kl"] / max(total["stale"], 1.0),
    }


def _extremes(log: TokenLog) -> dict[str, float]:
    """Largest values; the smallest ratio is negated, so that one maximum over ranks serves."""
    fresh, rescored, own = _proved(log)
    proved = fresh | rescored
    differences = (own - log.behaviour).abs()
    probabilities = (own.exp() - log.behaviour.exp()).abs()
    counted = log.ratio[log.counts]
    return {
        "sampling/importance_sampling_ratio/min": -_min(counted),
        "sampling/importance_sampling_ratio/max": -_min(-counted),
        "sampling/sampling_logp_difference/max": -_min(-differences[proved]),
        "training/rollout_probs_diff_max": -_min(-probabilities[proved]),
        "lag/versions_max": float(log.age.max()),
    }


def _min(values: Tensor) -> float:
    return values.min().item() if values.numel() else 0.0
