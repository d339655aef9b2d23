"""Bits: products on a CPU are chains of fused multiply-adds, whichever library computes them."""

from __future__ import annotations

import pytest
import torch
from bits import THREAD_COUNTS, differing, threads

from shared_ops import cpu_products
from shared_ops.cpu_products import add_product, batched_product
from shared_ops.primitives import fixed_product, token_product


def operand(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 20), 1 << 20, shape, generator=generator) / (1 << 19)


def chain(x_MK: torch.Tensor, w_KN: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    for k in range(x_MK.shape[1]):
        start = (start.double() + x_MK[:, k : k + 1].double() * w_KN[k].double()).float()
    return start


def in_blocks(x_MK: torch.Tensor, w_KN: torch.Tensor) -> torch.Tensor:
    zeros_MN = torch.zeros(x_MK.shape[0], w_KN.shape[1])
    blocks = zip(x_MK.split(256, 1), w_KN.split(256), strict=True)
    return sum((chain(x, w, zeros_MN) for x, w in blocks), zeros_MN)


@pytest.mark.parametrize("count", sorted({4, *THREAD_COUNTS}))
@pytest.mark.parametrize(
    "sizes", [(1, 57, 1), (3, 300, 2), (17, 576, 57), (70, 1000, 130)], ids=str
)
def test_products_are_chains(sizes, count):
    rows, width, outputs = sizes
    x_MK, w_NK = operand(rows, width, seed=1), operand(outputs, width, seed=2)
    wanted = in_blocks(x_MK, w_NK.T)
    with threads(count):
        assert differing(fixed_product(x_MK, w_NK.T), wanted) == 0
        assert differing(fixed_product(x_MK, w_NK.T.contiguous()), wanted) == 0
        assert differing(token_product(x_MK.T.contiguous(), w_NK.T.contiguous()), wanted) == 0


@pytest.mark.parametrize("name", ["BLAS", "ONEDNN"])
def test_either_library_gives_the_same_bits_where_it_is_chosen(monkeypatch, name):
    candidate = getattr(cpu_products, name)
    if not cpu_products.in_order(candidate):
        pytest.skip(f"{name} keeps to no chain on this processor and is not chosen")
    monkeypatch.setattr(cpu_products, "library", lambda count: candidate)
    x_3MK, w_3KN = operand(3, 24, 64, seed=3), operand(3, 64, 80, seed=4)
    wanted = [chain(x, w, torch.zeros(24, 80)) for x, w in zip(x_3MK, w_3KN, strict=True)]
    assert differing(batched_product(x_3MK, w_3KN), torch.stack(wanted)) == 0
    first, onto = add_product(x_3MK[0], w_3KN[0]), wanted[1].clone()
    assert differing(first, wanted[0]) == 0
    assert differing(add_product(x_3MK[0], w_3KN[0], onto), wanted[1] + wanted[0]) == 0


def test_a_library_that_sums_in_two_parts_is_not_in_order():
    """Control: the check that chooses a library sees one that keeps to no chain."""

    def in_parts(x, w):
        half = x.shape[-1] // 2
        return x[..., :half] @ w[..., :half, :] + x[..., half:] @ w[..., half:, :]

    assert not cpu_products.in_order(cpu_products.BLAS._replace(bmm=in_parts))
    broken = cpu_products.BLAS._replace(mm=lambda x, w, out: in_parts(x, w))
    assert not cpu_products.in_order(broken)
