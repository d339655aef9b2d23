"""The loss of one micro-batch: the place where ratio, correction, loss and denominator meet."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from trainer.config import TrainerConfig
from trainer.correction import correct, scheme
from trainer.loss import Denominators, reference_kl, token_losses
from trainer.metrics import TokenLog
from trainer.packing import concatenated, joined, per_token
from trainer.sample import TrainSample


class Given(NamedTuple):
    """What the samples bring, as columns [N] over drawn tokens (fields as in TokenLog).

    `lengths` are drawn tokens of each sample, `advantage_N` is float32.
    """

    lengths: list[int]
    behaviour_N: Tensor
    kept_N: Tensor
    proximal_N: Tensor
    age_N: Tensor
    advantage_N: Tensor
    counts_N: Tensor
    scale_N: Tensor


def counts(config: TrainerConfig, sample: TrainSample) -> bool:
    """Whether the sample is in the loss and its denominators."""
    return not (config.mask_truncated and sample.truncated)


def gather(
    config: TrainerConfig,
    samples: Sequence[TrainSample],
    version: int,
    denominators: Denominators,
    device: torch.device,
) -> Given:
    """Columns of the samples of a micro-batch."""
    lengths = [len(sample.places) for sample in samples]
    nothing = float("nan")

    def filled(sample: TrainSample, values: Sequence[float | None]) -> Sequence[float]:
        given = sample.drawn(values)
        if not given:
            return (nothing,) * len(sample.places)
        return [nothing if value is None else value for value in given]

    versions = [sample.drawn(sample.policy_versions) for sample in samples]
    behaviour = [sample.drawn(sample.behaviour_logprobs) for sample in samples]
    scales = [denominators.token_scale(config, length) for length in lengths]
    return Given(
        lengths=lengths,
        behaviour_N=concatenated(behaviour, device),
        kept_N=concatenated([filled(s, s.old_logprobs) for s in samples], device),
        proximal_N=concatenated([filled(s, s.proximal_logprobs) for s in samples], device),
        age_N=version - joined(versions, numpy.int64, device),
        advantage_N=per_token(samples, [sample.advantage for sample in samples], device),
        counts_N=per_token(samples, [counts(config, s) for s in samples], device).bool(),
        scale_N=per_token(samples, scales, device),
    )


def objective(
    config: TrainerConfig,
    given: Given,
    now_N: Tensor,
    entropy_N: Tensor,
    reference_N: Tensor | None,
) -> tuple[Tensor, TokenLog]:
    """The micro-batch's part of the loss (a scalar to differentiate), and its token columns.

    Args:
        config: mode, lag_correction, loss, aggregation, entropy_coefficient, beta.
        given: columns of the samples.
        now_N: [N] float32, log pi_theta, differentiable.
        entropy_N: [N] float32, nats, differentiable.
        reference_N: [N] float32 log pi_ref, or None without a reference.
    """
    detached_N = now_N.detach()
    name = scheme(config)
    scored_N = given.proximal_N if config.mode == "bitwise" else given.kept_N
    old_N = torch.where(scored_N.isnan(), detached_N, scored_N)
    reached_N = detached_N if name == "ppo" else old_N
    correction = correct(config, reached_N - given.behaviour_N, given.lengths)
    if name == "ppo":
        old_N = given.behaviour_N
    terms = token_losses(config, now_N, old_N, given.advantage_N, given.lengths)
    no_kl_N = torch.zeros_like(detached_N)
    kl_N = no_kl_N if reference_N is None else reference_kl(now_N, reference_N)
    loss_N = correction.weight_T * terms.loss_T + config.beta * kl_N
    if config.entropy_coefficient:
        loss_N = loss_N - config.entropy_coefficient * entropy_N
    log = TokenLog(
        logprob=detached_N,
        behaviour=given.behaviour_N,
        kept=given.kept_N,
        age=given.age_N,
        counts=given.counts_N,
        entropy=entropy_N.detach(),
        loss=loss_N.detach(),
        scale=given.scale_N,
        importance=correction.weight_T if name in ("tis", "mis") else correction.ratio_T,
        ratio=correction.ratio_T,
        limited=correction.limited_T,
        clipped_low=terms.clipped_low_T,
        clipped_high=terms.clipped_high_T,
        reference_kl=kl_N.detach(),
    )
    return torch.where(given.counts_N, loss_N * given.scale_N, 0.0).sum(), log
