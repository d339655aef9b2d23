"""Bits: products on a CPU are chains in blocks, whichever schedule computes them."""

from __future__ import annotations

import pytest
import torch
from bits import THREAD_COUNTS, differing, threads

from shared_ops import cpu_products
from shared_ops.chain import chain
from shared_ops.cpu_products import K_BLOCK, Call, batched_product, proof
from shared_ops.primitives import fixed_product, row_sum, token_product, token_sum

SIZES = [(1, 7, 5), (3, 300, 2), (17, 576, 24), (70, 400, 130), (600, 10, 10)]


def operand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_blocks(x_MK: torch.Tensor, w_KN: torch.Tensor) -> torch.Tensor:
    """The contract, spelled out."""
    blocks = zip(x_MK.split(K_BLOCK, 1), w_KN.split(K_BLOCK), strict=True)
    parts = [chain(x[None].contiguous(), w[None].contiguous())[0] for x, w in blocks]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def in_lanes(x_MK: torch.Tensor) -> torch.Tensor:
    """The contract of a sum without factors: chains of every sixteenth element, added in halves."""
    missing = -x_MK.shape[1] % 16
    dealt_MIL = torch.nn.functional.pad(x_MK, (0, missing)).unflatten(1, (-1, 16))
    lanes_ML = torch.zeros_like(dealt_MIL[:, 0])
    for block_MIL in dealt_MIL.split(K_BLOCK // 16, 1):
        part_ML = torch.zeros_like(lanes_ML)
        for place in range(block_MIL.shape[1]):
            part_ML = part_ML + block_MIL[:, place]
        lanes_ML = lanes_ML + part_ML
    for half in (8, 4, 2, 1):
        lanes_ML = lanes_ML[:, :half] + lanes_ML[:, half:]
    return lanes_ML


@pytest.fixture
def forgetful(monkeypatch):
    """What this process has found out does not count, and nothing is kept."""
    monkeypatch.setattr(cpu_products, "_found", {})
    monkeypatch.setattr(cpu_products, "_chosen", {})


@pytest.mark.parametrize("count", sorted({1, 2, 3, 4, 8, *THREAD_COUNTS}))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_chains(sizes, count):
    rows, width, outputs = sizes
    x_MK, w_NK = operand(rows, width, seed=1), operand(outputs, width, seed=2)
    wanted = in_blocks(x_MK, w_NK.T)
    with threads(count):
        assert differing(fixed_product(x_MK, w_NK.T), wanted) == 0
        assert differing(fixed_product(x_MK, w_NK.T.contiguous()), wanted) == 0
        assert differing(token_product(x_MK.T.contiguous(), w_NK.T.contiguous()), wanted) == 0
        sums = in_lanes(x_MK)
        assert differing(row_sum(x_MK), sums) == 0
        assert differing(token_sum(x_MK.T.contiguous()), sums[:, 0]) == 0


@pytest.mark.parametrize("name", ["BLAS", "ONEDNN", "PLAIN"])
def test_every_schedule_gives_the_same_bits_where_it_may_run(forgetful, monkeypatch, name):
    schedule = getattr(cpu_products, name)
    shapes = [Call(batched, 64, 80, True, True, 1) for batched in (False, True)]
    if any(proof(schedule, call).differing for call in shapes):
        pytest.skip(f"{name} keeps to no chain on this processor and is not chosen")
    monkeypatch.setattr(cpu_products, "_schedule_for", lambda call: schedule)
    x_3MK, w_3KN = operand(3, 24, 50, seed=3), operand(3, 50, 75, seed=4)
    assert differing(batched_product(x_3MK, w_3KN), chain(x_3MK, w_3KN)) == 0
    wide_MK, wide_KN = operand(30, 500, seed=5), operand(500, 75, seed=6)
    assert differing(fixed_product(wide_MK, wide_KN), in_blocks(wide_MK, wide_KN)) == 0


def in_two_parts(x, w):
    half = x.shape[-1] // 2
    return x[..., :half] @ w[..., :half, :] + x[..., half:] @ w[..., half:, :]


FAULTS = {
    "in two parts": lambda x, w: in_two_parts(x, w),
    "few rows otherwise": lambda x, w: in_two_parts(x, w) if x.shape[-2] <= 16 else x @ w,
    "many rows otherwise": lambda x, w: in_two_parts(x, w) if x.shape[-2] > 80 else x @ w,
    "the last columns otherwise": lambda x, w: torch.cat(
        ((x @ w)[..., :-1], in_two_parts(x, w)[..., -1:]), -1
    ),
    "by where the data lies": lambda x, w: in_two_parts(x, w) if x.data_ptr() % 16 else x @ w,
    "less than the least normal number is 0": lambda x, w: torch.nn.functional.hardshrink(
        x @ w, 2.0**-126
    ),
    "NaN": lambda x, w: (x @ w).fill_(float("nan")),
}


@pytest.mark.parametrize("batched", [False, True], ids=["one", "batch"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_library_with_another_order_is_passed_over(forgetful, monkeypatch, fault, batched):
    """Control: what is compared before a schedule first runs sees every kind of it."""
    call = Call(batched, 64, 80, True, False, torch.get_num_threads())
    wrong = FAULTS[fault]
    broken = cpu_products.Schedule(
        "BLAS", lambda x, w, out: wrong(x, w) if out is None else out + wrong(x, w), wrong
    )
    monkeypatch.setattr(cpu_products, "BLAS", broken)
    assert proof(broken, call).differing > 0
    chosen = cpu_products.choose(call)
    assert chosen is not broken
    tried = cpu_products._found[call]
    assert tried[0].differing > 0 and tried[-1].schedule == chosen.name


def test_without_a_library_the_plain_schedule_runs_and_says_so(forgetful, monkeypatch):
    for name in ("BLAS", "ONEDNN"):
        schedule = getattr(cpu_products, name)
        wrong = schedule._replace(add=lambda x, w, out: in_two_parts(x, w), batch=in_two_parts)
        monkeypatch.setattr(cpu_products, name, wrong)
    cpu_products._warn_of_plain.cache_clear()
    x_MK, w_KN = operand(5, 300, seed=7), operand(300, 9, seed=8)
    with pytest.warns(UserWarning, match="50 to 100 times as long: use a processor with"):
        got = fixed_product(x_MK, w_KN)
    assert differing(got, in_blocks(x_MK, w_KN)) == 0
    cpu_products._warn_of_plain.cache_clear()


def test_empty_sizes_give_zeros():
    assert fixed_product(torch.ones(0, 3), torch.ones(3, 4)).shape == (0, 4)
    assert fixed_product(torch.ones(2, 3), torch.ones(3, 0)).shape == (2, 0)
    assert torch.equal(fixed_product(torch.ones(2, 0), torch.ones(0, 4)), torch.zeros(2, 4))
