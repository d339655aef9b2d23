# pyright: reportMissingImports=false, reportIndexIssue=false
"""attention on CUDA (contract: op.py): one forward kernel for packed, prefill and decode.

A KV head's query heads share its keys: row r of a sequence is query r div GROUP, head r mod GROUP
of the group. A program takes a tile of rows and walks the KV tiles of its sequence from position
0. Few long sequences are split: a program takes one chunk of positions and a second kernel merges
the chunks, in the order in which the unsplit program does.

What may differ between schedules: rows in a tile, warps, stages, packed or paged, split or not.
"""

import functools
import itertools
from typing import NamedTuple

import numpy
import torch
import triton
from torch import Tensor

from shared_ops.attention import backward_kernels, forward_kernels

KV_TILE = 64
CHUNK = 1024
LOG2_E = 1.4426950408889634
SPLIT_PROGRAMS = 264
SHORT = 512


class Schedule(NamedTuple):
    """Rows in a tile, warps, and depth of the software pipeline; `one_loop`: see the kernel."""

    rows: int
    warps: int
    stages: int
    one_loop: bool = False


# Tails of prompts and decode: many programs share a multiprocessor, or one has it to itself and
# loads far ahead.
SMALL, ALONE = Schedule(16, 4, 3, True), Schedule(16, 4, 5, True)
MULTIPROCESSORS = 132
STAGE_BYTES = 160 * 1024


def small_schedule(group: int, programs: int, wide: int, itemsize: int) -> Schedule:
    """A tile holds at least one query of the group; its pipeline fits shared memory."""
    wanted = ALONE if programs <= MULTIPROCESSORS else SMALL
    fitting = STAGE_BYTES // (2 * KV_TILE * wide * itemsize)
    rows = max(wanted.rows, triton.next_power_of_2(group))
    return wanted._replace(rows=rows, stages=max(1, min(wanted.stages, fitting)))


def padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def large_schedule(width: int, dtype: torch.dtype, longest: int = 1 << 30) -> Schedule:
    """For prompts and packed rows: the fastest measured on an H200 that fits shared memory.

    `longest` is the most queries of one sequence; short ones leave deep pipelines no time.
    """
    if dtype == torch.float32:
        return Schedule(16, 4, 1)
    if width > 128:
        return Schedule(64, 8, 2)
    if width > 64:
        return Schedule(128, 8, 3) if longest > SHORT else Schedule(64, 4, 2)
    return Schedule(64, 4, 3)


def backward_schedule(width: int, dtype: torch.dtype) -> Schedule:
    if dtype == torch.float32:
        return Schedule(16, 4, 1)
    if width > 128:
        return Schedule(64, 8, 1)
    return Schedule(64, 4, 2) if width > 64 else Schedule(128, 8, 2)


class Source(NamedTuple):
    """Keys and values [tokens or pages x page_size, K, E] and how sequences find theirs."""

    k_NKE: Tensor
    v_NKE: Tensor
    starts: Tensor
    contexts: Tensor
    page_table: Tensor
    page_size: int


@functools.lru_cache(maxsize=64)
def _integers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 on the device; the layers of a forward ask for the same ones."""
    return torch.from_numpy(numpy.array(values, dtype=numpy.int32)).to(device)


def _given_or_copied(given: Tensor | None, values: list[int], device: torch.device) -> Tensor:
    return _integers(tuple(values), device) if given is None else given


@functools.lru_cache(maxsize=64)
def _tiles(lens: tuple[int, ...], step: int, low: int, high: int, device: torch.device) -> Tensor:
    """int32 [tiles, 2]: (sequence, first row) of the sequences with low < length <= high.

    The last tiles of the sequences come first, as these have the most to do.
    """
    return torch.from_numpy(_tile_table(lens, step, low, high)).to(device)


def _tile_table(lens: tuple[int, ...], step: int, low: int, high: int) -> numpy.ndarray:
    lens_B = numpy.array(lens, dtype=numpy.int64)
    sequences = numpy.flatnonzero((lens_B > low) & (lens_B <= high))
    counts = -(-lens_B[sequences] // step)
    sequence = numpy.repeat(sequences, counts)
    first = (numpy.arange(counts.sum()) - numpy.repeat(counts.cumsum() - counts, counts)) * step
    order = numpy.argsort(-first, kind="stable")
    return numpy.stack((sequence[order], first[order]), 1).astype(numpy.int32)


@functools.lru_cache(maxsize=64)
def _tiles_by_chunks(
    lens: tuple[int, ...],
    contexts: tuple[int, ...],
    group: int,
    step: int,
    low: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The tiles of sequences longer than `low`: those inside the first chunk, and the others."""
    table = _tile_table(lens, step, low, 1 << 40)
    rows, context = (
        numpy.array(values, dtype=numpy.int64)[table[:, 0]] for values in (lens, contexts)
    )
    last = numpy.minimum(table[:, 1] + step, rows) - 1
    is_single = context - rows // group + last // group < CHUNK
    single, others = (torch.from_numpy(table[chosen]) for chosen in (is_single, ~is_single))
    return single.to(device), others.to(device)


@functools.cache
def _decode_tiles(sequences: int, device: torch.device) -> Tensor:
    """(sequence, 0): one tile each. Kept for good, because captured graphs go on reading it."""
    table = _tile_table((1,) * sequences, 1, 0, 1)
    return torch.from_numpy(table).to(device)


def _lengths(starts: list[int], group: int = 1) -> tuple[int, ...]:
    return tuple((end - start) * group for start, end in itertools.pairwise(starts))


def _rows_contiguous(x_THE: Tensor) -> Tensor:
    """Heads side by side; the token stride may be any (a view into the fused projection)."""
    whole = x_THE.stride(2) == 1 and x_THE.stride(1) == x_THE.shape[2]
    return x_THE if whole else x_THE.contiguous()


def packed_forward(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    starts: list[int],
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """o_THE, and the base-2 logarithms of the rows' sums of exponentials, lse_TH."""
    group = q_THE.shape[1] // k_TKE.shape[1]
    lens = _lengths(starts, group)
    begin = _integers(tuple(starts), q_THE.device)
    source = Source(_rows_contiguous(k_TKE), _rows_contiguous(v_TKE), begin, begin, begin, 0)
    o_THE = torch.empty(q_THE.shape, dtype=out_dtype or q_THE.dtype, device=q_THE.device)
    lse_TH = torch.empty(q_THE.shape[:2], dtype=torch.float32, device=q_THE.device)
    schedule = large_schedule(q_THE.shape[2], q_THE.dtype, max(lens, default=0) // group)
    q_THE = _rows_contiguous(q_THE)
    single, others = _tiles_by_chunks(lens, _lengths(starts), group, schedule.rows, 0, q_THE.device)
    attend(q_THE, source, others, schedule, o_THE, lse_TH)
    attend(q_THE, source, single, schedule, o_THE, lse_TH, chunks=0)
    return o_THE, lse_TH


def write_pages(k_pages_PSKE, v_pages_PSKE, slots_T, k_TKE: Tensor, v_TKE: Tensor) -> None:
    k_TKE, v_TKE = _rows_contiguous(k_TKE), _rows_contiguous(v_TKE)
    tokens, kv_heads, width = k_TKE.shape
    if tokens:
        forward_kernels.write_pages[(tokens,)](
            k_pages_PSKE, v_pages_PSKE, slots_T.contiguous(), k_TKE, v_TKE, k_TKE.stride(0),
            v_TKE.stride(0), kv_heads * width, BLOCK=triton.next_power_of_2(kv_heads * width),
        )  # fmt: skip


def paged_forward(
    q_THE: Tensor,
    k_pages_PSKE: Tensor,
    v_pages_PSKE: Tensor,
    layout,
    out_dtype: torch.dtype | None = None,
    split: bool | None = None,
    chunk: int | None = None,
) -> Tensor:
    """o_THE. `split`: whether decode takes a program for each chunk; None: where it is faster.

    `chunk`: positions of decode's chunks, whole KV tiles; other than CHUNK is not in the contract.
    """
    device, group = q_THE.device, q_THE.shape[1] // k_pages_PSKE.shape[2]
    lens = _lengths(layout.query_starts, group)
    source = Source(
        k_pages_PSKE.flatten(0, 1),
        v_pages_PSKE.flatten(0, 1),
        _given_or_copied(layout.query_starts_B1, layout.query_starts, device),
        _given_or_copied(layout.contexts_B, layout.context_lens, device),
        layout.page_table_BP,
        k_pages_PSKE.shape[1],
    )
    o_THE = torch.empty(q_THE.shape, dtype=out_dtype or q_THE.dtype, device=device)
    q_THE = _rows_contiguous(q_THE)
    width, kv_heads = q_THE.shape[2], k_pages_PSKE.shape[2]
    programs = len(lens) * kv_heads
    small = small_schedule(group, programs, padded(width), q_THE.element_size())
    is_decode = lens == (group,) * len(lens)
    few = (
        _decode_tiles(len(lens), device)
        if is_decode
        else _tiles(lens, small.rows, 0, small.rows, device)
    )
    chunk = chunk or CHUNK
    chunks = -(-max(layout.context_lens, default=1) // chunk)
    if split is None:
        split = len(few) * kv_heads < SPLIT_PROGRAMS
    parts = 0 if chunks == 1 else chunks if split else 1
    attend(q_THE, source, few, small, o_THE, None, parts, chunk, is_decode)
    if is_decode:
        return o_THE
    large = large_schedule(width, q_THE.dtype, max(lens, default=0) // group)
    single, others = _tiles_by_chunks(
        lens, tuple(layout.context_lens), group, large.rows, small.rows, device
    )
    attend(q_THE, source, others, large, o_THE, None)
    attend(q_THE, source, single, large, o_THE, None, chunks=0)
    return o_THE


def attend(
    q_THE: Tensor,
    source: Source,
    tiles: Tensor,
    schedule: Schedule,
    o_THE: Tensor,
    lse_TH: Tensor | None,
    chunks: int = 1,
    chunk: int | None = None,
    is_decode: bool = False,
) -> None:
    """Fill o_THE (and the base-2 log of the row sums) for the given tiles of rows.

    With `chunks` above 1 the positions are split among so many programs a tile; 0 says that no
    row of these tiles sees more than one chunk. is_decode: tile i is the one query of sequence i.
    """
    if not len(tiles):
        return
    heads, width = q_THE.shape[1:]
    kv_heads = source.k_NKE.shape[1]
    wide = padded(width)
    state = o_THE
    if chunks > 1:
        values = len(tiles) * kv_heads * chunks * schedule.rows * (wide + 2)
        state = torch.empty(values, dtype=torch.float32, device=o_THE.device)
    shape = {"GROUP": heads // kv_heads, "ROWS": schedule.rows, "WIDE": wide}
    shape["CHUNK"] = chunk or CHUNK
    common = (o_THE, o_THE if lse_TH is None else lse_TH, state, tiles, source.starts)
    contexts = (source.contexts, source.page_table, source.page_table.stride(0))
    forward_kernels.forward[(len(tiles), kv_heads, max(1, chunks))](
        q_THE, source.k_NKE, source.v_NKE, *common, *contexts, heads, width, q_THE.stride(0),
        source.k_NKE.stride(0), source.v_NKE.stride(0), width**-0.5 * LOG2_E,
        TILE=KV_TILE, PAGE=source.page_size, SPLIT=chunks > 1, SINGLE=chunks == 0,
        LSE=lse_TH is not None, DECODE=is_decode, ONE_LOOP=schedule.one_loop, **shape,
        num_warps=schedule.warps, num_stages=schedule.stages,
    )  # fmt: skip
    if chunks > 1:
        forward_kernels.merge_chunks[(len(tiles), kv_heads)](
            *common, *contexts[:1], heads, width, chunks, PAGED=source.page_size > 0,
            LSE=lse_TH is not None, DECODE=is_decode, **shape, num_warps=4,
        )  # fmt: skip


def packed_backward(do_THE, q_THE, k_TKE, v_TKE, o_THE, lse_TH, starts: list[int]):
    """Two passes, none with atomics: rows gather dq, KV tiles gather dk and dv of a whole group."""
    q_THE, k_TKE, v_TKE = (_rows_contiguous(x) for x in (q_THE, k_TKE, v_TKE))
    do_THE = do_THE.contiguous()
    device, (tokens, heads, width) = q_THE.device, q_THE.shape
    kv_heads = k_TKE.shape[1]
    group = heads // kv_heads
    dq_THE, dk_TKE, dv_TKE = (
        torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q_THE, k_TKE, v_TKE)
    )
    delta_TH = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    wide = padded(width)
    if tokens:
        grid = (triton.cdiv(tokens * heads, 64),)
        backward_kernels.delta[grid](
            do_THE, o_THE, delta_TH, tokens * heads, width, ROWS=64, WIDE=wide
        )
    rest = (
        do_THE, lse_TH, delta_TH, _integers(tuple(starts), device), heads, width, q_THE.stride(0),
        k_TKE.stride(0), v_TKE.stride(0), width**-0.5,
    )  # fmt: skip
    schedule = backward_schedule(width, q_THE.dtype)
    shape = {"GROUP": group, "ROWS": schedule.rows, "TILE": KV_TILE, "WIDE": wide}
    options = {"num_warps": schedule.warps, "num_stages": schedule.stages}
    row_tiles = _tiles(_lengths(starts, group), schedule.rows, 0, 1 << 40, device)
    kv_tiles = _tiles(_lengths(starts), KV_TILE, 0, 1 << 40, device).flip(0).contiguous()
    if tokens:
        backward_kernels.gradient_of_queries[(len(row_tiles), kv_heads)](
            q_THE, k_TKE, v_TKE, dq_THE, row_tiles, *rest, **shape, **options
        )
        backward_kernels.gradient_of_keys[(len(kv_tiles), kv_heads)](
            q_THE, k_TKE, v_TKE, dk_TKE, dv_TKE, kv_tiles, *rest, **shape, **options
        )
    return dq_THE, dk_TKE, dv_TKE
