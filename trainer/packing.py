"""Micro-batches of whole samples, packed without padding.

The split is a pure function of the samples' order and lengths, because weight gradients are sums
over tokens and are promised to be equal from run to run.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared_ops.logprob.restricted import Bias, Restriction
from trainer.sample import TrainSample


class MicroBatch(NamedTuple):
    """Packed samples; T tokens are run, N drawn ones are scored.

    Example: samples ([5, 9], [7, 2]) and ([4], [6]) run tokens [5, 9, 7, 4] at positions
    [0, 1, 2, 0], starts [0, 3, 4]; rows [1, 2, 3] predict targets [7, 2, 6], lengths [2, 1].

    Attributes:
        samples: indices into the list that was packed.
        token_ids_T, positions_T: int64; the last token of a completion is only a target.
        starts: B + 1 cumulative lengths.
        rows_N: int64, the row of T whose hidden state predicts each target.
        targets_N: int64, drawn tokens.
        temperature_N: float32; 1 where the sample is greedy.
        lengths: drawn tokens of each sample, adding up to N.
        restriction: of the N rows; None where no sample has kept sets or biases.
    """

    samples: tuple[int, ...]
    token_ids_T: Tensor
    positions_T: Tensor
    starts: list[int]
    rows_N: Tensor
    targets_N: Tensor
    temperature_N: Tensor
    lengths: list[int]
    restriction: Restriction | None = None


def split_samples(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Group consecutive samples while their tokens fit; one longer than the budget stands alone.

    Args:
        lengths: tokens that each sample runs.
        budget: tokens of a micro-batch.

    Returns:
        Indices of each micro-batch, in order.
    """
    batches: list[list[int]] = []
    used = budget
    for index, length in enumerate(lengths):
        if used + length > budget:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += length
    return [tuple(batch) for batch in batches]


def pack(
    samples: Sequence[TrainSample], indices: tuple[int, ...], device: torch.device
) -> MicroBatch:
    """Lay the chosen samples one behind the other (see MicroBatch)."""
    chosen = [samples[index] for index in indices]
    token_ids, positions, rows, targets, starts = [], [], [], [], [0]
    for sample in chosen:
        first = starts[-1] + len(sample.prompt_ids) - 1
        token_ids += [*sample.prompt_ids, *sample.completion_ids[:-1]]
        positions += range(sample.length)
        rows += [first + place for place in sample.places]
        targets += sample.drawn(sample.completion_ids)
        starts.append(starts[-1] + sample.length)

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return MicroBatch(
        samples=indices,
        token_ids_T=integers(token_ids),
        positions_T=integers(positions),
        starts=starts,
        rows_N=integers(rows),
        targets_N=integers(targets),
        temperature_N=per_token(chosen, [s.temperature or 1.0 for s in chosen], device),
        lengths=[len(sample.places) for sample in chosen],
        restriction=_restriction(chosen, device),
    )


def _restriction(samples: Sequence[TrainSample], device: torch.device) -> Restriction | None:
    if not any(sample.kept_thresholds or sample.logit_biases for sample in samples):
        return None
    keep_all = float("-inf")
    thresholds = [s.drawn(s.kept_thresholds) or (keep_all,) * len(s.places) for s in samples]
    entries, start = [], 0
    for sample in samples:
        rows = {place: start + row for row, place in enumerate(sample.places)}
        for first, end, token, bias in sample.logit_biases:
            spanned = (rows[place] for place in range(first, end) if place in rows)
            entries += [(row, token, bias) for row in spanned]
        start += len(rows)
    rows, tokens, biases = zip(*entries, strict=True) if entries else ((), (), ())
    rows_J, tokens_J = torch.tensor([rows, tokens], dtype=torch.int64, device=device)
    bias = Bias(rows_J, tokens_J, concatenated([biases], device)) if entries else None
    return Restriction(concatenated(thresholds, device), bias)


def per_token(
    samples: Sequence[TrainSample], values: Sequence[float], device: torch.device
) -> Tensor:
    """float32 [N]: one value per sample, repeated for each of its drawn tokens."""
    counts = torch.tensor([len(sample.places) for sample in samples])
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts).to(device)


def spread(sample: TrainSample, values_D: Tensor) -> Tensor:
    """[C]: values of the drawn tokens at their places in the completion, 0 elsewhere."""
    if not sample.loss_mask:
        return values_D
    values_C = values_D.new_zeros(len(sample.completion_ids))
    values_C[list(sample.places)] = values_D
    return values_C


def concatenated(sequences: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """float32 [N]: values that are already one per drawn token."""
    flat = [value for sequence in sequences for value in sequence]
    return torch.tensor(flat, dtype=torch.float32, device=device)


def idle(device: torch.device) -> MicroBatch:
    """One token of no sample: what a rank runs in a round for which it has no micro-batch."""
    zero_1 = torch.zeros(1, dtype=torch.int64, device=device)
    ones_1 = torch.ones(1, device=device)
    return MicroBatch((), zero_1, zero_1, [0, 1], zero_1, zero_1, ones_1, [1])
