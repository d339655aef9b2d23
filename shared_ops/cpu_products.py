"""float32 products on a CPU in which every output is one chain of fused multiply-adds over K.

A chain depends on its own row and column only, so every kernel that keeps to it gives the same
bits, on any processor. Measured with torch 2.11 and 2.13 on x86, K <= 256, 1 to 4 threads:

* MKL keeps to the chain where it runs its AVX-512 kernels (16 rows and 3 columns or more; in a
  batch, 8 rows). Its AVX2 kernels, all that it has on many processors, sum in several parts, and
  in how many follows from the shape.
* oneDNN keeps to it with AVX2 as well, for 2 rows and 2 columns or more, unless the second operand
  has strided rows: then a slow plain loop runs, in another order. It takes 1.2 to 3 times as long.

So MKL runs where a check on the machine in use finds it in order, and oneDNN where it does not.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

K_LIMIT = 256
MIN_SIDE = 16


class Library(NamedTuple):
    """mm(x_MK, w_KN, out_MN or None) gives out + x @ w; bmm(x_XMK, w_XKN) gives x @ w."""

    mm: Callable[..., Tensor]
    bmm: Callable[..., Tensor]


def add_product(x_MK: Tensor, w_KN: Tensor, out_MN: Tensor | None = None) -> Tensor:
    """out + x @ w (x @ w without `out_MN`, which may be overwritten); K is at most `K_LIMIT`.

    Either operand may be a transposed view.
    """
    mm = library(torch.get_num_threads()).mm
    rows, columns = x_MK.shape[0], w_KN.shape[1]
    if min(rows, columns) >= MIN_SIDE:
        return mm(x_MK, w_KN, out_MN)
    x_MK = torch.nn.functional.pad(x_MK, (0, 0, 0, max(0, MIN_SIDE - rows)))
    w_KN = torch.nn.functional.pad(w_KN, (0, max(0, MIN_SIDE - columns)))
    product_MN = mm(x_MK, w_KN, None)[:rows, :columns]
    return product_MN.contiguous() if out_MN is None else out_MN.add_(product_MN)


def batched_product(x_XMK: Tensor, w_XKN: Tensor) -> Tensor:
    """float32 [X, M, N]: x @ w; K is at most 128, M is 8 or more."""
    return library(torch.get_num_threads()).bmm(x_XMK, w_XKN)


def _blas_mm(x_MK: Tensor, w_KN: Tensor, out_MN: Tensor | None) -> Tensor:
    return torch.mm(x_MK, w_KN) if out_MN is None else out_MN.addmm_(x_MK, w_KN)


def _onednn_mm(x_MK: Tensor, w_KN: Tensor, out_MN: Tensor | None) -> Tensor:
    w_NK = w_KN.T if w_KN.is_contiguous() else w_KN.T.contiguous()
    if out_MN is None:
        return torch.ops.mkldnn._linear_pointwise(x_MK, w_NK, None, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x_MK, out_MN, w_NK, None, "add")


def _onednn_bmm(x_XMK: Tensor, w_XKN: Tensor) -> Tensor:
    out_XMN = x_XMK.new_empty((*x_XMK.shape[:2], w_XKN.shape[2]))
    for out_MN, x_MK, w_KN in zip(out_XMN, x_XMK, w_XKN, strict=True):
        out_MN.copy_(_onednn_mm(x_MK, w_KN, None))
    return out_XMN


BLAS = Library(_blas_mm, torch.bmm)
ONEDNN = Library(_onednn_mm, _onednn_bmm)


@functools.cache
def library(threads: int) -> Library:
    """The library for this machine and thread count; torch's BLAS where neither is in order."""
    if in_order(BLAS) or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return BLAS
    return ONEDNN if in_order(ONEDNN) else BLAS


def in_order(candidate: Library) -> bool:
    """Whether products of many sizes, with every layout of the operands, are chains here."""
    x_2MK, w_2KN, chains = _chains()
    flipped_x, flipped_w = (t.mT.contiguous().mT for t in (x_2MK, w_2KN))
    layouts = ((x_2MK, w_2KN), (x_2MK, flipped_w), (flipped_x, w_2KN))
    sizes = itertools.product(chains, (8, 24, 64, 208), (8, 16, 57, 64, 80, 128), layouts)
    for k, rows, columns, (x, w) in sizes:
        x, w, wanted = x[:, :rows, :k], w[:, :k, :columns], chains[k][:, :rows, :columns]
        w = w.mT.contiguous().mT if w.stride(1) == 1 else w.contiguous()
        if k <= 128 and not torch.equal(candidate.bmm(x, w), wanted):
            return False
        if min(rows, columns) >= MIN_SIDE:
            start = torch.ones_like(wanted[0])
            if not torch.equal(candidate.mm(x[0], w[0], None), wanted[0]):
                return False
            if not torch.equal(candidate.mm(x[0], w[0], start), wanted[0] + 1):
                return False
    return True


@functools.cache
def _chains() -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Operands, and by K their products by definition: a float64 sum of a float32 and an exact
    product, rounded once more to float32, is a fused multiply-add (but for one case in 2^29)."""
    generator = torch.Generator().manual_seed(0)
    x_2MK, w_2KN = (
        torch.randint(-(1 << 20), 1 << 20, shape, generator=generator) / (1 << 19)
        for shape in ((2, 208, K_LIMIT), (2, K_LIMIT, 128))
    )
    total = torch.zeros(2, 208, 128)
    chains = {}
    for k in range(K_LIMIT):
        term = x_2MK[..., k : k + 1].double() * w_2KN[:, k : k + 1].double()
        total = term.add_(total).float()
        if k + 1 in (8, 40, 57, 64, 128, 200, K_LIMIT):
            chains[k + 1] = total
    return x_2MK, w_2KN, chains
