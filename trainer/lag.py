"""The lag proof: stale tokens scored again under the very weights that drew them.

A token drawn by version v and used at version w > v cannot be compared with the trainer's value
now. With the published weights of v kept, the trainer scores it under v instead: the two float32
values must agree in every bit, so that what the importance ratio corrects is lag and nothing else.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_ops.model.weights import Leaves
from trainer.parity import FirstDifference, ParityReport, compare, difference_at
from trainer.sample import TrainSample

TAG = "none looked for; is the token's policy version the one that drew it?"


class VersionError(ValueError):
    """A token's own version is not kept, so it cannot be proved."""


class KeptVersions:
    """Copies of the last published weights by version, bit for bit in their own dtype."""

    def __init__(self, keep: int, place: str) -> None:
        """keep: how many; 0 keeps none. place: "device", "cpu" or "disk" (a temporary folder)."""
        self._keep, self._place = keep, place
        self._kept: dict[int, list[Tensor] | Path] = {}
        self._folder = tempfile.TemporaryDirectory("-zerokl-versions") if place == "disk" else None
        self._spare: Leaves | None = None

    def add(self, version: int, weights: Leaves) -> None:
        """Keep a copy of what is published now; the oldest beyond `keep` goes."""
        if not self._keep or version in self._kept:
            return
        self._kept[version] = self._copied(version, weights.leaves())
        for oldest in sorted(self._kept)[: -self._keep]:
            gone = self._kept.pop(oldest)
            if isinstance(gone, Path):
                gone.unlink()

    def forget(self) -> None:
        """Drop every version: the weights go back, and numbers will come again."""
        for kept in self._kept.values():
            if isinstance(kept, Path):
                kept.unlink()
        self._kept = {}

    def at(self, version: int, like: Leaves) -> Leaves:
        """A kept version's weights, in one spare copy that the next call overwrites.

        like: the working weights, for dtype and device.

        Raises:
            VersionError: that version is not kept.
        """
        if version not in self._kept:
            raise VersionError(
                f"policy version {version} is not kept (kept are {sorted(self._kept)}): raise "
                f"keep_versions, now {self._keep}, or use fresher samples"
            )
        if self._spare is None:
            first = like.leaves()[0]
            self._spare = like.to(first.dtype, first.device)
        kept, leaves = self._kept[version], self._spare.leaves()
        if isinstance(kept, Path):
            stored = load_file(kept)
            kept = [stored[str(index)] for index in range(len(leaves))]
        with torch.no_grad():
            for target, source in zip(leaves, kept, strict=True):
                target.copy_(source)
        return self._spare

    def _copied(self, version: int, leaves: Sequence[Tensor]) -> list[Tensor] | Path:
        device = None if self._place == "device" else "cpu"
        copies = [leaf.detach().to(device or leaf.device, copy=True) for leaf in leaves]
        if self._folder is None:
            return copies
        path = Path(self._folder.name) / f"version-{version}.safetensors"
        save_file({str(index): copy for index, copy in enumerate(copies)}, path)
        return path


class Stale(NamedTuple):
    """The tokens of one sample that one older version drew: completion places, in order."""

    sample: int
    version: int
    places: tuple[int, ...]


def chosen_stale(
    samples: Sequence[TrainSample], version: int, share: float, seed: int
) -> list[Stale]:
    """A random share of the (sample, older version) pairs, at least one where there are any.

    The choice depends on the arguments only; share is a probability for each pair.
    """
    pairs = [pair for index, one in enumerate(samples) for pair in _pairs(index, one, version)]
    names = [f"{seed} {version} {pair.sample} {pair.version}" for pair in pairs]
    hashes = [blake2b(name.encode(), digest_size=8).digest() for name in names]
    draws = [int.from_bytes(digest, "big") / 2**64 for digest in hashes]
    least = min(draws, default=0.0)
    return [pair for pair, draw in zip(pairs, draws, strict=True) if draw < share or draw == least]


def _pairs(index: int, sample: TrainSample, version: int) -> list[Stale]:
    by_version: dict[int, list[int]] = {}
    for place in sample.places:
        drawn_by = sample.policy_versions[place]
        if drawn_by < version:
            by_version.setdefault(drawn_by, []).append(place)
    return [Stale(index, drawn_by, tuple(places)) for drawn_by, places in by_version.items()]


def compare_stale(
    samples: Sequence[TrainSample], chosen: Sequence[Stale], scored: Sequence[Tensor]
) -> tuple[ParityReport, FirstDifference | None]:
    """Bits of the chosen tokens against the trainer's values under the versions that drew them.

    Args:
        samples: all of them.
        chosen: which tokens were scored again.
        scored: for each of `chosen` the values of its sample's whole completion, [C] float32.
    """
    places = [(pair.sample, place) for pair in chosen for place in pair.places]
    drawn = torch.tensor([samples[i].behaviour_logprobs[at] for i, at in places])
    own = [values[list(pair.places)] for pair, values in zip(chosen, scored, strict=True)]
    own_N = torch.cat([*own, torch.empty(0)])
    report = compare(drawn, own_N)
    if report.first is None:
        return report, None
    index, place = places[report.first]
    first = difference_at(samples, (index, place), drawn, own_N, report.first)
    tag = samples[index].policy_versions[place]
    return report, first._replace(op=f"{TAG} (it says {tag})")


def with_fresh(sample: TrainSample, values: Sequence[float], version: int) -> list[float | None]:
    """old_logprobs of a sample, the values of its tokens that `version` drew filled in."""
    known = sample.old_logprobs or (None,) * len(values)
    return [
        value if drawn_by == version else before
        for value, before, drawn_by in zip(values, known, sample.policy_versions, strict=True)
    ]


class LagProver:
    """Scores stale tokens again under kept versions.

    kept: where versions are added. score: values of samples' completions under given weights.
    """

    def __init__(
        self,
        kept: KeptVersions,
        working: Leaves,
        score: Callable[[Leaves, Sequence[TrainSample]], list[Tensor]],
    ) -> None:
        self.kept, self._working, self._score = kept, working, score

    def prove(
        self, samples: Sequence[TrainSample], version: int, share: float, seed: int
    ) -> tuple[ParityReport, FirstDifference | None, list[TrainSample]]:
        """See Trainer.with_lag_proof; the report is of this rank's samples."""
        chosen = chosen_stale(samples, version, share, seed)
        scored: list[Tensor] = [torch.empty(0)] * len(chosen)
        for drawn_by in sorted({pair.version for pair in chosen}):
            mine = [place for place, pair in enumerate(chosen) if pair.version == drawn_by]
            of_version = [samples[chosen[place].sample] for place in mine]
            values = self._score(self.kept.at(drawn_by, self._working), of_version)
            for place, value in zip(mine, values, strict=True):
                scored[place] = value
        report, first = compare_stale(samples, chosen, scored)
        return report, first, _with_values(samples, chosen, scored)


def _with_values(
    samples: Sequence[TrainSample], chosen: Sequence[Stale], scored: Sequence[Tensor]
) -> list[TrainSample]:
    old = [list(s.old_logprobs) or [None] * len(s.completion_ids) for s in samples]
    for pair, values in zip(chosen, scored, strict=True):
        for place in pair.places:
            old[pair.sample][place] = values[place].item()
    return [replace(one, old_logprobs=own) for one, own in zip(samples, old, strict=True)]
