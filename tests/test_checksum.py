"""Bits of the checksum: every change is seen, and no chunk, view or alignment matters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared_ops.checksum.op import checksums, words_of
from shared_ops.checksum.reference import MODULUS, sums
from shared_ops.model.weights import digest_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)


def random_bytes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), generator=generator, dtype=torch.uint8)


def one(tensor: Tensor) -> tuple[int, int]:
    (found,) = checksums([tensor])
    return found


def by_hand(words: list[int]) -> tuple[int, int]:
    """The contract in Python's whole numbers."""
    low = high = 0
    for index, word in enumerate(words):
        x = (word + (index + 1) * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % MODULUS
        x = (x ^ x >> 32) * 0x94D049BB133111EB % MODULUS
        x ^= x >> 29
        low += x
        x = x * 0xD6E8FEB86659FD93 % MODULUS
        high += x ^ x >> 32
    return low % MODULUS, high % MODULUS


def words_by_hand(tensor: Tensor) -> list[int]:
    raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 8)
    return [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 255, 4096])
def test_it_is_what_the_contract_says(count):
    tensor_N = random_bytes(count)
    assert one(tensor_N) == by_hand(words_by_hand(tensor_N))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 700), st.integers(0, 99))
def test_no_chunk_matters(count, chunk, seed):
    words_W = words_of(random_bytes(8 * count, seed))
    assert sums(words_W, chunk) == sums(words_W, 2 * count)


def test_every_flipped_bit_changes_both_sums():
    tensor_N = random_bytes(8 * 40 + 3)
    before, seen = one(tensor_N), set()
    for byte in range(len(tensor_N)):
        for bit in range(8):
            tensor_N[byte] ^= 1 << bit
            after = one(tensor_N)
            assert after[0] != before[0] and after[1] != before[1]
            seen.add(after)
            tensor_N[byte] ^= 1 << bit
    assert len(seen) == 8 * len(tensor_N) and one(tensor_N) == before


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 199), st.integers(0, 199), st.integers(0, 63), st.integers(0, 63))
def test_two_flipped_bits_are_seen(first, second, bit, other):
    """Also signs of two weights, whose flips cancel in a sum of products with odd numbers."""
    words_W = words_of(random_bytes(1600))
    before = sums(words_W)
    words_W[first] ^= 1 << bit if bit < 63 else -(1 << 63)
    words_W[second] ^= 1 << other if other < 63 else -(1 << 63)
    assert (sums(words_W) == before) == ((first, bit) == (second, other))


def test_swaps_and_shifts_are_seen():
    words_W = words_of(random_bytes(800))
    swapped_W, doubled_W = words_W.clone(), torch.cat((words_W, words_W))
    swapped_W[[3, 77]] = words_W[[77, 3]]
    zeros_W = torch.zeros_like(words_W)
    variants = [words_W, swapped_W, words_W.roll(1), words_W.flip(0), doubled_W, zeros_W]
    variants += [zeros_W[:-1], torch.cat((zeros_W[:1], words_W)), torch.cat((words_W, zeros_W[:1]))]
    assert len({sums(each) for each in variants}) == len(variants)
    named = {"a": words_W, "b": swapped_W}
    assert digest_of(named) != digest_of({"a": swapped_W, "b": words_W})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_views_have_the_sums_of_their_copies(dtype, rows):
    """Rows at every alignment, columns, transposes, one value, none."""
    whole = random_bytes(9 * 11 * 8).view(dtype)
    whole = whole[: 9 * 11].view(9, 11)
    views = [whole[first : first + rows] for first in range(9 - rows)]
    views += [whole[:, 2:7], whole.T, whole[0, 3], whole[:0], whole[::2, ::3]]
    wanted = [by_hand(words_by_hand(view.clone().contiguous())) for view in views]
    assert checksums(views) == wanted and len(set(wanted)) == len(views)


def test_the_digest_sees_the_length_behind_the_padding():
    x = torch.zeros(3, dtype=torch.uint8)
    assert one(x) == one(torch.zeros(8, dtype=torch.uint8))
    assert digest_of({"a": x}) != digest_of({"a": torch.zeros(8, dtype=torch.uint8)})
