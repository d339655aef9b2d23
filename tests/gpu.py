"""What the GPU tests share. Kernels are imported inside tests: no triton on a CPU machine."""

from __future__ import annotations

import importlib
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from shared_ops.attention.op import PagedLayout

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def module(name: str) -> ModuleType:
    return importlib.import_module(f"shared_ops.{name}")


def prove_library(depth: int, columns: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Attest one product, so that the library may be chosen for it."""
    attest_cuda, products = module("attest_cuda"), module("products")
    shape = products.Shape(depth, columns, dtype, out_dtype)
    libraries = [attest_cuda._library(attest_cuda._Prover(0), shape)]
    attest_cuda._apply({"libraries": libraries, "dropped_tiles": []}, dtype)
    chosen = [products.choose(rows, shape) for rows in (1, 1000, 1500)]
    assert None in chosen, "the library is never chosen: the test would not try it"


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def same_bits(got: Tensor, wanted: Tensor) -> int:
    """Assert equal bits (a NaN fails) and return how many values were compared."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.numel() > 0
    assert not got.isnan().any(), "an element is NaN: unwritten, or a broken kernel"
    assert torch.equal(got, wanted), f"{int((got != wanted).sum())} of {got.numel()} values differ"
    return got.numel()


def pages_of(k_TKE: Tensor, v_TKE: Tensor, starts: list[int], page_size: int):
    """The same keys and values in shuffled pages; unused slots hold NaN."""
    lens = [end - start for start, end in pairwise(starts)]
    counts = [-(-length // page_size) for length in lens]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    shape = (sum(counts) + 2, page_size, *k_TKE.shape[1:])
    k_pages, v_pages = (torch.full(shape, float("nan")).to(k_TKE) for _ in range(2))
    table_BP = torch.zeros(len(lens), max(counts), dtype=torch.int64)
    for row, (start, length, count) in enumerate(zip(starts, lens, counts, strict=False)):
        chosen = [order.pop() for _ in range(count)]
        table_BP[row, :count] = torch.tensor(chosen)
        for pages, source in ((k_pages, k_TKE), (v_pages, v_TKE)):
            padded = torch.full((count * page_size, *source.shape[1:]), float("nan")).to(source)
            padded[:length] = source[start : start + length]
            pages[chosen] = padded.view(count, page_size, *source.shape[1:])
    return k_pages, v_pages, table_BP.cuda()


def layout_of(lens: list[int], contexts: list[int], table_BP: Tensor) -> PagedLayout:
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    return PagedLayout(starts, contexts, table_BP)
