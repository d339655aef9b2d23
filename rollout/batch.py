"""From a plan to the arrays of one forward: packed, without padding."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from rollout.params import SamplingParams
from rollout.request import Sample
from rollout.scheduler import PlanRow, StepPlan
from shared_ops.attention.op import PagedLayout
from shared_ops.logprob.restricted import Bias

NUMPY_TYPE = numpy.int64


class Filters(NamedTuple):
    """Of each row: top_k_B int64, top_p_B and min_p_B float64; is_on_B bool, where any is set."""

    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    is_on_B: Tensor


class Draws(NamedTuple):
    """What a draw depends on besides the logits; one entry for each row that draws.

    keys_B2: int64 words; positions_B: int64 index of the drawn token in prompt + completion;
    temperature_B: float32, 1 where greedy; greedy_B: bool; filters: None where no row has any;
    bias: None where no row has any.
    """

    keys_B2: Tensor
    positions_B: Tensor
    temperature_B: Tensor
    greedy_B: Tensor
    all_greedy: bool
    any_greedy: bool
    filters: Filters | None
    bias: Bias | None = None


class Batch(NamedTuple):
    """One packed forward.

    token_ids_T, positions_T, slots_T: int64; slot = page * page_size + offset, where the KV of the
    token goes. last_B: int64 index into T of each token after which one is drawn.

    Example: a chunk [5, 6] at positions 2, 3 beside one token 9 at position 4, page size 4, pages
    [7] and [1, 3]: token_ids_T [5, 6, 9], positions_T [2, 3, 4], slots_T [30, 31, 12],
    layout.query_starts [0, 2, 3], layout.context_lens [4, 5].
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    layout: PagedLayout
    last_B: Tensor
    draws: Draws


def build_batch(plan: StepPlan, page_size: int, device: torch.device) -> Batch:
    """Lay a plan with at least one row out in arrays."""
    rows = plan.rows
    starts_B = numpy.array([row.start for row in rows], dtype=NUMPY_TYPE)
    counts_B = numpy.array([row.count for row in rows], dtype=NUMPY_TYPE)
    ends_B = numpy.cumsum(counts_B)
    row_of_T = numpy.repeat(numpy.arange(len(rows)), counts_B)
    positions_T = numpy.arange(ends_B[-1]) + (starts_B - ends_B + counts_B)[row_of_T]
    table_BP = page_table([row.sample for row in rows])
    pages_T = table_BP[row_of_T, positions_T // page_size]
    drawing = [index for index, row in enumerate(rows) if row.draws]
    layout = PagedLayout(
        query_starts=[0, *ends_B.tolist()],
        context_lens=(starts_B + counts_B).tolist(),
        page_table_BP=_tensor(table_BP, device),
        kept={},
    )
    return Batch(
        token_ids_T=_tensor(_token_ids(rows), device),
        positions_T=_tensor(positions_T, device),
        slots_T=_tensor(pages_T * page_size + positions_T % page_size, device),
        layout=layout,
        last_B=_tensor(ends_B[drawing] - 1, device),
        draws=_draws([rows[index].sample for index in drawing], device),
    )


def page_table(samples: list[Sample]) -> numpy.ndarray:
    """[B, P] page of each sample's positions, filled up with page 0."""
    lens_B = numpy.array([len(sample.pages) for sample in samples])
    table_BP = numpy.zeros((len(samples), lens_B.max()), dtype=NUMPY_TYPE)
    filled_BP = numpy.arange(table_BP.shape[1]) < lens_B[:, None]
    table_BP[filled_BP] = _joined([sample.pages for sample in samples])
    return table_BP


def _token_ids(rows: tuple[PlanRow, ...]) -> numpy.ndarray:
    return _joined([row.sample.tokens[row.start : row.start + row.count] for row in rows])


def _joined(arrays: list[array]) -> numpy.ndarray:
    return numpy.frombuffer(bytearray().join(arrays), dtype=NUMPY_TYPE)


def _draws(samples: list[Sample], device: torch.device) -> Draws:
    params = [sample.request.params for sample in samples]
    temperatures = numpy.array([one.temperature for one in params], dtype=numpy.float32)
    greedy = temperatures == 0
    keys = numpy.array([sample.key for sample in samples], dtype=NUMPY_TYPE).reshape(-1, 2)
    positions = numpy.array([len(sample.tokens) for sample in samples], dtype=NUMPY_TYPE)
    return Draws(
        keys_B2=_tensor(keys, device),
        positions_B=_tensor(positions, device),
        temperature_B=_tensor(numpy.where(greedy, numpy.float32(1), temperatures), device),
        greedy_B=_tensor(greedy, device),
        all_greedy=bool(greedy.all()),
        any_greedy=bool(greedy.any()),
        filters=_filters(params, device),
        bias=_bias(samples, device),
    )


def _filters(params: list[SamplingParams], device: torch.device) -> Filters | None:
    if not any(one.filters for one in params):
        return None
    return Filters(
        _tensor(numpy.array([one.top_k for one in params], dtype=NUMPY_TYPE), device),
        _tensor(numpy.array([one.top_p for one in params], dtype=numpy.float64), device),
        _tensor(numpy.array([one.min_p for one in params], dtype=numpy.float64), device),
        _tensor(numpy.array([one.filters for one in params]), device),
    )


def _bias(samples: list[Sample], device: torch.device) -> Bias | None:
    entries = [
        (row, token, bias)
        for row, sample in enumerate(samples)
        if sample.request.params.biases
        for token, bias in sample.request.biases_at(len(sample.logprobs))
    ]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return Bias(
        _tensor(numpy.array(rows, dtype=NUMPY_TYPE), device),
        _tensor(numpy.array(tokens, dtype=NUMPY_TYPE), device),
        _tensor(numpy.array(values, dtype=numpy.float32), device),
    )


def _tensor(values: numpy.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
