"""Sums in a fixed order, in plain torch: the ground that every reference schedule stands on.

Measured on x86, float32, 1 to 4 threads:

* A product of at most `K_BLOCK` values of K gives each row the same bits whatever the other rows,
  their number and the thread count are (`shared_ops.cpu_products`). With a longer K it does not:
  MKL cuts K between threads when there are few rows. So K is cut here, by us.
* `torch.sum` over the last axis gives each row the same bits for any row count of 2 or more. With
  one row and several threads it splits the row between threads.
* exp, log, sqrt and division do not depend on an element's place in the array. sigmoid, silu and
  log1p do (their vector and tail paths differ), so no op may use those.

`shared_ops.attest` repeats these measurements on the machine in use.
"""

import torch
from torch import Tensor

from shared_ops.cpu_products import K_LIMIT, add_product

K_BLOCK = K_LIMIT
ROW_TILE = 16
ALIGNMENT = 64


def aligned(x: Tensor) -> Tensor:
    """The same values, contiguous and on a 64-byte boundary (vendor products may look at it)."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def pad_rows(x_MK: Tensor, multiple: int) -> Tensor:
    """`x_MK` with zero rows appended up to a multiple of `multiple`."""
    missing = -x_MK.shape[0] % multiple
    return torch.nn.functional.pad(x_MK, (0, 0, 0, missing)) if missing else x_MK


def fixed_product(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """float32 [M, N] = x @ w, K in blocks of `K_BLOCK` added left to right.

    Operands of lower precision are widened first, so that a bf16 product is the float32 product
    of the same values. `w_KN` may be a transposed view.
    """
    rows = x_MK.shape[0]
    if rows == 0 or w_KN.shape[1] == 0:
        return x_MK.new_zeros((rows, w_KN.shape[1]), dtype=torch.float32)
    x_MK = aligned(pad_rows(x_MK.float(), ROW_TILE))
    w_KN = w_KN.float()
    out_MN = add_product(x_MK[:, :K_BLOCK], w_KN[:K_BLOCK])
    for start in range(K_BLOCK, x_MK.shape[1], K_BLOCK):
        block = slice(start, start + K_BLOCK)
        out_MN = add_product(x_MK[:, block], w_KN[block], out_MN)
    return out_MN[:rows]


def token_product(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    """float32 [N, K] = dy^T @ x, tokens in blocks of `K_BLOCK` added in increasing order."""
    dy_TN, x_TK = dy_TN.float(), x_TK.float()
    out_NK = add_product(dy_TN[:K_BLOCK].T, x_TK[:K_BLOCK])
    for start in range(K_BLOCK, x_TK.shape[0], K_BLOCK):
        block = slice(start, start + K_BLOCK)
        out_NK = add_product(dy_TN[block].T, x_TK[block], out_NK)
    return out_NK


def row_sum(x_RN: Tensor) -> Tensor:
    """float32 [..., 1]: the sum over the last axis, each row by itself."""
    flat_RN = x_RN.float().reshape(-1, x_RN.shape[-1])
    if flat_RN.shape[0] == 1:
        return flat_RN.expand(2, -1).contiguous().sum(-1)[:1].reshape(*x_RN.shape[:-1], 1)
    return flat_RN.contiguous().sum(-1).reshape(*x_RN.shape[:-1], 1)
