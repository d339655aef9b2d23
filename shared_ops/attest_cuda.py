"""Proof, on the GPU in use, that every schedule that may be chosen obeys its contract.

Everything is compared bit for bit in float32 with the plain schedule, at odd sizes too. Library
products that round to bfloat16 or float16 are given operands whose exact product is 0, so that
what is left is the order of the sum itself and rounding hides nothing.

A tile that differs is dropped with a warning, and the vendor library is used at no row count at
which it differs (and at none that was not tried): `shared_ops.products` is told. If the plain
schedule itself is not reproducible, nothing can be proved and the run must not start.
"""

import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared_ops.attest_cache import cuda_key, verdict_of, verdict_path
from shared_ops.attest_report import AttestationError, Check, Report, lora_shapes, product_shapes
from shared_ops.cuda import require_device, require_triton
from shared_ops.fused.op import Widths, allow, can_be
from shared_ops.model.config import ModelConfig
from shared_ops.model.lora_config import LoraConfig

if TYPE_CHECKING:
    from shared_ops.products import Shape

ODD_ROWS = (1, 15, 17, 33, 65, 129, 257, 600)
VALUES = 1_000_000


def cancelling(
    rows: int, columns: int, depth: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """x [rows, depth] and w [columns, depth] on the GPU with x w^T = 0 in exact arithmetic.

    The second half of K repeats the first in another order with the sign turned, so every value of
    a computed product is the rounding of its own order of summation.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    x_MH, w_NH = random(rows, depth // 2), random(columns, depth // 2)
    order_H = torch.randperm(depth // 2, generator=generator, device="cuda")
    x_MK = torch.cat((x_MH, x_MH[:, order_H]), 1)
    w_NK = torch.cat((w_NH, -w_NH[:, order_H]), 1)
    pad = (0, depth % 2)
    return torch.nn.functional.pad(x_MK, pad), torch.nn.functional.pad(w_NK, pad)


Pairs = Iterable[tuple[Tensor, Tensor]]


class _Prover:
    def __init__(self, seed: int):
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.seed = seed
        self.is_other = torch.empty(0, dtype=torch.bool, device="cuda")
        self.checks: list[Check] = []
        self.dropped: list[Check] = []
        self.digest = hashlib.sha256()

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda").to(dtype)

    def count(self, pairs: Pairs) -> tuple[int, list[int]]:
        """Values compared, and how many differ (or are NaN) in each pair of equal shape."""
        values, differing = 0, []
        for got, wanted in pairs:
            values += got.numel()
            if self.is_other.numel() < got.numel():
                self.is_other = torch.empty(2 * got.numel(), dtype=torch.bool, device="cuda")
            is_other = self.is_other[: got.numel()].view(got.shape)
            differing.append(torch.ne(got, wanted, out=is_other).sum())
        return values, torch.stack(differing).tolist()

    def plain(
        self,
        op: str,
        shape: str,
        wanted: Tensor,
        pairs: Callable[[], Pairs],
    ) -> None:
        """The plain schedule against itself; also what the fingerprint is made of."""
        values, differing = self.count(pairs())
        self.digest.update(wanted[:64].float().cpu().contiguous().numpy().tobytes())
        self.checks.append(Check(op, shape, values, sum(differing)))
        if sum(differing):
            raise AttestationError(
                f"{op} {shape}: the plain schedule gives {sum(differing)} of {values} values other"
                " bits when it runs again: this GPU, driver or triton cannot be used exactly"
            )

    def keep(self, op: str, shape: str, pairs: Callable[[], Pairs]) -> bool:
        """Whether a schedule agrees; one that does not is noted as dropped."""
        values, differing = self.count(pairs())
        check = Check(op, shape, values, sum(differing))
        (self.dropped if check.differing else self.checks).append(check)
        return not check.differing


def attest_cuda(
    config: ModelConfig, dtype: torch.dtype, seed: int = 0, lora: LoraConfig | None = None
) -> Report:
    """Check every schedule that a decoder of this shape may run on the current CUDA device.

    Verdicts are kept in a file under a key of device, driver, torch, triton, project and shape.
    Schedules that differ are dropped with a warning.

    Raises:
        DeviceError: the GPU is too old, or triton is missing or too old.
        AttestationError: the plain schedule of an op is not reproducible.
    """
    require_device(torch.device("cuda"))
    require_triton()
    narrow = lora_shapes(config, lora)
    path = verdict_path(cuda_key(config, dtype, seed, narrow))
    verdict = verdict_of(path, lambda: _prove(config, dtype, seed, narrow))
    _apply(verdict, dtype)
    checks, dropped = ([Check(**each) for each in verdict[k]] for k in ("checks", "dropped"))
    for check in dropped:
        warnings.warn(
            f"schedule dropped: {check.op} {check.shape} differs in {check.differing} of"
            f" {check.values} values; a slower one runs instead",
            stacklevel=2,
        )
    return Report(
        tuple(checks), {"all": verdict["fingerprint"]}, verdict["seconds"], tuple(dropped)
    )


def _apply(verdict: dict, dtype: torch.dtype) -> None:
    from shared_ops import products

    outside = {
        products.Shape(depth, columns, dtype, getattr(torch, out), transposed): frozenset(
            rows for first, last in runs for rows in range(first, last + 1)
        )
        for depth, columns, out, transposed, runs in verdict["libraries"]
    }
    products.restrict(outside, {products.Tile(*tile) for tile in verdict["dropped_tiles"]})
    if "fused" in verdict:
        hidden, head, is_equal = verdict["fused"]
        allow(Widths(hidden, head, dtype), is_equal)
        allow(*verdict["drawn"])


def _prove(
    config: ModelConfig, dtype: torch.dtype, seed: int, narrow: Sequence[tuple[int, int]] = ()
) -> dict:
    """narrow: products of adapters; they run on tiles alone, which is exact at any row count."""
    start, prover = time.perf_counter(), _Prover(seed)
    libraries, dropped_tiles = [], []
    with torch.inference_mode():
        for depth, columns in (*product_shapes(config), *narrow):
            dropped_tiles += _tiles(prover, depth, columns, dtype)
        for shape in _library_shapes(config, dtype):
            libraries.append(_library(prover, shape))
        _rows(prover, config, dtype)
        is_drawn = _log_softmax(prover, config.vocab_size)
        is_fused = _fused(prover, config, dtype)
        _attention(prover, config, dtype)
    return {
        "fused": [config.hidden_size, config.head_dim, is_fused],
        "drawn": [config.vocab_size, is_drawn],
        "checks": [asdict(check) for check in prover.checks],
        "dropped": [asdict(check) for check in prover.dropped],
        "libraries": libraries,
        "dropped_tiles": dropped_tiles,
        "fingerprint": prover.digest.hexdigest(),
        "seconds": time.perf_counter() - start,
    }


def _library_shapes(config: ModelConfig, dtype: torch.dtype) -> list["Shape"]:
    """Forward products (float32 results for the head and where a bias follows) and those of dx."""
    from shared_ops.products import Shape

    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = []
    for depth, columns in product_shapes(config):
        if dtype == torch.float32 or depth % 8 or columns % 8:
            continue
        is_head = (depth, columns) == (config.hidden_size, config.vocab_size)
        is_wide = is_head or (config.qkv_bias and (depth, columns) == (config.hidden_size, qkv))
        shapes.append(Shape(depth, columns, dtype, torch.float32 if is_wide else dtype))
        if not is_head:
            shapes.append(Shape(columns, depth, dtype, dtype, True))
    return shapes


def _tiles(prover: _Prover, depth: int, columns: int, dtype: torch.dtype) -> list[tuple]:
    """Every Triton tile against the plain one; those that differ."""
    from shared_ops import products

    columns = min(columns, 16384)
    x_MK = prover.random(max(ODD_ROWS), depth, dtype=dtype)
    w_NK = prover.random(columns, depth, dtype=dtype)
    candidates, plain = products.tiles(), products.PLAIN
    if dtype == torch.float32:
        candidates, plain = [], products.FLOAT32_TILE

    def run(tile, rows: int) -> Tensor:
        return products.run(x_MK[:rows], w_NK, torch.float32, tile)

    wanted, shape = run(plain, len(x_MK)), f"{depth} -> {columns}"
    repeats = range(-(-VALUES // (sum(ODD_ROWS) * columns)))
    prover.plain(
        "product, plain tile",
        shape,
        wanted,
        lambda: [(run(plain, n), wanted[:n]) for _ in repeats for n in ODD_ROWS],
    )
    return [
        tuple(tile)
        for tile in candidates
        if not prover.keep(
            f"product, tile {tile.rows}x{tile.columns}x{tile.depth}",
            shape,
            lambda tile=tile: [(run(tile, n), wanted[:n]) for _ in repeats for n in ODD_ROWS],
        )
    ]


def _library(prover: _Prover, shape: "Shape") -> list:
    """The library against the plain tile at every row count of a call.

    Returns the shape and the runs of row counts outside the contract.
    """
    from shared_ops import products

    limit = products.library_limit(shape.depth, shape.columns)
    x_MK, w_NK = cancelling(limit, shape.columns, shape.depth, shape.dtype, prover.seed)
    w_NK = w_NK.T.contiguous().T if shape.transposed else w_NK
    wanted = products.run(x_MK, w_NK, torch.float32, products.PLAIN).to(shape.out_dtype)

    y_MN = torch.empty_like(wanted)

    def pairs() -> Iterable[tuple[Tensor, Tensor]]:
        for rows in range(1, limit + 1):
            products.library(x_MK[:rows], w_NK, None, y_MN[:rows])
            yield y_MN[:rows], wanted[:rows]

    values, differing = prover.count(pairs())
    bad = [rows for rows, count in enumerate(differing, 1) if count]
    runs = _runs(bad)
    name = f"{shape.depth} -> {shape.columns}{' transposed' if shape.transposed else ''}"
    op = f"product, library not at {_written(runs)} rows" if bad else "product, library"
    prover.checks.append(Check(op, name, values - sum(bad) * shape.columns, 0))
    out_name = str(shape.out_dtype).removeprefix("torch.")
    return [shape.depth, shape.columns, out_name, shape.transposed, runs]


def _runs(counts: list[int]) -> list[list[int]]:
    """Increasing numbers as [first, last] runs."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][1] == count - 1:
            runs[-1][1] = count
        else:
            runs.append([count, count])
    return runs


def _written(runs: list[list[int]]) -> str:
    shown = [f"{first}..{last}" if last > first else str(first) for first, last in runs[:3]]
    return ", ".join(shown) + (f" and {len(runs) - 3} more runs of" if len(runs) > 3 else "")


def _rows(prover: _Prover, config: ModelConfig, dtype: torch.dtype) -> None:
    """Row reductions: a row alone, and among others at another place."""
    from shared_ops.rmsnorm import kernels as rmsnorm

    spans = [slice(0, 1), slice(7, 8), slice(3, 130), slice(1, 1000)]
    for width in sorted({config.hidden_size, config.head_dim}):
        count = max(1000, 2 * VALUES // width)
        x_RD = prover.random(count, width, dtype=dtype)
        w_D = prover.random(width, dtype=dtype)
        wanted = rmsnorm.forward(x_RD, w_D, config.norm_eps, torch.float32)
        prover.plain(
            "rmsnorm",
            f"width {width}",
            wanted,
            lambda x=x_RD, w=w_D, y=wanted: [
                (rmsnorm.forward(x[s], w, config.norm_eps, torch.float32), y[s])
                for s in (*spans, slice(3, len(x)))
            ],
        )


def _log_softmax(prover: _Prover, vocabulary: int) -> bool:
    """Whether `draw_scored` gives what the ops one by one give."""
    from shared_ops import attest_logprob

    name, generator = f"vocabulary {vocabulary}", prover.generator
    first = next(attest_logprob.reductions(vocabulary, generator))[1]
    prover.plain(
        "log softmax", name, first, lambda: attest_logprob.reductions(vocabulary, generator)
    )
    return prover.keep(
        "log softmax, fused with the draw",
        name,
        lambda: attest_logprob.draws(vocabulary, generator),
    )


def _fused(prover: _Prover, config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether fused launches give the bits of the ops one by one."""
    from shared_ops import attest_fused

    if not can_be(attest_fused.widths_of(config, dtype)):
        return False

    def random(*shape: int) -> Tensor:
        return prover.random(*shape, dtype=dtype)

    name = f"widths {config.hidden_size}, {config.head_dim}"
    verdicts = [
        prover.keep(
            "rmsnorm, fused with the residual", name, lambda: attest_fused.residuals(config, random)
        ),
        prover.keep("rmsnorm, fused with rope", name, lambda: attest_fused.heads(config, random)),
    ]
    if dtype != torch.float32:
        inner = f"{config.hidden_size} -> 2 x {config.intermediate_size}"
        verdicts.append(
            prover.keep(
                "product, fused with swiglu", inner, lambda: attest_fused.gated(config, random)
            )
        )
    return all(verdicts)


def _attention(prover: _Prover, config: ModelConfig, dtype: torch.dtype) -> None:
    """Packed, paged prefill, decode and split decode of the same queries; outputs in float32."""
    from shared_ops.attention import kernels
    from shared_ops.attention.op import PagedLayout

    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    length, page, wide = 2 * kernels.CHUNK + 77, 16, torch.float32
    q_THE = prover.random(length, heads, width, dtype=dtype)
    shape = (-(-length // page), page, kv_heads, width)
    k_pages, v_pages = prover.random(*shape, dtype=dtype), prover.random(*shape, dtype=dtype)
    k_TKE, v_TKE = (x.flatten(0, 1)[:length] for x in (k_pages, v_pages))
    table_1P = torch.arange(len(k_pages), device="cuda").unsqueeze(0)
    name = f"{heads}/{kv_heads} heads of {width}"

    def packed(count: int) -> Tensor:
        q, k, v = (x_TKE[:count] for x_TKE in (q_THE, k_TKE, v_TKE))
        return kernels.packed_forward(q, k, v, [0, count], wide)[0]

    wanted = packed(length)
    prover.plain("attention, packed", name, wanted, lambda: [(packed(length), wanted)])

    def paged(ends: list[int], count: int, split: bool = False) -> tuple[Tensor, Tensor]:
        rows = [slice(end - count, end) for end in ends]
        starts = list(range(0, count * len(ends) + 1, count))
        layout = PagedLayout(starts, ends, table_1P.expand(len(ends), -1))
        q = torch.cat([q_THE[row] for row in rows])
        got = kernels.paged_forward(q, k_pages, v_pages, layout, wide, split)
        return got, torch.cat([wanted[row] for row in rows])

    each = list(range(1, length + 1))
    spans = ((length, length), (1100, 999), (700, 63))
    schedules = {
        "packed, short": lambda: [(packed(kernels.SHORT), wanted[: kernels.SHORT])],
        "decode": lambda: [paged(each, 1)],
        "split decode": lambda: [paged(each, 1, split=True)],
        "prefill": lambda: [paged([end], count) for end, count in spans],
    }
    for schedule, pairs in schedules.items():
        if not prover.keep(f"attention, {schedule}", name, pairs):
            raise AttestationError(
                f"attention {name}: {schedule} and packed rows differ here and there is no other"
                " schedule: this GPU, driver or triton cannot be used exactly"
            )
