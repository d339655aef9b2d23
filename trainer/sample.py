"""The records that cross the trainer's border: TrainSample in, TrainStats out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

LEAST_TEMPERATURE = 1e-6
OPTIONAL = ("old_logprobs", "proximal_logprobs", "kept_thresholds", "loss_mask", "logit_biases")


@dataclass(frozen=True)
class TrainSample:
    """One completion, with what the sampler drew it with. Sequences are kept as tuples.

    Example: prompt [5, 9], completion [7, 2] drawn by version 3 with log-probabilities
    [-0.25, -1.5]: TrainSample((5, 9), (7, 2), (-0.25, -1.5), 0.8, (3, 3)).

    Attributes:
        prompt_ids: P token ids, at least one.
        completion_ids: C token ids, at least one; a stop token is part of them.
        behaviour_logprobs: C floats, each the float32 that the sampler drew with.
        advantage: of the whole completion.
        policy_versions: C versions of the weights, each the one that drew the token.
        temperature: the logits were divided by it; 0 (greedy) can be scored, not trained on.
        truncated: the completion ended at a length limit.
        request_id: named in errors.
        old_logprobs: C values, the trainer's own under the version that drew each token, None where
            it has none; () for none at all. `Trainer.with_old_logprobs` fills in fresh tokens,
            `Trainer.with_lag_proof` stale ones.
        proximal_logprobs: C floats, the trainer's under the version at which work on the batch
            began, for several optimiser steps on it; () otherwise.
        kept_thresholds: C float32 thresholds of the kept sets that the tokens were drawn from with
            top-p, top-k or min-p; () otherwise. logit_biases: (first, end, token id, bias), as
            the sampler applied them. Both as `shared_ops.logprob.restricted` defines them.
        loss_mask: C truths, False for tokens that were not drawn (a tool's answer, say): they are
            run as context and are in no loss, denominator, comparison or metric, and what the
            other sequences hold in their places is not looked at; () if all were drawn.

    Raises:
        ValueError: lengths disagree, something is empty, or a number cannot be meant.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    behaviour_logprobs: Sequence[float]
    advantage: float
    policy_versions: Sequence[int]
    temperature: float = 1.0
    truncated: bool = False
    request_id: str = ""
    old_logprobs: Sequence[float | None] = ()
    proximal_logprobs: Sequence[float] = ()
    kept_thresholds: Sequence[float] = ()
    logit_biases: Sequence[tuple[int, int, int, float]] = ()
    loss_mask: Sequence[bool] = ()

    @classmethod
    def of(
        cls,
        completion: Any,
        advantage: float,
        temperature: float = 1.0,
        request_id: str | None = None,
    ) -> "TrainSample":
        """The sample of what an engine returned, with all that its bits depend on.

        Tokens that an environment appended are left out of the loss.

        Args:
            completion: a `rollout.Completion`.
            advantage: of the whole of it.
            temperature: that it was drawn with.
            request_id: the completion's own by default.
        """
        return cls(
            prompt_ids=completion.prompt_ids,
            completion_ids=completion.token_ids,
            behaviour_logprobs=completion.logprobs,
            advantage=advantage,
            policy_versions=completion.policy_versions,
            temperature=temperature,
            truncated=completion.finish_reason == "length",
            request_id=request_id or f"{completion.request_id}/sample-{completion.sample_index}",
            kept_thresholds=completion.kept_thresholds,
            logit_biases=completion.logit_biases,
            loss_mask=completion.is_drawn if completion.appended else (),
        )

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "completion_ids", "behaviour_logprobs", "policy_versions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not getattr(self, name):
                raise ValueError(f"{self.name}: {name} is empty; leave the sample out")
        for name in OPTIONAL:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_lengths()
        if self.loss_mask and not any(self.loss_mask):
            raise ValueError(f"{self.name}: loss_mask has no True; leave the sample out")
        if not math.isfinite(self.advantage):
            raise ValueError(f"{self.name}: advantage is {self.advantage}; it must be finite")
        for name in ("old_logprobs", "proximal_logprobs"):
            if any(value is not None and not math.isfinite(value) for value in getattr(self, name)):
                raise ValueError(f"{self.name}: {name} holds NaN or infinity; score it again")
        if min(self.policy_versions) < 0:
            raise ValueError(f"{self.name}: policy_versions holds a number below 0")
        if not (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf):
            raise ValueError(
                f"{self.name}: temperature is {self.temperature}; it must be 0, or "
                f"{LEAST_TEMPERATURE} or more"
            )

    def _check_lengths(self) -> None:
        count = len(self.completion_ids)
        one_each = ("behaviour_logprobs", "policy_versions", *OPTIONAL[:4])
        for name in one_each:
            length = len(getattr(self, name))
            if length != count and (length or name not in OPTIONAL):
                raise ValueError(
                    f"{self.name}: {name} has {length} entries for {count} completion tokens; "
                    "give one per token"
                )

    @property
    def name(self) -> str:
        return f"sample {self.request_id!r}" if self.request_id else "sample"

    def drawn(self, each: Sequence[Any]) -> Sequence[Any]:
        """Of C values, one per completion token, those D of the tokens that were drawn."""
        return tuple(compress(each, self.loss_mask)) if self.loss_mask else each

    @property
    def places(self) -> Sequence[int]:
        """Where in the completion the D drawn tokens are."""
        return self.drawn(range(len(self.completion_ids)))

    @property
    def length(self) -> int:
        """Tokens that are run: the last one is only ever a target."""
        return len(self.prompt_ids) + len(self.completion_ids) - 1


@dataclass(frozen=True)
class TrainStats:
    """What one optimiser step did.

    Attributes:
        step: optimiser steps taken so far, this one included.
        version: of the weights after the step.
        loss: before the update, summed over every micro-batch and rank.
        grad_norm: before clipping.
        learning_rate: of this step.
        tokens_compared: fresh tokens whose bits were compared.
        tokens_differing: of those, tokens whose bits differ.
        max_ulp: largest distance between the two float32 values, in units in the last place.
        metrics: every number by its public name, the above included.
    """

    step: int
    version: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_compared: int
    tokens_differing: int
    max_ulp: int
    metrics: dict[str, float] = field(default_factory=dict)
