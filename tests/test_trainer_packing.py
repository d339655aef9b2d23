"""Behaviour of packing: every token once, nothing padded, a pure function of the samples."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer import TrainSample
from trainer.packing import pack, split_samples


def sample(prompt: list[int], completion: list[int], temperature: float = 1.0) -> TrainSample:
    values, versions = [-1.0] * len(completion), [0] * len(completion)
    return TrainSample(prompt, completion, values, 1.0, versions, temperature)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_every_sample_is_in_one_micro_batch_in_order_and_within_the_budget(lengths, budget):
    batches = split_samples(lengths, budget)
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[index] for index in batch) <= budget or len(batch) == 1
    assert split_samples(list(lengths), budget) == batches


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_a_micro_batch_ends_only_where_the_next_sample_does_not_fit(lengths, budget):
    batches = split_samples(lengths, budget)
    for batch, following in pairwise(batches):
        assert sum(lengths[index] for index in batch) + lengths[following[0]] > budget


def test_the_layout_of_the_docstring():
    samples = [sample([1], [2]), sample([5, 9], [7, 2], 0.5), sample([4], [6], 0.0)]
    batch = pack(samples, (1, 2), torch.device("cpu"))
    assert batch.token_ids_T.tolist() == [5, 9, 7, 4]
    assert batch.positions_T.tolist() == [0, 1, 2, 0]
    assert batch.starts == [0, 3, 4]
    assert batch.rows_N.tolist() == [1, 2, 3]
    assert batch.targets_N.tolist() == [7, 2, 6]
    assert batch.temperature_N.tolist() == [0.5, 0.5, 1.0]
    assert batch.lengths == [2, 1]
