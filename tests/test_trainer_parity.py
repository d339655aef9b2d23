"""Behaviour of the bit comparison: every kind of difference is seen, and measured right."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from trainer.parity import FirstDifference, ParityError, ParityReport, compare

VALUES = [-0.25, -1.5, -3.0, -0.0, -7.125]


def next_float(value: float, steps: int = 1) -> float:
    for _ in range(steps):
        value = float(np.nextafter(np.float32(value), np.float32(np.inf)))
    return value


def test_equal_bits_give_zero_everywhere():
    report = compare(VALUES, torch.tensor(VALUES))
    assert report == ParityReport(5, 0, 0, 0.0, None)


@pytest.mark.parametrize("steps", [1, 2, 1000])
def test_ulp_distance_counts_the_floats_between(steps):
    other = list(VALUES)
    other[2] = next_float(other[2], steps)
    report = compare(VALUES, torch.tensor(other))
    assert (report.tokens_differing, report.max_ulp, report.first) == (1, steps, 2)
    assert report.kl > 0


def test_zeros_of_other_sign_differ_by_one():
    report = compare([-0.0, 1.0], torch.tensor([0.0, 1.0]))
    assert (report.tokens_differing, report.max_ulp, report.first) == (1, 1, 0)


def test_ulp_distance_crosses_zero():
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    assert compare([-smallest], torch.tensor([smallest])).max_ulp == 3


@pytest.mark.parametrize("both", [True, False])
def test_nan_differs_even_from_itself(both):
    own = torch.tensor([-1.0, math.nan if both else -2.0])
    report = compare([-1.0, math.nan], own)
    assert (report.tokens_differing, report.first) == (1, 1)


def test_kl_is_the_mean_of_k3():
    sampler, trainer = [-1.0, -2.0, -0.5], [-1.25, -1.5, -0.5]
    expected = np.mean([math.exp(b - a) - (b - a) - 1 for a, b in zip(sampler, trainer)])  # noqa: B905
    assert compare(sampler, torch.tensor(trainer)).kl == pytest.approx(expected, rel=1e-12)


def test_nothing_compared_is_reported_as_such():
    assert compare([], torch.empty(0)).tokens_compared == 0


def test_lengths_and_dtypes_must_agree():
    with pytest.raises(ValueError, match="one value per token"):
        compare(VALUES[:-1], torch.tensor(VALUES))
    with pytest.raises(ValueError, match="compare float32"):
        compare(VALUES, torch.tensor(VALUES).double())


def test_the_error_names_the_token_and_travels_between_processes():
    first = FirstDifference(3, 7, "request-9", 42, -0.5, -0.25, 8388608)
    error = ParityError(ParityReport(100, 2, 8388608, 0.1, None), first).with_op("layer 1: rope")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.first == error.first and copy.report == error.report
    for part in ("2 of 100", "'request-9'", "position 7", "token 42", "-0.25", "layer 1: rope"):
        assert part in str(copy)
    assert "\n" not in str(copy)
