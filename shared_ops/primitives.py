"""Sums in a fixed order, in plain torch: the ground that every reference schedule stands on.

Every sum on a CPU is a product in the contract of `shared_ops.cpu_products`: chains of fused
multiply-adds in blocks, which depend on the summed values only. A sum without factors is a product
with ones. What is left of an op is elementwise: +, -, *, / and square root are IEEE 754's, and exp
and log are those of `shared_ops.elementary`. sigmoid, silu, log1p and sums of the library are used
by no op: they may give an element other bits in a vector's tail than in its body.
"""

import torch
from torch import Tensor

from shared_ops.cpu_products import product

ALIGNMENT = 64
# Columns of the ones that sums are products with: the narrowest product there is.
ONES = 16


def aligned(x: Tensor) -> Tensor:
    """The same values, contiguous and on a 64-byte boundary (vendor products may look at it)."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


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
    sums_RO = product(flat_RN, flat_RN.new_ones((flat_RN.shape[1], ONES)))
    return sums_RO[:, :1].reshape(*x_RN.shape[:-1], 1)


def token_sum(x_TN: Tensor) -> Tensor:
    """float32 [N]: the sum over tokens, in increasing order."""
    ones_OT = x_TN.new_ones((ONES, x_TN.shape[0]), dtype=torch.float32)
    return product(ones_OT, x_TN.float())[0]
