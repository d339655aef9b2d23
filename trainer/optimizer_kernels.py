# pyright: reportMissingImports=false, reportIndexIssue=false
"""The optimiser's work on CUDA: every tensor in one launch.

A table on the device holds the addresses of each tensor and what belongs to it; a program takes one
block of one tensor. Fused multiply-add is off and division and square root are rounded, so an
element has the bits of `trainer.optimizer`'s plain torch ops. A block's squares are added in the
order of one register layout: addresses come out of a table, so the compiler knows of no alignment
that it could follow.
"""

import functools
from collections.abc import Sequence

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
COLUMNS = tl.constexpr(7)


@functools.lru_cache(maxsize=64)
def _blocks(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [blocks, 2]: (tensor, block in it)."""
    blocks_L = numpy.array([triton.cdiv(count, BLOCK) for count in counts])
    tensor_B = numpy.repeat(numpy.arange(len(counts)), blocks_L)
    first_B = numpy.repeat(blocks_L.cumsum() - blocks_L, blocks_L)
    table_B2 = numpy.stack((tensor_B, numpy.arange(len(tensor_B)) - first_B), 1)
    return torch.from_numpy(table_B2.astype(numpy.int32)).to(device)


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """float64 [blocks]: the sum of squares of each block of each float32 tensor, in order."""
    tensors = [tensor.contiguous() for tensor in tensors]
    device = tensors[0].device
    blocks_B2 = _blocks(tuple(tensor.numel() for tensor in tensors), device)
    table_L2 = torch.tensor([(x.data_ptr(), x.numel()) for x in tensors], device=device)
    sums_B = torch.empty(len(blocks_B2), dtype=torch.float64, device=device)
    if len(blocks_B2):
        _square_sums[(len(blocks_B2),)](table_L2, blocks_B2, sums_B, BLOCK=BLOCK, num_warps=4)
    return sums_B


def adamw(
    leaves: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]],
    decays: Sequence[bool],
    numbers: Sequence[float],
) -> None:
    """One step of AdamW, in place.

    Args:
        leaves: of each: master, gradient, first and second moment, float32 of one shape, and what
            takes the master's value over in its own dtype, or None; all have one or none, and all
            but the gradients are contiguous.
        decays: whether the leaf is multiplied by what its decay keeps.
        numbers: as `trainer.optimizer.Numbers`; each is rounded to float32.
    """
    device, copy = leaves[0][0].device, leaves[0][4]
    gradients = [each[1].contiguous() for each in leaves]
    rows = []
    for (master, _, *others), gradient, decay in zip(leaves, gradients, decays, strict=True):
        each = (master, gradient, *others)
        assert all(x is None or x.is_contiguous() for x in each)
        rows.append((*(x.data_ptr() if x is not None else 0 for x in each), master.numel(), decay))
    blocks_B2 = _blocks(tuple(each[0].numel() for each in leaves), device)
    _adamw[(len(blocks_B2),)](
        torch.tensor(rows, device=device), blocks_B2, leaves[0][0] if copy is None else copy,
        *map(float, numbers), COPIES=copy is not None, BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _block(blocks_ptr, BLOCK: tl.constexpr):
    """The program's tensor, and the elements that it takes."""
    tensor = tl.load(blocks_ptr + 2 * tl.program_id(0))
    block = tl.load(blocks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    return tensor, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _square_sums(table_ptr, blocks_ptr, sums_ptr, BLOCK: tl.constexpr):
    tensor, i = _block(blocks_ptr, BLOCK)
    x_ptr = tl.load(table_ptr + 2 * tensor).to(tl.pointer_type(tl.float32))
    count = tl.load(table_ptr + 2 * tensor + 1)
    x = tl.load(x_ptr + i, mask=i < count, other=0.0).to(tl.float64)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def _adamw(
    table_ptr,
    blocks_ptr,
    copy_ptr,
    scale,
    beta1,
    rest1,
    beta2,
    rest2,
    keep,
    correction2,
    epsilon,
    rate,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, i = _block(blocks_ptr, BLOCK)
    row = table_ptr + COLUMNS * tensor
    master_ptrs = tl.load(row).to(tl.pointer_type(tl.float32)) + i
    gradient_ptrs = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + i
    first_ptrs = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + i
    second_ptrs = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + i
    inside = i < tl.load(row + 5)
    decays = tl.load(row + 6) != 0
    gradient = tl.load(gradient_ptrs, mask=inside, other=0.0) * scale
    second = tl.load(second_ptrs, mask=inside, other=0.0) * beta2 + (gradient * gradient) * rest2
    first = tl.load(first_ptrs, mask=inside, other=0.0) * beta1 + gradient * rest1
    master = tl.load(master_ptrs, mask=inside, other=0.0)
    master = tl.where(decays, master * keep, master)
    divisor = tl.sqrt_rn(tl.div_rn(second, correction2)) + epsilon
    master -= tl.div_rn(first * rate, divisor)
    tl.store(second_ptrs, second, mask=inside)
    tl.store(first_ptrs, first, mask=inside)
    tl.store(master_ptrs, master, mask=inside)
    if COPIES:
        copy_ptrs = tl.load(row + 4).to(copy_ptr.dtype) + i
        tl.store(copy_ptrs, master.to(copy_ptr.dtype.element_ty), mask=inside)
