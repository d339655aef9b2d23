"""Sampling: Philox against its authors' vectors, the distribution drawn, and the edges of a row."""

from __future__ import annotations

import math

import pytest
import torch

from shared_ops.logprob.op import select_logprobs
from shared_ops.sample.key import request_key
from shared_ops.sample.op import draw, greedy
from shared_ops.sample.reference import gumbel, philox

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter and key, result.
KNOWN_ANSWERS = [
    ("0 0 0 0 0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (" ".join(["ffffffff"] * 6), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
INFINITY = float("inf")


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def drawn(logits_V: torch.Tensor, count: int, key=(1, 2)) -> torch.Tensor:
    """`count` draws from one row, at positions 0, 1, ..."""
    keys_B2 = torch.tensor([key]).expand(count, 2)
    return draw(logits_V.expand(count, -1), keys_B2, torch.arange(count))


@pytest.mark.parametrize(("given", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(given, result):
    c0, c1, c2, c3, k0, k1 = words(given)
    got = philox((c0, c1, c2, c3), (k0, k1))
    assert [f"{int(word):08x}" for word in got] == result.split()


def test_a_token_has_its_word_of_philox():
    keys_B2, positions_B = torch.tensor([[5, 6], [7, 8]]), torch.tensor([3, 90])
    noise_BV = gumbel(keys_B2, positions_B, 11)
    for row, token in ((0, 0), (0, 5), (1, 10)):
        counter = tuple(torch.tensor([x]) for x in (token // 4, int(positions_B[row]), 0, 0))
        key = tuple(keys_B2[row].split(1))
        word = int(philox(counter, key)[token % 4])
        wanted = -math.log(-math.log((word + 0.5) / 2**32))
        assert float(noise_BV[row, token]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("vocabulary", [2, 7, 33])
def test_frequencies_match_the_probabilities(vocabulary):
    """Chi-square: its mean is V - 1 and its variance 2 (V - 1); 5 deviations are allowed."""
    count = 120_000
    logits_V = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    tokens = drawn(logits_V, count)
    expected = logits_V.double().softmax(0) * count
    assert expected.min() > 5
    chi_square = ((tokens.bincount(minlength=vocabulary) - expected).square() / expected).sum()
    assert chi_square < vocabulary - 1 + 5 * math.sqrt(2 * (vocabulary - 1))


def test_the_frequency_check_sees_a_shift_of_one_percent():
    count = 120_000
    shifted = torch.tensor([0.51, 0.49]).log()
    expected = torch.tensor([0.5, 0.5]).double() * count
    seen = drawn(shifted, count).bincount(minlength=2)
    assert ((seen - expected).square() / expected).sum() > 1 + 5 * math.sqrt(2)


def test_successive_positions_and_keys_draw_independently():
    """Pairs of a fair coin: 4 cells, 3 degrees of freedom."""
    first, second = drawn(torch.zeros(2), 100_000), drawn(torch.zeros(2), 100_000, key=(1, 3))
    for a, b in ((first[:-1], first[1:]), (first, second)):
        seen = (2 * a + b).bincount(minlength=4).double()
        expected = len(a) / 4
        assert ((seen - expected).square() / expected).sum() < 3 + 5 * math.sqrt(6)


def test_members_of_a_group_have_their_own_keys():
    keys = {request_key(0, [1, 2, 3], sample) for sample in range(1000)}
    keys |= {request_key(seed, [1, 2, 3], 0) for seed in range(1, 1000)}
    keys |= {request_key(0, [1, 2, 3, extra], 0) for extra in range(1000)}
    assert len(keys) == 2999
    assert request_key(0, [12, 3], 0) != request_key(0, [1, 23], 0)
    assert all(0 <= word < 2**32 for key in keys for word in key)


def test_a_key_is_a_function_of_its_arguments():
    assert request_key(0, [1, 2, 3], 4) == request_key(0, (1, 2, 3), 4) == (841116463, 432307544)


def test_minus_infinity_is_never_drawn():
    logits_V = torch.full((50,), -INFINITY)
    logits_V[[7, 31]] = torch.tensor([0.0, -3.0])
    seen = drawn(logits_V, 5000).bincount(minlength=50)
    assert seen[7] > seen[31] > 0
    assert seen.sum() == seen[7] + seen[31]


def test_ties_go_to_the_lowest_index():
    logits_BV = torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -2.0, -1.0, -1.0]])
    assert greedy(logits_BV).tolist() == [1, 0, 0]
    huge_BV = torch.tensor([[0.0, 3e38, 3e38]])  # the noise is below half a unit in the last place
    assert draw(huge_BV, torch.tensor([[1, 2]]), torch.tensor([0])).tolist() == [1]


def test_a_row_with_nan_gives_no_token_and_spoils_no_other():
    logits_BV = torch.tensor([[0.0, 1.0, 9.0], [0.0, float("nan"), 9.0], [9.0, 1.0, 0.0]])
    keys_B2, positions_B = torch.tensor([[1, 2]] * 3), torch.zeros(3, dtype=torch.int64)
    assert greedy(logits_BV).tolist() == [2, 3, 0]
    assert select_logprobs(logits_BV, torch.tensor([2, 2, 0])).isnan().tolist() == [
        False,
        True,
        False,
    ]
    with_nan = draw(logits_BV, keys_B2, positions_B)
    assert with_nan[1] == 3
    clean = draw(logits_BV[[0, 2]], keys_B2[[0, 2]], positions_B[[0, 2]])
    assert with_nan[[0, 2]].tolist() == clean.tolist()
