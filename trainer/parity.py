"""Bit comparison of the sampler's log-probabilities with the trainer's, and the error it raises.

Two float32 values are equal if their int32 views are: 0.0 and -0.0 differ, and NaN differs from
everything, itself included.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.sample import TrainSample


class ParityReport(NamedTuple):
    """Result of a comparison.

    Attributes:
        tokens_compared: how many.
        tokens_differing: how many have other bits, or NaN on either side.
        max_ulp: largest distance, counting float32 values from one to the other (0.0 and -0.0
            are one apart).
        kl: mean k3 over the tokens, exp(d) - d - 1 with d = trainer - sampler (Schulman 2020,
            "Approximating KL divergence"), in float64: exactly 0.0 if all are equal.
        first: index of the first differing token, or None.
    """

    tokens_compared: int
    tokens_differing: int
    max_ulp: int
    kl: float
    first: int | None


class FirstDifference(NamedTuple):
    """The first token that differs: where it is, and both values.

    Attributes:
        sample_index: in the list given to the step.
        position: in the completion, from 0.
        request_id: of the sample.
        token_id: the drawn token.
        sampler: the float32 that came with the sample.
        trainer: the float32 that the trainer computed.
        ulp: their distance.
        op: the first op whose output differs, once somebody has looked for it.
    """

    sample_index: int
    position: int
    request_id: str
    token_id: int
    sampler: float
    trainer: float
    ulp: int
    op: str = ""

    def __str__(self) -> str:
        apart = f", {self.ulp} ulp apart" if math.isfinite(self.sampler + self.trainer) else ""
        values = f"sampler {self.sampler!r}, trainer {self.trainer!r}{apart}"
        look_at = self.op or "unknown; compare the two traces of this token"
        return (
            f"first: request {self.request_id!r} (sample {self.sample_index}), position "
            f"{self.position} of the completion, token {self.token_id}: {values}; "
            f"op to look at: {look_at}"
        )


class ParityError(RuntimeError):
    """Sampler and trainer disagree, or nothing was compared. Nothing has been updated.

    Attributes:
        report: the counts.
        first: the first differing token; None if nothing was compared, or another rank has it.
    """

    def __init__(self, report: ParityReport, first: FirstDifference | None = None) -> None:
        self.report = report
        self.first = first
        super().__init__(self._message())

    def __reduce__(self):
        return type(self), (self.report, self.first)

    def with_op(self, op: str) -> "ParityError":
        """The same error, naming the op whose output differs first."""
        first = None if self.first is None else self.first._replace(op=op)
        return ParityError(self.report, first)

    def _message(self) -> str:
        if not self.report.tokens_compared:
            return (
                "no token could be compared: none was drawn by the current weights; "
                "publish the weights before sampling, or prove stale tokens with with_lag_proof"
            )
        where = self.first or "the first is on another rank"
        return (
            f"{self.report.tokens_differing} of {self.report.tokens_compared} tokens differ "
            f"between sampler and trainer, up to {self.report.max_ulp} ulp; {where}"
        )


def compare(sampler: Sequence[float] | Tensor, trainer: Tensor) -> ParityReport:
    """Compare bit for bit.

    Args:
        sampler: T float32 values.
        trainer: [T] float32.

    Returns:
        A report over the T tokens.

    Raises:
        ValueError: lengths or dtypes do not agree.
    """
    sampler_T = torch.as_tensor(sampler, dtype=None if isinstance(sampler, Tensor) else FLOAT)
    sampler_T, trainer_T = sampler_T.detach().cpu(), trainer.detach().cpu()
    if sampler_T.shape != trainer_T.shape or sampler_T.dim() != 1:
        raise ValueError(
            f"parity: shapes are {tuple(sampler_T.shape)} and {tuple(trainer_T.shape)}; "
            "give one value per token on both sides"
        )
    if sampler_T.dtype != FLOAT or trainer_T.dtype != FLOAT:
        raise ValueError(
            f"parity: dtypes are {sampler_T.dtype} and {trainer_T.dtype}; compare float32"
        )
    return _report(sampler_T, trainer_T)


FLOAT = torch.float32


def compare_fresh(
    samples: Sequence[TrainSample], scored: Sequence[Tensor], version: int
) -> tuple[ParityReport, FirstDifference | None]:
    """Compare every token that `version` drew with the trainer's values under that version."""
    values = [value for one in samples for value in one.drawn(one.behaviour_logprobs)]
    versions = [drawn_by for one in samples for drawn_by in one.drawn(one.policy_versions)]
    own = [own_C[list(one.places)] for one, own_C in zip(samples, scored, strict=True)]
    sampler_N, trainer_N = torch.tensor(values, dtype=FLOAT), torch.cat(own)
    fresh_F = (torch.tensor(versions) == version).nonzero().squeeze(1)
    report = compare(sampler_N[fresh_F], trainer_N[fresh_F])
    if report.first is None:
        return report, None
    place = int(fresh_F[report.first])
    return report, locate(samples, place, sampler_N, trainer_N)


def locate(
    samples: Sequence[TrainSample], place: int, sampler_N: Tensor, trainer_N: Tensor
) -> FirstDifference:
    """The record of token `place`, counted over all samples' drawn tokens."""
    index, row = 0, place
    while row >= len(samples[index].places):
        row -= len(samples[index].places)
        index += 1
    return difference_at(samples, (index, samples[index].places[row]), sampler_N, trainer_N, place)


def difference_at(
    samples: Sequence[TrainSample],
    where: tuple[int, int],
    sampler_N: Tensor,
    trainer_N: Tensor,
    row: int,
) -> FirstDifference:
    """The record of one token. where: its sample, and its position in the completion; row: of the
    two values among those compared."""
    index, position = where
    span = slice(row, row + 1)
    return FirstDifference(
        sample_index=index,
        position=position,
        request_id=samples[index].request_id,
        token_id=samples[index].completion_ids[position],
        sampler=sampler_N[row].item(),
        trainer=trainer_N[row].item(),
        ulp=int(ulp_distance(sampler_N[span], trainer_N[span])),
    )


def _report(sampler_T: Tensor, trainer_T: Tensor) -> ParityReport:
    count = sampler_T.numel()
    if not count:
        return ParityReport(0, 0, 0, 0.0, None)
    differs_T = differing(sampler_T, trainer_T)
    indices = differs_T.nonzero()
    ulp_T = ulp_distance(sampler_T, trainer_T)
    kl = k3(sampler_T, trainer_T).sum().item() / count
    first = int(indices[0]) if len(indices) else None
    return ParityReport(count, len(indices), int(ulp_T.max()), kl, first)


def differing(a_T: Tensor, b_T: Tensor) -> Tensor:
    """bool [T]: other bits, or NaN on either side; float32 inputs."""
    return (a_T.view(torch.int32) != b_T.view(torch.int32)) | a_T.isnan() | b_T.isnan()


def ulp_distance(a_T: Tensor, b_T: Tensor) -> Tensor:
    """int64 [T]: how many float32 values lie from one to the other."""
    return (_ordered(a_T) - _ordered(b_T)).abs()


def _ordered(x_T: Tensor) -> Tensor:
    bits_T = x_T.contiguous().view(torch.int32).long()
    return torch.where(bits_T < 0, -(bits_T + 2**31) - 1, bits_T)


def k3(behaviour_T: Tensor, policy_T: Tensor) -> Tensor:
    """float64 [T]: exp(d) - d - 1 with d = policy - behaviour; its mean estimates
    KL(behaviour || policy) over tokens that behaviour drew (Schulman 2020)."""
    d_T = policy_T.detach().double() - behaviour_T.detach().double()
    return torch.expm1(d_T) - d_T
