"""float32 products on a CPU.

Contract: K in increasing order, in blocks of `K_BLOCK` (the last one filled up with zeros to a
multiple of `TILE`). A block is a chain of fused multiply-adds (`chain.py`); blocks are added left
to right in float32. An output depends on its own row and column only, so rows, columns and batches
may be filled up, cut and shared among threads at will.

The contract rests on IEEE 754 and on no library. Three schedules keep to it, the fastest first:

* BLAS (MKL in torch's wheels for x86). With all three sizes multiples of `TILE` its kernels for
  AVX-512, and those that it runs on AMD's processors, are chains up to K = 192; on processors with
  AVX2 alone others run that sum in several parts.
* oneDNN, likewise a chain, with AVX2 as well, unless the second operand's rows are strided (it
  is copied then). One call a matrix, so batches of small matrices are slow.
* plain (`chain.py`), always right.

None of what is said of the libraries is relied on: before a schedule first runs with a K, N, layout
and number of threads it is compared with the plain one, in this process, and passed over where a
value differs.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_ops.chain import chain

K_BLOCK = 192
TILE = 16
BATCH_ROWS = 8
# No call has more rows, so that a schedule is tried with as many as it is ever given.
ROWS_LIMIT, ROWS_LIMIT_WIDE, WIDE = 512, 160, 4096
BATCH_ROWS_LIMIT = 128
PROOF_SAMPLE = 64


class Call(NamedTuple):
    """What a library may choose its kernel by, besides the number of rows.

    x_rows, w_rows: whether the rows of an operand are contiguous, else its columns are.
    """

    batched: bool
    k: int
    columns: int
    x_rows: bool
    w_rows: bool
    threads: int

    def __str__(self) -> str:
        kind = "batched product" if self.batched else "product"
        layout = f"{'nt'[not self.x_rows]}{'nt'[not self.w_rows]}"
        return f"{kind} {self.k} -> {self.columns} {layout}, {self.threads} threads"


class Schedule(NamedTuple):
    """add(x_MK, w_KN, out_MN or None) gives out + x @ w and may overwrite out; batch(x_XMK, w_XKN)
    gives x @ w. Sizes are multiples of TILE (rows of a batch, of BATCH_ROWS); k <= K_BLOCK."""

    name: str
    add: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    batch: Callable[[Tensor, Tensor], Tensor]


def product(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """float32 [M, N] = x @ w of float32 operands, either of which may be a transposed view."""
    rows, depth, columns = *x_MK.shape, w_KN.shape[1]
    if not (rows and depth and columns):
        return x_MK.new_zeros((rows, columns))
    w_KN, limit = _filled(w_KN, 1, TILE), _rows_limit(columns)
    if rows <= limit:
        out_MN = _rows_product(_filled(x_MK, TILE, 1), w_KN)
    else:
        out_MN = x_MK.new_empty((rows + -rows % TILE, w_KN.shape[1]))
        for part_MK, place_MN in zip(x_MK.split(limit), out_MN.split(limit), strict=True):
            _rows_product(_filled(part_MK, TILE, 1), w_KN, place_MN)
    return out_MN[:rows, :columns].contiguous()


def _rows_product(x_MK: Tensor, w_KN: Tensor, place_MN: Tensor | None = None) -> Tensor:
    """A part of `product`: no more rows than a schedule was tried with, all sizes but K filled.

    place_MN: where it is put.
    """
    out_MN = schedule = None
    for start in range(0, x_MK.shape[1], K_BLOCK):
        x_Mk, w_kN = x_MK[:, start : start + K_BLOCK], w_KN[start : start + K_BLOCK]
        if schedule is None or len(w_kN) < K_BLOCK:
            x_Mk, w_kN = _filled(x_Mk, 1, TILE), _filled(w_kN, TILE, 1)
            schedule = _schedule_for(_call(False, x_Mk, w_kN))
        if out_MN is None and place_MN is not None and schedule is BLAS:
            out_MN = torch.mm(x_Mk, w_kN, out=place_MN)
        else:
            out_MN = schedule.add(x_Mk, w_kN, out_MN)
    assert out_MN is not None
    return out_MN if place_MN is None or out_MN is place_MN else place_MN.copy_(out_MN)


def _rows_limit(columns: int) -> int:
    return ROWS_LIMIT if columns <= WIDE else ROWS_LIMIT_WIDE


def batched_product(x_XMK: Tensor, w_XKN: Tensor) -> Tensor:
    """float32 [X, M, N] = x @ w of float32 operands, likewise.

    Either may be a transposed view, of any distance between its matrices.
    """
    if w_XKN.shape[1] > K_BLOCK:
        blocks = zip(x_XMK.split(K_BLOCK, 2), w_XKN.split(K_BLOCK, 1), strict=True)
        return functools.reduce(torch.Tensor.add_, itertools.starmap(batched_product, blocks))
    rows, columns = x_XMK.shape[1], w_XKN.shape[2]
    x_XMK, w_XKN = _filled(x_XMK, BATCH_ROWS, TILE), _filled(w_XKN, TILE, TILE)
    batch = _schedule_for(_call(True, x_XMK, w_XKN)).batch
    if x_XMK.shape[1] <= BATCH_ROWS_LIMIT:
        out_XMN = batch(x_XMK, w_XKN)
    else:
        parts = x_XMK.split(BATCH_ROWS_LIMIT, 1)
        out_XMN = torch.cat([batch(part_XMK, w_XKN) for part_XMK in parts], 1)
    return out_XMN if out_XMN.shape[1:] == (rows, columns) else out_XMN[:, :rows, :columns]


def _filled(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros appended up to multiples of these; rows or columns contiguous."""
    more_rows, more_columns = -x.shape[-2] % rows, -x.shape[-1] % columns
    if more_rows or more_columns:
        return F.pad(x, (0, more_columns, 0, more_rows))
    return x if x.stride(-1) == 1 or x.stride(-2) == 1 else x.contiguous()


def _call(batched: bool, x: Tensor, w: Tensor) -> Call:
    k, columns = w.shape[-2:]
    return Call(batched, k, columns, x.stride(-1) == 1, w.stride(-1) == 1, torch.get_num_threads())


def _blas_add(x_MK: Tensor, w_KN: Tensor, out_MN: Tensor | None) -> Tensor:
    return torch.mm(x_MK, w_KN) if out_MN is None else out_MN.addmm_(x_MK, w_KN)


def _onednn_add(x_MK: Tensor, w_KN: Tensor, out_MN: Tensor | None) -> Tensor:
    x_MK, w_NK = x_MK.contiguous(), w_KN.T.contiguous()
    product_MN = torch.ops.mkldnn._linear_pointwise(x_MK, w_NK, None, "none", [], "")
    return product_MN if out_MN is None else out_MN.add_(product_MN)


def _onednn_batch(x_XMK: Tensor, w_XKN: Tensor) -> Tensor:
    pairs = zip(x_XMK, w_XKN, strict=True)
    return torch.stack([_onednn_add(x_MK, w_KN, None) for x_MK, w_KN in pairs])


def _plain_add(x_MK: Tensor, w_KN: Tensor, out_MN: Tensor | None) -> Tensor:
    product_MN = chain(x_MK.unsqueeze(0), w_KN.unsqueeze(0))[0]
    return product_MN if out_MN is None else out_MN.add_(product_MN)


BLAS = Schedule("BLAS", _blas_add, torch.bmm)
ONEDNN = Schedule("oneDNN", _onednn_add, _onednn_batch)
PLAIN = Schedule("plain", _plain_add, chain)
SCHEDULES = {schedule.name: schedule for schedule in (BLAS, ONEDNN, PLAIN)}


class Proof(NamedTuple):
    """A schedule held against the plain one: values compared, and how many differ (a NaN does)."""

    schedule: str
    values: int
    differing: int


# What was found in this process: the schedules tried, of which the last one runs.
_found: dict[Call, tuple[Proof, ...]] = {}
_chosen: dict[Call, Schedule] = {}


def _schedule_for(call: Call) -> Schedule:
    return _chosen.get(call) or choose(call)


def choose(call: Call) -> Schedule:
    """Compare the schedules with the plain one and keep the first that gives its bits."""
    if call in _found:
        accept({call: _found[call]})
        return _chosen[call]
    tried: list[Proof] = []
    for schedule in (BLAS, ONEDNN):
        if is_there(schedule):
            tried.append(proof(schedule, call))
            if not tried[-1].differing:
                break
    else:
        schedule = PLAIN
        tried.append(Proof(PLAIN.name, 0, 0))
        _warn_of_plain()
    accept({call: tuple(tried)})
    return schedule


@functools.cache
def _warn_of_plain() -> None:
    warnings.warn(
        "no library here computes float32 products in the order that the contract states, so they"
        " run in plain torch, which takes 50 to 100 times as long: use a processor with AVX2 and"
        " fused multiply-add, or lift the setting that forbids them (MKL_ENABLE_INSTRUCTIONS,"
        " ONEDNN_MAX_CPU_ISA)",
        stacklevel=2,
    )


@contextmanager
def recorded() -> Iterator[dict[Call, tuple[Proof, ...]]]:
    """What is called inside: the schedules that were tried for it, of which the last one runs."""
    calls: dict[Call, tuple[Proof, ...]] = {}
    _chosen.clear()
    yield calls
    calls.update({call: _found[call] for call in _chosen})


def accept(known: dict[Call, tuple[Proof, ...]]) -> None:
    """Take what was found, here or in an earlier process on the same machine and libraries."""
    _found.update(known)
    _chosen.update({call: SCHEDULES[tried[-1].schedule] for call, tried in known.items()})


def is_there(schedule: Schedule) -> bool:
    return schedule is not ONEDNN or (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def proof(schedule: Schedule, call: Call) -> Proof:
    """Compare a schedule with the plain one: few rows and many, at any place, in any storage."""
    values = differing = 0
    for got, wanted in _comparisons(schedule, call):
        values += wanted.numel()
        if not torch.equal(got, wanted):
            differing = count_differing(got, wanted)
            break
    return Proof(schedule.name, values, differing)


def count_differing(got: Tensor, wanted: Tensor) -> int:
    """Values that differ; a NaN does."""
    return int(((got != wanted) | got.isnan()).sum())


def _comparisons(schedule: Schedule, call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs that must be equal. The chains are of some rows and columns; all others are compared
    with the same rows of one large product."""
    generator = torch.Generator().manual_seed(call.k * 1_000_003 + call.columns)
    batch, total = (3, BATCH_ROWS_LIMIT) if call.batched else (1, _rows_limit(call.columns))
    x = _operand((batch, total, call.k), call.x_rows, generator)
    w = _operand((batch, call.k, call.columns), call.w_rows, generator)
    rows = torch.randperm(total, generator=generator)[:PROOF_SAMPLE]
    columns = torch.randperm(call.columns, generator=generator)[:PROOF_SAMPLE]
    columns = torch.cat((columns, torch.arange(max(0, call.columns - TILE), call.columns)))
    chains = chain(x[:, rows], w[:, :, columns])
    whole = _run(schedule, call, x, w)
    yield whole[:, rows][:, :, columns], chains
    for first, size in ((0, TILE), (7, 80), (1, BATCH_ROWS if call.batched else 48)):
        part = x[:, first : first + size]
        yield _run(schedule, call, part, w), whole[:, first : first + size]
    yield _run(schedule, call, _elsewhere(x), _elsewhere(w)), whole
    yield _run(schedule, call, x[:1, :TILE], w[:1]), whole[:1, :TILE]
    small = x[:1, :TILE] * 2.0**-80, w[:1] * 2.0**-62  # sums below the least normal float32
    yield _run(schedule, call, *small)[:, :, columns], chain(small[0], small[1][:, :, columns])
    if not call.batched:
        onto = random_float32(tuple(whole.shape[1:]), generator)
        yield schedule.add(x[0], w[0], onto.clone())[None], onto + whole


def _operand(shape: tuple[int, ...], rows: bool, generator: torch.Generator) -> Tensor:
    x = random_float32(shape, generator)
    return x if rows else x.mT.contiguous().mT


def random_float32(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random values within +-8, most of them small; the same bits on every processor, which
    torch.randn's are not."""
    whole = torch.randint(-(1 << 24), 1 << 24, shape, generator=generator, dtype=torch.int32)
    scales = torch.tensor([2.0**power for power in range(-25, -20)])
    return whole * scales[torch.randint(0, len(scales), shape, generator=generator)]


def _elsewhere(x: Tensor) -> Tensor:
    """The same values in the same layout, off a cache line's start and with gaps between rows."""
    rows = x if x.stride(-1) == 1 else x.mT
    wide = x.new_empty((*rows.shape[:-1], rows.shape[-1] + 3))
    wide[..., 3:] = rows
    return wide[..., 3:] if x.stride(-1) == 1 else wide[..., 3:].mT


def _run(schedule: Schedule, call: Call, x: Tensor, w: Tensor) -> Tensor:
    return schedule.batch(x, w) if call.batched else schedule.add(x[0], w[0], None)[None]
