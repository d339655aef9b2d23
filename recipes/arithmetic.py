"""Sums, differences and products of two small numbers: a task that a model of 0.1 B can learn.

The questions are all those of the ranges below, each once; a hash puts one fifth of them in test
and the rest in train, and gives their order. No file, no state, no random generator.
"""

import hashlib

SPLITS = ("train", "test")
LARGEST_TERM, FACTORS = 20, (2, 9)
TEST_SHARE = 5


def problems(split: str) -> list[dict[str, str]]:
    """All problems of a split, always in the same order: 537 of train, 137 of test.

    Each is {"question": "What is 9 + 5?", "answer": the sum worked out, then `#### N`, N >= 0}.
    Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, use 'train' or 'test'")
    order = sorted((_number(sum_), sum_, result) for sum_, result in _sums().items())
    return [
        {"question": f"What is {sum_}?", "answer": f"{sum_} = {result}\n#### {result}"}
        for number, sum_, result in order
        if (number % TEST_SHARE == 0) == (split == "test")
    ]


def _sums() -> dict[str, int]:
    """Every sum, difference and product as it is written, with its result."""
    terms, factors = range(1, LARGEST_TERM + 1), range(FACTORS[0], FACTORS[1] + 1)
    plus = {f"{a} + {b}": a + b for a in terms for b in terms}
    minus = {f"{a} - {b}": a - b for a in terms for b in terms if a >= b}
    times = {f"{a} x {b}": a * b for a in factors for b in factors}
    return plus | minus | times


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
