"""Every logprob that an engine drew with, against a packed forward of the weights that drew it.

The trainer's side holds weights of its own, so nothing can agree because both sides hold the same
stale ones. A completion that lived through an update has tokens of several versions; it is run
whole under each, and each token is compared under its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.mixed_load import Name, Watch
from benchmarks.random_models import random_weights
from rollout import Completion
from shared_ops.model.config import ModelConfig
from shared_ops.model.decoder import Decoder
from shared_ops.model.vocabulary import vocab_limit
from shared_ops.model.weights import Weights
from trainer import TrainSample
from trainer.packing import pack, split_samples, spread
from trainer.parity import differing
from trainer.score import Scorer

BUDGET = 16384


class Bits(NamedTuple):
    """Tokens compared; of those, tokens with another bit or a NaN; and those with a NaN."""

    compared: int = 0
    differing: int = 0
    nan: int = 0


def total(each: Iterable[Bits]) -> Bits:
    columns = list(zip(*each, strict=True))
    return Bits(*map(sum, columns)) if columns else Bits()


def policy(
    folder: Path, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> tuple[Weights, Scorer]:
    """Random weights, other ones for another seed, and the exact forward over them."""
    config = ModelConfig.from_folder(folder)
    weights = random_weights(folder, config, dtype, device, seed)
    return weights, Scorer(Decoder(config, weights), vocab_limit(folder, config))


def bits_of(policies: Mapping[int, Scorer], completions: Sequence[Completion]) -> list[Bits]:
    """Of each completion, by the scorers of all versions that drew tokens of it.

    Gradients stay enabled, as in training: without them a forward takes fused launches too.
    """
    found = [Bits() for _ in completions]
    for version, scorer in policies.items():
        for index, bits in _under(version, scorer, completions):
            found[index] = total((found[index], bits))
    missing = {v for one in completions for v in one.policy_versions} - policies.keys()
    if missing:
        raise ValueError(f"no policy for versions {sorted(missing)}: nothing to compare with")
    return found


def _under(
    version: int, scorer: Scorer, completions: Sequence[Completion]
) -> Iterable[tuple[int, Bits]]:
    places = [i for i, one in enumerate(completions) if version in one.policy_versions]
    samples = [TrainSample.of(completions[place], 0.0) for place in places]
    device = scorer.model.head_VD.device
    for chosen in split_samples([sample.length for sample in samples], BUDGET):
        batch = pack(samples, chosen, device)
        logprobs_N = scorer.score(batch)[0].detach().cpu()
        for index, own_D in zip(chosen, logprobs_N.split(batch.lengths), strict=True):
            yield places[index], _compared(samples[index], own_D, version)


def _compared(sample: TrainSample, own_D: Tensor, version: int) -> Bits:
    drawn_C = torch.tensor(sample.behaviour_logprobs, dtype=torch.float32)
    own_C = spread(sample, own_D)
    is_own_C = torch.tensor(sample.policy_versions) == version
    drawn_F, own_F = drawn_C[is_own_C], own_C[is_own_C]
    nan = int((drawn_F.isnan() | own_F.isnan()).sum())
    return Bits(len(drawn_F), int(differing(drawn_F, own_F).sum()), nan)


def by_ingredient(
    watch: Watch, completions: Sequence[Completion], bits: Sequence[Bits]
) -> dict[str, Bits]:
    """Bits of all completions that went through a thing, for each thing that was watched."""
    names: list[Name] = [(one.request_id, one.sample_index) for one in completions]
    return {
        what: total(each for name, each in zip(names, bits, strict=True) if name in chosen)
        for what, chosen in watch.samples.items()
    }
