"""Importance weights, and what they are for.

log pi_behaviour is what the sampler drew with, log pi_old the trainer's value under the same
version of the weights, log pi_theta the trainer's value now. log(pi_old / pi_behaviour) is
mismatch, log(pi_theta / pi_old) is lag.

* `bitwise`: mismatch is proved to be 0, so pi_old = pi_behaviour; the policy ratio of the loss is
  exp(log pi_theta - log pi_behaviour), lag alone, exactly 1 on fresh tokens. No other weight.
* `none`: the policy ratio is exp(log pi_theta - log pi_old) and mismatch goes uncorrected.
* `tis`: the same ratio, and the loss is multiplied by min(rho, C), rho = pi_old / pi_behaviour
  (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training").
* `mis`: the same, multiplied by rho inside [low, high] and by 0 outside (token level is IcePop,
  Ling Team 2025; sequence level is TRL's default "sequence_mask" at [0, 3]).

Where a sample keeps no old_logprobs, log pi_old is log pi_theta without its gradient: true for
fresh tokens, and otherwise the weight takes the lag as well.

Levels: `token` rho_t; `sequence` exp(sum of log rho over the completion), which explodes with
length; `geometric` exp(mean of log rho). Every token of a completion gets the same weight at the
last two. Logs are clamped to [-20, 20] before exp.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config import TrainerConfig

LOG_LIMIT = 20.0


class Correction(NamedTuple):
    """Weights of T packed completion tokens, none of them differentiable.

    Attributes:
        weight_T: float32, what the token loss is multiplied by.
        ratio_T: float32, rho before it was clamped or masked (in bitwise mode, the lag ratio).
        limited_T: bool, the weight is not rho: clamped by C, or outside [low, high].
    """

    weight_T: Tensor
    ratio_T: Tensor
    limited_T: Tensor


def correct(config: TrainerConfig, log_ratio_T: Tensor, lengths: list[int]) -> Correction:
    """Weights of the configured mode.

    Args:
        config: mode, correction_level, tis_cap, mis_low, mis_high.
        log_ratio_T: [T] float32, log rho of each token; in bitwise mode log(pi_theta /
            pi_behaviour), which is only reported.
        lengths: tokens of each completion, adding up to T.

    Returns:
        The weights.
    """
    level = config.correction_level if config.mode in ("tis", "mis") else "token"
    ratio_T = bounded_exp(at_level(log_ratio_T.detach(), lengths, level))
    if config.mode == "tis":
        return Correction(ratio_T.clamp(max=config.tis_cap), ratio_T, ratio_T > config.tis_cap)
    if config.mode == "mis":
        outside_T = (ratio_T < config.mis_low) | (ratio_T > config.mis_high)
        return Correction(torch.where(outside_T, 0.0, ratio_T), ratio_T, outside_T)
    return Correction(torch.ones_like(ratio_T), ratio_T, torch.zeros_like(ratio_T).bool())


def at_level(log_ratio_T: Tensor, lengths: list[int], level: str) -> Tensor:
    """[T] log ratio of each token's level; differentiable, each completion summed by itself."""
    if level == "token":
        return log_ratio_T
    parts = log_ratio_T.split(lengths)
    means = [part.sum() if level == "sequence" else part.mean() for part in parts]
    return torch.cat([mean.expand(count) for mean, count in zip(means, lengths, strict=True)])


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """exp with the log clamped to [-20, 20]; there the gradient is 0."""
    return log_ratio_T.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
