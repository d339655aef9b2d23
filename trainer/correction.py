"""Importance weights, and what they are for.

log pi_behaviour is what the sampler drew with, log pi_old the trainer's value under the same
version of the weights, log pi_prox its value under the version that the batch's first update found,
log pi_theta its value now. log(pi_old / pi_behaviour) is mismatch; log(pi_theta / pi_old) is lag.

In mode `bitwise` mismatch is proved to be 0, so pi_old = pi_behaviour, and `lag_correction` says
what corrects lag. All four are exactly 1 on completions whose tokens are all fresh, and at token
level on every fresh token:

* `ppo`: the policy ratio of the loss is pi_theta / pi_behaviour, clipped; no other weight (Schulman
  et al. 2017).
* `decoupled`: the policy ratio is pi_theta / pi_prox, clipped, and the loss is multiplied by
  rho = pi_prox / pi_behaviour (Hilton et al. 2022, "Batch size-invariance for policy
  optimization").
* `tis`: as decoupled, with min(rho, C). `mis`: with rho inside [low, high] and 0 outside.

The other modes compare. Their policy ratio is pi_theta / pi_old, and rho = pi_old / pi_behaviour:

* `none`: mismatch goes uncorrected.
* `tis`: the loss is multiplied by min(rho, C) (Yao et al. 2025, "Your efficient RL framework
  secretly brings you off-policy training").
* `mis`: by rho inside [low, high] and by 0 outside (token level is IcePop, Ling Team 2025; sequence
  level is TRL's default "sequence_mask" at [0, 3]).

Where a sample keeps no old_logprobs, log pi_old is log pi_theta without its gradient: true for
fresh tokens, and otherwise the weight takes the lag as well. Where it keeps no proximal_logprobs,
log pi_prox is that too: true at the first update of a batch.

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
    """Weights of T packed drawn tokens, none of them differentiable.

    Attributes:
        weight_T: float32, what the token loss is multiplied by.
        ratio_T: float32, rho before it was clamped or masked (with "ppo", the lag ratio).
        limited_T: bool, the weight is not rho: clamped by C, or outside [low, high].
    """

    weight_T: Tensor
    ratio_T: Tensor
    limited_T: Tensor


def scheme(config: TrainerConfig) -> str:
    """What is corrected with: "ppo" or "decoupled" (lag), "none", "tis" or "mis"."""
    return config.lag_correction if config.mode == "bitwise" else config.mode


def correct(config: TrainerConfig, log_ratio_T: Tensor, lengths: list[int]) -> Correction:
    """Weights of the configured scheme.

    Args:
        config: mode, lag_correction, correction_level, tis_cap, mis_low, mis_high.
        log_ratio_T: [T] float32, log rho of each token; with "ppo" log(pi_theta / pi_behaviour),
            which is only reported.
        lengths: tokens of each completion, adding up to T.

    Returns:
        The weights.
    """
    name = scheme(config)
    level = "token" if name in ("ppo", "none") else config.correction_level
    ratio_T = bounded_exp(at_level(log_ratio_T.detach(), lengths, level))
    nothing_T = torch.zeros_like(ratio_T).bool()
    if name == "decoupled":
        return Correction(ratio_T, ratio_T, nothing_T)
    if name == "tis":
        return Correction(ratio_T.clamp(max=config.tis_cap), ratio_T, ratio_T > config.tis_cap)
    if name == "mis":
        outside_T = (ratio_T < config.mis_low) | (ratio_T > config.mis_high)
        return Correction(torch.where(outside_T, 0.0, ratio_T), ratio_T, outside_T)
    return Correction(torch.ones_like(ratio_T), ratio_T, nothing_T)


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
