"""Token losses and how they are summed.

With rho = pi_theta / pi_old of a token (trainer/correction.py says what pi_old is) and A the
advantage of its completion:

* `grpo`: -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017; Shao et al.
  2024; the two widths are DAPO's clip-higher, Yu et al. 2025).
* `gspo`: the same with rho the sequence ratio exp(mean_t log rho_t) (Zheng et al. 2025).
* `cispo`: -stop_gradient(min(rho, cap)) A log pi_theta (MiniMax 2025).
* dual clip (Ye et al. 2020), on grpo and gspo where A < 0: the loss is at most -c A.
* beta > 0 adds beta (exp(d) - d - 1), d = log pi_ref - log pi_theta, after the importance weight.
* entropy_coefficient c adds -c H, H the entropy of pi_theta (after the temperature) at the token,
  after the importance weight too (Mnih et al. 2016, "Asynchronous methods for deep RL").

Sums, over the completions that count (i of B, n_i drawn tokens, N in all): `token` sum / N (DAPO),
`sequence` mean over i of sum_t / n_i (GRPO), `constant` sum / (B L_max) (Dr. GRPO). N and B come
from the whole optimiser batch before the first forward, so the gradient depends on micro-batch
size only by rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config import TrainerConfig
from trainer.correction import at_level, bounded_exp


class TokenLosses(NamedTuple):
    """Of T packed drawn tokens: float32 `loss_T`, differentiable, and bool masks of tokens
    whose ratio is clipped with effect (low: A < 0, high: A > 0)."""

    loss_T: Tensor
    clipped_low_T: Tensor
    clipped_high_T: Tensor


def token_losses(
    config: TrainerConfig,
    logprobs_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    lengths: list[int],
) -> TokenLosses:
    """Policy loss of each token, without importance weight or denominator.

    Args:
        config: loss, clip_low, clip_high, dual_clip, cispo_cap.
        logprobs_T: [T] float32, log pi_theta, differentiable.
        old_T: [T] float32, log pi_old.
        advantage_T: [T] float32, each token's completion's.
        lengths: tokens of each completion, adding up to T.

    Returns:
        The losses and clip masks.
    """
    level = "geometric" if config.loss == "gspo" else "token"
    ratio_T = bounded_exp(at_level(logprobs_T - old_T.detach(), lengths, level))
    low_T = (ratio_T < 1 - config.clip_low) & (advantage_T < 0)
    high_T = (ratio_T > 1 + config.clip_high) & (advantage_T > 0)
    if config.loss == "cispo":
        capped_T = ratio_T.detach().clamp(max=config.cispo_cap)
        over_T = (ratio_T > config.cispo_cap) & (advantage_T != 0)
        return TokenLosses(-capped_T * advantage_T * logprobs_T, torch.zeros_like(over_T), over_T)
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    if config.dual_clip is not None:
        bound_T = -config.dual_clip * advantage_T
        loss_T = torch.where(advantage_T < 0, torch.minimum(loss_T, bound_T), loss_T)
    return TokenLosses(loss_T, low_T, high_T)


def reference_kl(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """[T] k3 to the reference, differentiable in `logprobs_T`; its log ratio is clamped too."""
    d_T = (reference_T.detach() - logprobs_T).clamp(-20.0, 20.0)
    return torch.expm1(d_T) - d_T


class Denominators(NamedTuple):
    """Of the whole optimiser batch, over every rank: completions and tokens that count."""

    completions: float
    tokens: float

    def token_scale(self, config: TrainerConfig, length: int) -> float:
        """What each token loss of a completion of `length` tokens is multiplied by."""
        if config.aggregation == "token":
            return 1.0 / max(self.tokens, 1.0)
        if config.aggregation == "sequence":
            return 1.0 / (max(self.completions, 1.0) * length)
        return 1.0 / (max(self.completions, 1.0) * (config.max_completion_tokens or 1))
