"""Micro-batches of whole samples, packed without padding.

The split is a pure function of the samples' order and lengths, because weight gradients are sums
over tokens and are promised to be equal from run to run.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy
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
    tokens, positions, rows, targets, starts = [], [], [], [], [0]
    for sample in chosen:
        first = starts[-1] + len(sample.prompt_ids) - 1
        tokens += [sample.prompt_ids, sample.completion_ids[:-1]]
        positions.append(numpy.arange(sample.length))
        rows.append(numpy.array(sample.places) + first)
        targets.append(sample.drawn(sample.completion_ids))
        starts.append(starts[-1] + sample.length)
    return MicroBatch(
        samples=indices,
        token_ids_T=joined(tokens, numpy.int64, device),
        positions_T=on_device(numpy.concatenate(positions), device),
        starts=starts,
        rows_N=on_device(numpy.concatenate(rows), device),
        targets_N=joined(targets, numpy.int64, device),
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
    counts = [len(sample.places) for sample in samples]
    rounded = torch.tensor(values, dtype=torch.float32).numpy()
    return on_device(numpy.repeat(rounded, counts), device)


def spread(sample: TrainSample, values_D: Tensor) -> Tensor:
    """[C]: values of the drawn tokens at their places in the completion, 0 elsewhere."""
    if not sample.loss_mask:
        return values_D
    values_C = values_D.new_zeros(len(sample.completion_ids))
    values_C[list(sample.places)] = values_D
    return values_C


def concatenated(sequences: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """float32 [N]: values that are already one per drawn token."""
    return joined(sequences, numpy.float32, device)


def joined(sequences: Sequence[Sequence[Any]], dtype: type, device: torch.device) -> Tensor:
    """Sequences one behind the other."""
    count = sum(map(len, sequences))
    return on_device(numpy.fromiter(chain.from_iterable(sequences), dtype, count), device)


def on_device(values: numpy.ndarray, device: torch.device) -> Tensor:
    """A tensor there; a copy to a GPU is queued and does not wait for the work before it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def idle(device: torch.device) -> MicroBatch:
    """One token of no sample: what a rank runs in a round for which it has no micro-batch."""
    zero_1 = torch.zeros(1, dtype=torch.int64, device=device)
    ones_1 = torch.ones(1, device=device)
    return MicroBatch((), zero_1, zero_1, [0, 1], zero_1, zero_1, ones_1, [1])
