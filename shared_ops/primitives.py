"""Sums in a fixed order, in plain torch: the ground that every reference schedule stands on.

Every sum on a CPU is a product in the contract of `shared_ops.cpu_products`: chains of fused
multiply-adds in blocks, which depend on the summed values only. A sum without factors is a product
with ones and zeros that deals the elements out to 16 lanes, i to lane i mod 16, each summed in
increasing order; lanes are added in halves. What is left of an op is elementwise: +, -, * and / are
IEEE 754's, and square root, exp and log are those of `shared_ops.elementary`. sigmoid, silu, log1p
and sums of the library are used by no op: they may give an element other bits in a vector's tail
than in its body.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from shared_ops.cpu_products import product

ALIGNMENT = 64
# As many as the narrowest product has columns; they also keep rounding errors small.
LANES = 16
CACHED_VALUES = 1 << 17


def aligned(x: Tensor) -> Tensor:
    """The same values, contiguous and on a 64-byte boundary (vendor products may look at it)."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def by_rows(run: Callable[..., object], *tensors: Tensor) -> None:
    """Run an elementwise pass on equal rows of all tensors (the last is its output), as many at a
    time as a processor's cache holds with what is made of them."""
    rows, step = len(tensors[0]), CACHED_VALUES * len(tensors[0]) // max(1, tensors[0].numel())
    if rows <= step:
        run(*tensors)
        return
    for part in zip(*(x.split(max(1, step)) for x in tensors), strict=True):
        run(*part)


def fixed_product(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """float32 [M, N] = x @ w. A row's bits depend on that row and w only.

    Operands of lower precision are widened first, so that a bf16 product is the float32 product
    of the same values. Either may be a transposed view.
    """
    return product(x_MK.float(), w_KN.float())


def token_product(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    """float32 [N, K] = dy^T @ x: a sum over tokens, in increasing order."""
    return product(dy_TN.float().T, x_TK.float())


def row_sum(x_RN: Tensor) -> Tensor:
    """float32 [..., 1]: the sum over the last axis, each row by itself. CUDA: torch's."""
    if x_RN.is_cuda:
        return x_RN.float().sum(-1, keepdim=True)
    flat_RN = x_RN.float().reshape(-1, x_RN.shape[-1])
    lanes_RL = product(flat_RN, _lanes(flat_RN.shape[1]))
    return _added(lanes_RL, -1).reshape(*x_RN.shape[:-1], 1)


def token_sum(x_TN: Tensor) -> Tensor:
    """float32 [N]: the sum over tokens."""
    return _added(product(_lanes(x_TN.shape[0]).T, x_TN.float()), 0)[0]


@functools.lru_cache(maxsize=64)
def _lanes(count: int) -> Tensor:
    """float32 [count, LANES]: 1 where the element belongs to the lane."""
    return torch.eye(LANES).repeat(-(-count // LANES), 1)[:count]


def _added(lanes: Tensor, axis: int) -> Tensor:
    """The lanes along an axis, which keeps length 1: first half plus second, until one is left."""
    while lanes.shape[axis] > 1:
        first, second = lanes.chunk(2, axis)
        lanes = first + second
    return lanes
