"""Bits and accuracy of the plain exp and log, and which of them run."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from bits import differing, threads

from shared_ops import elementary

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def nothing_in_plain_use(monkeypatch):
    monkeypatch.setattr(elementary, "_plain", set())


def values(count: int, scale: float) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1)) * scale


PLAIN = {
    "exp": (elementary.plain_exp, torch.exp, values(200_003, 25.0)),
    "log": (elementary.plain_log, torch.log, values(200_003, 1e3).abs() ** 5),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_functions_are_within_half_a_unit_in_the_last_place(name):
    plain, library, x_N = PLAIN[name]
    exact_N = library(x_N.double())
    got_N = plain(x_N)
    unit_N = torch.nextafter(got_N.abs(), torch.tensor(INF)) - got_N.abs()
    finite = got_N.isfinite() & (got_N != 0)
    error_N = ((got_N.double() - exact_N).abs() / unit_N)[finite]
    assert len(error_N) > 190_000 and error_N.max() <= 0.501


@pytest.mark.parametrize("name", PLAIN)
def test_plain_functions_give_an_element_the_same_bits_anywhere(name):
    plain, _, x_N = PLAIN[name]
    wanted = plain(x_N)
    for count in (1, 3):
        with threads(count):
            for first, length in ((0, 1), (1, 5), (7, 1000), (3, 70_001)):
                span = slice(first, first + length)
                assert differing(plain(x_N[span].clone()), wanted[span]) == 0


def test_the_ends_of_the_range():
    x = torch.tensor([-1000.0, -103.9, -90.0, 0.0, 88.72, 89.0, INF, -INF])
    assert torch.equal(elementary.plain_exp(x), torch.exp(x.double()).float())
    x = torch.tensor([0.0, 2.0**-149, 1.0, 3e38, INF])
    assert torch.equal(elementary.plain_log(x), torch.log(x.double()).float())
    bad = torch.tensor([NAN, -1.0, -INF])
    assert elementary.plain_log(bad).isnan().all()
    assert elementary.plain_exp(torch.tensor([NAN])).isnan().all()


def test_square_root_is_rounded_once():
    x_N = torch.cat((values(100_003, 1e5).abs(), values(1000, 2.0**-140).abs()))
    wanted_N = torch.from_numpy(numpy.sqrt(x_N.numpy()))
    assert differing(elementary.square_root(x_N), wanted_N) == 0
    assert elementary.square_root(torch.tensor([2.0])).item() == float(
        numpy.float32(math.sqrt(2.0))
    )


def test_use_plain_turns_the_named_function_only():
    x_N = values(1000, 10.0).abs() + 0.1
    elementary.use_plain(["exp"])
    assert elementary.in_plain_use() == {"exp"}
    assert torch.equal(elementary.exp(x_N), elementary.plain_exp(x_N))
    assert torch.equal(elementary.log(x_N), torch.log(x_N))
    elementary.use_plain(["log", "log of float64"])
    assert torch.equal(elementary.log(x_N), elementary.plain_log(x_N))
    wide_N = x_N.double()
    assert torch.allclose(elementary.log_of_float64(wide_N), torch.log(wide_N), rtol=1e-15)


def test_an_unknown_function_is_refused():
    with pytest.raises(ValueError, match="'sine' has no plain schedule: use one of exp, log"):
        elementary.use_plain(["sine"])
