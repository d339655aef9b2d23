"""Proof around a batch: was it drawn by these very weights, and if bits differ, which op first."""

from collections.abc import Sequence

from torch import Tensor

from recipes.runtime import Sides
from trainer.parity import FirstDifference, differing
from trainer.sample import TrainSample, TrainStats


class ProofError(RuntimeError):
    """A batch that cannot be proved: other weights, or tokens that nobody compared."""


def require_known_policy(
    sides: Sides, samples: Sequence[TrainSample], oldest: int, version: int
) -> bool:
    """True: every token was drawn by a version from `oldest` to the trainer's, `version`, and the
    engine still has the trainer's weights.

    Raises:
        ProofError: naming the request and the versions, or the digests.
    """
    allowed = range(oldest, version + 1)
    for sample in samples:
        drawn_by = sample.drawn(sample.policy_versions)
        other = next((v for v in drawn_by if v not in allowed), version)
        if other != version:
            raise ProofError(
                f"request {sample.request_id!r} holds a token drawn by weights version {other} and "
                f"the trainer has version {version}, so {oldest} is the oldest that may be used: "
                "publish before sampling, or raise --max-lag"
            )
    engine, trainer = sides.rollout.weights_digest(), sides.trainer.weights_digest()
    if engine != trainer:
        raise ProofError(
            f"the engine's weights (digest {engine[:16]}) are not the trainer's ({trainer[:16]}) "
            "any more: something wrote to them after they were published"
        )
    return True


def require_all_compared(
    stats: Sequence[TrainStats], samples: Sequence[TrainSample], version: int
) -> None:
    """The trainer compared every token that `version` drew, and every stale one that it scored.

    Raises:
        ProofError: with both counts.
    """
    compared = sum(each.tokens_compared for each in stats)
    tokens = sum(_known(sample, version) for sample in samples)
    if compared != tokens:
        raise ProofError(f"only {compared} of the batch's {tokens} tokens were compared")


def _known(sample: TrainSample, version: int) -> int:
    """Tokens whose own version's value the trainer has."""
    old = sample.old_logprobs or (None,) * len(sample.completion_ids)
    pairs = sample.drawn(list(zip(sample.policy_versions, old, strict=True)))
    return sum(drawn_by == version or value is not None for drawn_by, value in pairs)


def first_differing_op(sides: Sides, sample: TrainSample, first: FirstDifference) -> str:
    """The place of the first op whose output differs anywhere up to the differing token.

    Both sides run the sample again and record every op's output rows: the sampler through chunked
    prefill and paged decode, the trainer through its packed forward.
    """
    position = len(sample.prompt_ids) + first.position
    sampler = sides.rollout.trace(
        sample.prompt_ids, sample.completion_ids, position, sample.temperature
    )
    trainer = sides.trainer.trace(sample, position)
    for name, value in sampler.items():
        if name in trainer and _differ(value, trainer[name]):
            return name
    return _no_op(float(sampler["logprob"]), first)


def _no_op(repeated: float, first: FirstDifference) -> str:
    """What to look at when a repeated run of both sides agrees with itself."""
    if repeated == first.trainer:
        return (
            "none: run again, the sampler gives the trainer's value, so look at what came between "
            "(the temperature and kept set used, the KV it read, the value on its way)"
        )
    if repeated == first.sampler:
        return "none: run again, the trainer gives the sampler's value: look at its batch"
    return "none: run again, both sides agree on another value: look at the temperature and weights"


def _differ(first: Tensor, second: Tensor) -> bool:
    """Bits of any row, NaN counting as different."""
    if first.shape != second.shape:
        return True
    return bool(differing(first.float().flatten(), second.float().flatten()).any())
