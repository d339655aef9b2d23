"""Bits: the plain schedule is a chain of fused multiply-adds, rounded once a term."""

from __future__ import annotations

from fractions import Fraction

import numpy
import pytest
import torch
from bits import differing, differing_in_control

from shared_ops import chain as chain_module
from shared_ops.chain import chain

LEAST, TINY = 2.0**-149, 2.0**-75


def to_float32(value: Fraction) -> numpy.float32:
    """The nearest float32, of two as near the one whose last bit is zero."""
    near = numpy.float32(float(value))
    candidates = (near, *(numpy.nextafter(near, numpy.float32(end)) for end in ("inf", "-inf")))

    def distance(one: numpy.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(one)) - value), int(one.view(numpy.uint32)) & 1

    return min(candidates, key=distance)


def by_definition(x_K: list[float], w_K: list[float]) -> float:
    total = numpy.float32(0)
    for x, w in zip(x_K, w_K, strict=True):
        total = to_float32(Fraction(x) * Fraction(w) + Fraction(float(total)))
    return float(total)


def compared(x_MK: torch.Tensor, w_KN: torch.Tensor) -> int:
    got_MN = chain(x_MK[None], w_KN[None])[0]
    rows, columns = x_MK.tolist(), w_KN.T.tolist()
    wanted_MN = torch.tensor([[by_definition(x_K, w_K) for w_K in columns] for x_K in rows])
    assert differing(got_MN, wanted_MN) == 0
    return wanted_MN.numel()


@pytest.mark.parametrize("scale", [1.0, 2.0**-70, 2.0**-74, 2.0**60], ids=str)
def test_random_operands_of_every_size(scale):
    generator = torch.Generator().manual_seed(3)
    x_MK = torch.randn((6, 40), generator=generator) * scale
    w_KN = torch.randn((40, 7), generator=generator) * (scale if scale < 1 else 1.0)
    assert compared(x_MK, w_KN) == 42


def test_sums_that_two_roundings_would_get_wrong():
    """1 + 2^-23 plus a half unit in the last place, less a little: down, where the float64 sum lies
    in the middle and rounds up; the same with the signs turned, and among the subnormals."""
    half_less = (2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23))
    x_MK = torch.tensor([[1 + 2.0**-23, half_less[0]], [-1 - 2.0**-23, -half_less[0]]])
    w_KN = torch.tensor([[1.0], [half_less[1]]])
    assert compared(x_MK, w_KN) == 2
    twice = (x_MK[:, :1].double() + x_MK[:, 1:].double() * w_KN[1].double()).float()
    wrong = differing_in_control(chain(x_MK[None], w_KN[None])[0], twice)
    assert wrong == 2, "the case has lost its point"
    subnormal = torch.tensor([[3 * LEAST, TINY * (1 + 2.0**-23)]])
    assert compared(subnormal, torch.tensor([[1.0], [TINY * (1 - 2.0**-23)]])) == 1


def test_passes_of_any_size_give_the_same_bits(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    x_XMK = torch.randn((2, 9, 33), generator=generator)
    w_XKN = torch.randn((2, 33, 21), generator=generator)
    whole = chain(x_XMK, w_XKN)
    for limit in (1, 8, 50):
        monkeypatch.setattr(chain_module, "PASS_LIMIT", limit)
        assert differing(chain(x_XMK, w_XKN), whole) == 0


def test_infinity_and_nan_pass_through():
    x_MK = torch.tensor([[1.0, float("inf")], [float("nan"), 1.0], [float("inf"), float("-inf")]])
    got = chain(x_MK[None], torch.ones(1, 2, 1))[0, :, 0]
    assert got[0] == float("inf") and got[1].isnan() and got[2].isnan()
