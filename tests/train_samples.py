"""Samples for trainer tests, scored by the trainer itself as a sampler would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from trainer import Trainer, TrainSample

TOKENS = 113  # toy_models.ENTRIES, whose module takes seconds to import


def unscored(count: int, seed: int = 0, longest: int = 24, **changes) -> list[TrainSample]:
    """Random prompts and completions of random lengths. Token 0 is left out: transformers zeroes
    the padding row of the embedding, and rmsnorm of zeros has gradients of 1 / sqrt(eps)."""
    source = random.Random(seed)

    def tokens(lowest: int) -> list[int]:
        return [source.randrange(1, TOKENS) for _ in range(source.randint(lowest, longest))]

    samples = []
    for index in range(count):
        prompt, completion = tokens(2), tokens(1)
        settings = {
            "prompt_ids": prompt,
            "completion_ids": completion,
            "behaviour_logprobs": [-1.0] * len(completion),
            "advantage": source.uniform(-1, 1),
            "policy_versions": [0] * len(completion),
            "request_id": f"request-{index}",
        }
        samples.append(TrainSample(**settings | changes))
    return samples


def drawn(trainer: Trainer, samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples as the trainer's current version would have drawn them."""
    return [
        replace(
            sample,
            behaviour_logprobs=values.tolist(),
            policy_versions=[trainer.version] * len(values),
        )
        for sample, values in zip(samples, trainer.logprobs(samples), strict=True)
    ]


def nudged(sample: TrainSample, position: int, value: float) -> TrainSample:
    """The sample with one behaviour log-probability replaced."""
    values = list(sample.behaviour_logprobs)
    values[position] = value
    return replace(sample, behaviour_logprobs=values)
