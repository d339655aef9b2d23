# pyright: reportMissingImports=false
"""Kernels that start while the one before them still runs (programmatic dependent launch).

A kernel launched with `options` may be resident before its predecessor on the stream is done. It
first lets its own successor start, then, having touched nothing but constants, waits until all
that came before is complete and visible. As every such kernel waits, a kernel that is done has all
its predecessors done. No value and no order of a sum depends on it. Needs sm_90.

`fetch` asks for weights to be brought into the L2 cache meanwhile. It reads no value, so a weight
that is being replaced is not seen half-way.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MIN_CAPABILITY = (9, 0)
LINE = 128
FETCHED = 1 << 24


@functools.cache
def options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch of a kernel that calls `begin` (or `release` and `wait`)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return {"OVERLAP": 0}
    return {"OVERLAP": 1, "launch_pdl": True}


def fetched_depth(columns: int, depth: int, itemsize: int) -> int:
    """How many values of each of `columns` rows of weights to fetch: FETCHED bytes in all."""
    most = FETCHED // (columns * itemsize)
    wanted = 1 << (min(depth, most).bit_length() - 1) if most else 0
    return wanted if wanted * itemsize >= LINE else 0


@triton.jit
def release(OVERLAP: tl.constexpr):
    """Let the next kernel start."""
    if OVERLAP & 2:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Before this nothing is read that a kernel writes, and nothing is written."""
    if OVERLAP & 1:
        gdc_wait()


@triton.jit
def begin(OVERLAP: tl.constexpr):
    release(OVERLAP)
    wait(OVERLAP)


@triton.jit
def fetch(row_ptrs, DEPTH: tl.constexpr, ITEMSIZE: tl.constexpr, OVERLAP: tl.constexpr):
    """Bring the first DEPTH weights (0: none) of each row into the L2 cache."""
    if (OVERLAP & 4) and DEPTH > 0:
        at = tl.arange(0, DEPTH * ITEMSIZE // 128) * (128 // ITEMSIZE)
        ptrs = (row_ptrs[:, None] + at[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
