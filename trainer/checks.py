"""What a sample must be for this model and this version; one line names sample, value and mend."""

import math
from collections.abc import Sequence

from trainer.sample import TrainSample


def check_fit(samples: Sequence[TrainSample], max_positions: int, vocab_limit: int) -> None:
    """Refuse samples that the model cannot run.

    Raises:
        ValueError: too long, or a token id outside the vocabulary.
    """
    for index, sample in enumerate(samples):
        tokens = len(sample.prompt_ids) + len(sample.completion_ids)
        if tokens > max_positions:
            raise ValueError(
                f"{label(sample, index)}: prompt and completion are {tokens} tokens, the model "
                f"takes {max_positions}; lower max_tokens or leave long prompts out"
            )
        for token in (*sample.prompt_ids, *sample.completion_ids):
            if not 0 <= token < vocab_limit:
                raise ValueError(
                    f"{label(sample, index)}: token id {token} is not below {vocab_limit}, the "
                    "tokenizer's size; use the model's own tokenizer"
                )


def check_trainable(samples: Sequence[TrainSample], version: int, mode: str) -> None:
    """Refuse samples that have no policy ratio.

    Raises:
        ValueError: no samples, a greedy one, one from the future, or one whose
            behaviour_logprobs are not finite (fresh tokens in bitwise mode are left to the parity
            check, which names the token).
    """
    if not samples:
        raise ValueError("step: samples is empty; give at least one")
    for index, sample in enumerate(samples):
        if sample.temperature == 0:
            raise ValueError(
                f"{label(sample, index)}: temperature is 0; a greedy completion was not drawn from "
                "the policy and has no policy ratio, so sample with a temperature above 0"
            )
        versions = sample.drawn(sample.policy_versions)
        if max(versions) > version:
            raise ValueError(
                f"{label(sample, index)}: policy version {max(versions)} is newer "
                f"than the trainer's, {version}; was another checkpoint loaded?"
            )
        for value, drawn_by in zip(sample.drawn(sample.behaviour_logprobs), versions, strict=True):
            proved = mode == "bitwise" and drawn_by == version
            if not proved and not math.isfinite(value):
                raise ValueError(
                    f"{label(sample, index)}: behaviour_logprobs holds {value}; keep what the "
                    "sampler drew with"
                )


def label(sample: TrainSample, index: int) -> str:
    return f"{sample.name} at index {index}"
