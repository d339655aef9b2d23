# pyright: reportMissingImports=false, reportIndexIssue=false
"""CUDA schedules of the product y[m, n] = sum_k x[m, k] w[n, k] (+ bias[n]).

Contract: K in increasing order, one float32 accumulator per output, no split of K; the bias is
added in float32; one rounding to the output's dtype. Measured on an H200: every Triton tile shape,
warp count, depth and operand order obeys it, `mma` and `wgmma` agree, and cuBLAS obeys it wherever
it does not split K. So which schedule runs is a matter of speed alone: large products and short K
belong to the vendor library, small ones with a long K to Triton tiles, operands swapped so that
the few tokens are the short side of the tensor core instruction.

When cuBLAS splits K follows no simple rule (12288 -> 4096 does at 1..168, some multiples of 8 up to
288, 336 and 576 rows, and at no others). So it is called with at most `library_limit` rows at a
time, and `shared_ops.attest` tries every row count up to there on the device in use and tells
`restrict` which to avoid. A shape that was not attested runs on tiles alone: exact, and at many
rows about 1.5 times slower.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

NEVER = 1 << 62
BULK_CAPABILITY = (9, 0)
ALIGNMENT = 256
# (most weights, rows): what is attested, and so the most rows of one call.
LIBRARY_LIMITS = ((1 << 23, 4096), (1 << 28, 2048), (NEVER, 896))


class Tile(NamedTuple):
    """One Triton schedule; `swapped` computes w x^T, `bulk` loads by the tensor memory accelerator
    (Hopper and newer)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool
    bulk: bool = False


class Shape(NamedTuple):
    """What the choice of a schedule depends on besides the rows; `transposed`: w is [K, N]^T."""

    depth: int
    columns: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    transposed: bool = False


PLAIN = Tile(64, 64, 64, 4, 3, False)
FLOAT32_TILE = Tile(32, 64, 32, 4, 2, False)
# (most rows, most programs of the tile, tile): the fastest measured on an H200 for K >= 3072.
TILES = (
    (16, NEVER, Tile(16, 64, 256, 4, 4, True, True)),
    (64, NEVER, Tile(32, 64, 128, 4, 6, True, True)),
    (128, NEVER, Tile(64, 64, 128, 4, 6, False, True)),
    (1024, 132, Tile(64, 64, 128, 4, 6, False, True)),
    (1024, NEVER, Tile(64, 128, 128, 4, 4, False, True)),
    (16, NEVER, Tile(16, 64, 128, 4, 6, True)),
    (64, NEVER, Tile(32, 64, 128, 4, 6, True)),
    (128, NEVER, Tile(64, 64, 128, 4, 6, False)),
    (1024, 132, Tile(64, 64, 128, 4, 6, False)),
    (1024, NEVER, Tile(64, 128, 128, 4, 4, False)),
    (NEVER, NEVER, Tile(128, 128, 64, 8, 3, False)),
)

# At up to so many rows tiles, the same as for long K, are faster than the library at any K; but not
# with very many columns.
FEW_ROWS, MANY_COLUMNS = 16, 1 << 16

# Verdicts of the attestation. They can change which of several bit-equal schedules runs, no bit.
_outside: dict[Shape, frozenset[int]] = {}
_dropped: set[Tile] = set()


def restrict(outside: dict[Shape, frozenset[int]], dropped: set[Tile]) -> None:
    """From now on: at these shapes the library, but at these row counts, and no dropped tile."""
    _outside.update(outside)
    _dropped.update(dropped)


def library_limit(depth: int, columns: int) -> int:
    """The most rows of one library call; each count costs the attestation a product."""
    return next(limit for weights, limit in LIBRARY_LIMITS if depth * columns <= weights)


def library_agrees(rows: int, shape: Shape) -> bool:
    """Whether the vendor library is proved to be in the contract at so many rows."""
    return shape in _outside and rows not in _outside[shape]


def choose(rows: int, shape: Shape) -> Tile | None:
    """The schedule for so many rows, at most `library_limit`; None is the vendor library."""
    is_narrow = rows <= FEW_ROWS and shape.columns < MANY_COLUMNS
    if library_agrees(rows, shape) and not is_narrow:
        return None
    if shape.dtype == torch.float32:
        return FLOAT32_TILE
    for most_rows, most_programs, tile in TILES:
        programs = -(-rows // tile.rows) * -(-shape.columns // tile.columns)
        fits = rows <= most_rows and programs <= most_programs and tile not in _dropped
        if fits and (not tile.bulk or takes_bulk(shape)):
            return tile
    return PLAIN


def takes_bulk(shape: Shape) -> bool:
    """Whether bulk tiles serve a shape here: whole rows, each a multiple of 16 bytes."""
    return _has_bulk() and not shape.transposed and shape.depth * shape.dtype.itemsize % 16 == 0


@functools.cache
def _has_bulk() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= BULK_CAPABILITY


def tiles() -> list[Tile]:
    """Every Triton schedule that may be chosen for half precision, the plain one left out."""
    found = dict.fromkeys(tile for _, _, tile in TILES)
    return [tile for tile in found if not tile.bulk or _has_bulk()]


def product(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[M, N] in `out_dtype` (default: that of x). `w_NK` may be a transposed view."""
    x_MK, out_dtype = _plain_rows(x_MK), out_dtype or x_MK.dtype
    if w_NK.data_ptr() % ALIGNMENT or not (w_NK.is_contiguous() or w_NK.T.is_contiguous()):
        w_NK = w_NK.clone(memory_format=torch.contiguous_format)
    transposed = not w_NK.is_contiguous()
    rows, (columns, depth) = x_MK.shape[0], w_NK.shape
    # With a bias the library's result stays float32 until the bias is added.
    library_dtype = out_dtype if bias_N is None else torch.float32
    shape = Shape(depth, columns, x_MK.dtype, library_dtype, transposed)
    y_MN = torch.empty((rows, columns), dtype=out_dtype, device=x_MK.device)
    for block in _blocks(rows, library_limit(depth, columns)):
        count = min(block.stop, rows) - block.start
        tile = choose(count, shape)
        if tile is None:
            library(x_MK[block], w_NK, bias_N, y_MN[block])
        else:
            tiled(x_MK[block], w_NK, bias_N, y_MN[block], tile)
    return y_MN


def run(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype, tile: Tile | None) -> Tensor:
    """[M, N] by one schedule, whatever is known of it (None: the library in one call)."""
    shape = (x_MK.shape[0], w_NK.shape[0])
    y_MN = torch.empty(shape, dtype=out_dtype, device=x_MK.device)
    if tile is None:
        library(x_MK, w_NK, None, y_MN)
    else:
        tiled(x_MK, w_NK, None, y_MN, tile)
    return y_MN


def _plain_rows(x_MK: Tensor) -> Tensor:
    """Contiguous and aligned as a fresh tensor is: the library may look at either."""
    x_MK = x_MK.contiguous()
    return x_MK.clone() if x_MK.data_ptr() % ALIGNMENT else x_MK


def _blocks(rows: int, limit: int) -> list[slice]:
    """Even blocks of at most `limit` rows; all but the last are whole 64s, so stay aligned."""
    if rows <= limit:
        return [slice(0, rows)] if rows else []
    step = triton.cdiv(triton.cdiv(rows, triton.cdiv(rows, limit)), 64) * 64
    return [slice(start, start + step) for start in range(0, rows, step)]


def library(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, y_MN: Tensor) -> None:
    """cuBLAS; with a bias its float32 result is rounded once, after the sum."""
    if bias_N is not None:
        wide_MN = torch.mm(x_MK, w_NK.T, out_dtype=torch.float32)
        torch.add(wide_MN, bias_N, out=y_MN)
    elif y_MN.dtype == x_MK.dtype:
        torch.mm(x_MK, w_NK.T, out=y_MN)
    else:
        torch.mm(x_MK, w_NK.T, out_dtype=y_MN.dtype, out=y_MN)


def tiled(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, y_MN: Tensor, tile: Tile) -> None:
    """One Triton schedule, into y."""
    if tile.bulk:
        return _bulk_tiled(x_MK, w_NK, bias_N, y_MN, tile)
    (rows, depth), columns = x_MK.shape, w_NK.shape[0]
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    _product[grid](
        x_MK,
        w_NK,
        x_MK if bias_N is None else bias_N,
        y_MN,
        rows,
        columns,
        depth,
        x_MK.stride(0),
        w_NK.stride(0),
        w_NK.stride(1),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SWAPPED=tile.swapped,
        EVEN=depth % tile.depth == 0,
        BIAS=bias_N is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _bulk_tiled(x_MK, w_NK, bias_N: Tensor | None, y_MN: Tensor, tile: Tile) -> None:
    (rows, depth), columns = x_MK.shape, w_NK.shape[0]
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    _bulk_product[grid](
        TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(w_NK, [tile.columns, tile.depth]),
        y_MN if bias_N is None else bias_N,
        y_MN,
        rows,
        columns,
        depth,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SWAPPED=tile.swapped,
        BIAS=bias_N is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def _store(
    total, bias_ptr, y_ptr, m, n, rows, columns, SWAPPED: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    if SWAPPED:
        total = total.T
    if BIAS:
        total += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _bulk_product(
    x_rows,
    w_rows,
    bias_ptr,
    y_ptr,
    rows,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """What lies outside x and w arrives as 0. All row tiles of some columns run together."""
    row_tiles = tl.cdiv(rows, ROWS)
    first_m = tl.program_id(0) % row_tiles * ROWS
    first_n = tl.program_id(0) // row_tiles * COLUMNS
    if SWAPPED:
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        x = x_rows.load([first_m, start])
        w = w_rows.load([first_n, start])
        if SWAPPED:
            total = tl.dot(w, x.T, total, input_precision="ieee")
        else:
            total = tl.dot(x, w.T, total, input_precision="ieee")
    m, n = first_m + tl.arange(0, ROWS), first_n + tl.arange(0, COLUMNS)
    _store(total, bias_ptr, y_ptr, m, n, rows, columns, SWAPPED, BIAS)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    rows,
    columns,
    depth,
    stride_xm,
    stride_wn,
    stride_wk,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Programs of 8 neighbouring row tiles run together, so that they share w in the L2 cache."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (8 * column_tiles)
    in_group = tl.program_id(0) % (8 * column_tiles)
    group_rows = tl.minimum(row_tiles - group * 8, 8)
    m = (group * 8 + in_group % group_rows) * ROWS + tl.arange(0, ROWS)
    n = (in_group // group_rows) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Rows past the end repeat the last one; they are not stored.
    x_ptrs = x_ptr + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * stride_xm + k[None, :]
    w_rows = tl.minimum(n, columns - 1).to(tl.int64)
    w_ptrs = w_ptr + w_rows[:, None] * stride_wn + k[None, :] * stride_wk
    if SWAPPED:
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        if EVEN:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=k[None, :] < depth - start, other=0.0)
            w = tl.load(w_ptrs, mask=k[None, :] < depth - start, other=0.0)
        if SWAPPED:
            total = tl.dot(w, x.T, total, input_precision="ieee")
        else:
            total = tl.dot(x, w.T, total, input_precision="ieee")
        x_ptrs += DEPTH
        w_ptrs += DEPTH * stride_wk
    _store(total, bias_ptr, y_ptr, m, n, rows, columns, SWAPPED, BIAS)
