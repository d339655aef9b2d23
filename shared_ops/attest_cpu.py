"""What a decoder relies on when it runs on a CPU, checked on the machine and threads in use.

Products choose their schedule here, against the plain one, for every size and layout that the model
needs and every number of threads up to the one in use. The ops are then run with 1 to 512 rows at
random places, and each row must have the bits that it has in a tile of its own at one thread. What
was found is kept in a file, so that the next start on the same machine takes no time.
"""

import hashlib
import itertools
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from shared_ops import cpu_products, elementary
from shared_ops.attention.reference import KV_TILE, packed_backward, packed_forward
from shared_ops.attest_cache import (
    processor,
    processor_name,
    source_digest,
    verdict_of,
    verdict_path,
)
from shared_ops.attest_report import (
    AttestationError,
    Check,
    Report,
    lora_shapes,
    product_shapes,
)
from shared_ops.cpu_products import Call, Proof, count_differing, random_float32
from shared_ops.elementary import square_root
from shared_ops.model.config import ModelConfig
from shared_ops.model.lora_config import LoraConfig
from shared_ops.numerics import require_plain_numerics
from shared_ops.primitives import fixed_product, row_sum, token_product, token_sum

ROWS, FEW_ROWS, TILE = 512, 80, 16
SPANS, FEW_SPANS = 8, 3
WIDE, LARGE = 4096, 1 << 20
ENVIRONMENT = ("MKL_", "OMP_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "OPENBLAS_", "ATEN_CPU_")
# What a schedule may cost, beside the first choice.
COSTS = {"oneDNN": "1 to 3 times", "plain": "50 to 100 times"}
LIBRARY = "the library's"
FUNCTIONS = {
    "exp": elementary.exp,
    "log": lambda x: elementary.log(x.abs()),
    "log of float64": lambda x: elementary.log_of_float64(x.abs().double()),
}
Pair = tuple[Tensor, Tensor]


@contextmanager
def _threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attest_cpu(config: ModelConfig, seed: int = 0, lora: LoraConfig | None = None) -> Report:
    """As `attest.attest`, on this process's CPU.

    Raises:
        NumericsError: a global setting of torch under which no contract holds.
        AttestationError: not even +, *, / and square root are IEEE 754's here.
    """
    require_plain_numerics(torch.device("cpu"))
    path = verdict_path(_key(config, seed, lora))
    verdict = verdict_of(path, lambda: _measure(config, seed, lora))
    calls = {Call(*call): tuple(Proof(*p) for p in tried) for call, tried in verdict["calls"]}
    cpu_products.accept(calls)
    elementary.use_plain(verdict["plain"])
    checks, dropped = ([Check(**each) for each in verdict[k]] for k in ("checks", "dropped"))
    _warn(calls, dropped)
    return Report(tuple(checks), verdict["facts"], verdict["seconds"], tuple(dropped))


def _key(config: ModelConfig, seed: int, lora: LoraConfig | None) -> list[str]:
    """All that a verdict depends on."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT)}
    return [
        "cpu",
        processor(),
        torch.__version__,
        torch.__config__.show(),
        torch.backends.cpu.get_cpu_capability(),
        str(torch.backends.mkldnn.enabled),
        str(torch.get_num_threads()),
        repr(sorted(variables.items())),
        repr(sorted(elementary.in_plain_use())),
        source_digest(),
        repr(config),
        repr(lora_shapes(config, lora)),
        str(seed),
    ]


class _Prover:
    """Collects checks; `wanted` is computed with one thread, what is compared with 1, 2, ..."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.places = random.Random(seed)
        self.checks: list[Check] = []
        self.dropped: list[Check] = []
        self.digests: dict[str, hashlib._Hash] = {}

    def random(self, *shape: int) -> Tensor:
        return random_float32(shape, self.generator)

    def spans(self, rows: int, count: int) -> list[slice]:
        """Runs of rows: one, all, and others of random length and place."""
        sizes = [self.places.randint(1, rows) for _ in range(count)]
        starts = [self.places.randint(0, rows - size) for size in sizes]
        pairs = zip(starts, sizes, strict=True)
        last = self.places.randrange(rows)
        return [slice(last, last + 1), slice(0, rows), *(slice(a, a + n) for a, n in pairs)]

    def note(self, fact: str, values: Tensor) -> None:
        """Let the digest of a fact depend on these values."""
        digest = self.digests.setdefault(fact, hashlib.sha256())
        digest.update(values.contiguous().numpy().tobytes())

    def compare(self, op: str, shape: str, got: Callable[[], Iterable[Pair]]) -> None:
        """got: pairs (values, the same as they are wanted)."""
        values, alone, together = 0, 0, 0
        for threads in range(1, torch.get_num_threads() + 1):
            with _threads(threads):
                for one, other in got():
                    values += other.numel()
                    differing = 0 if torch.equal(one, other) else count_differing(one, other)
                    alone += differing if threads == 1 else 0
                    together += differing
        self.checks.append(Check(op, shape, values, together, of_threads=together - alone))

    def rows(self, op: str, shape: str, x_RK: Tensor, apply: Callable, count: int = SPANS) -> None:
        """Each row of apply(x) by itself, whatever rows are beside it."""
        with _threads(1):
            wanted = torch.cat([apply(tile) for tile in x_RK.split(TILE)])
        spans = self.spans(len(x_RK), count)
        self.note("sums", wanted)
        self.compare(op, shape, lambda: ((apply(x_RK[s]), wanted[s]) for s in spans))


def _measure(config: ModelConfig, seed: int, lora: LoraConfig | None) -> dict:
    start, prover = time.perf_counter(), _Prover(seed)
    _require_ieee(prover)
    plain = [name for name in FUNCTIONS if not _is_elementwise(prover, name)]
    elementary.use_plain(plain)
    for name in FUNCTIONS:
        prover.note(name, FUNCTIONS[name](prover.random(10_007).mul_(6)))
    with cpu_products.recorded() as calls:
        for width, outputs in product_shapes(config) + lora_shapes(config, lora):
            _linear(prover, width, outputs)
        for width in sorted({config.hidden_size, config.head_dim, config.vocab_size}):
            x_RN = prover.random(ROWS if width <= WIDE else FEW_ROWS, width)
            prover.rows("row sum", f"width {width}", x_RN, row_sum)
        _attention(prover, config)
    schedules, dropped = _schedules(calls)
    return {
        "checks": [vars(check) for check in [*schedules, *prover.checks]],
        "dropped": [vars(check) for check in [*dropped, *prover.dropped]],
        "facts": {name: digest.hexdigest() for name, digest in prover.digests.items()},
        "calls": [(call, tried) for call, tried in calls.items()],
        "plain": plain,
        "seconds": time.perf_counter() - start,
    }


def _require_ieee(prover: _Prover) -> None:
    """One rounding of the exact value: what a float64 result is rounded to (Figueroa 1995)."""
    a_N, b_N = prover.random(10_007), prover.random(10_007)
    a_N[:1000] *= 2.0**-130
    wide = {
        "+": (a_N + b_N, a_N.double() + b_N.double()),
        "*": (a_N * b_N, a_N.double() * b_N.double()),
        "/": (a_N / b_N, a_N.double() / b_N.double()),
        "reciprocal": (a_N.reciprocal(), 1.0 / a_N.double()),
        "square root": (square_root(a_N.abs()), torch.from_numpy(numpy.sqrt(a_N.abs().numpy()))),
    }
    for name, (got_N, wide_N) in wide.items():
        differing = int((got_N != wide_N.float()).sum())
        prover.checks.append(Check(f"IEEE 754 {name}", "any place", len(got_N), differing))
        if differing:
            raise AttestationError(
                f"{name} of float32 is not IEEE 754's here ({differing} of {len(got_N)} values):"
                " nothing can be computed exactly with this processor, torch or setting"
            )


def _is_elementwise(prover: _Prover, name: str) -> bool:
    """Whether an element's bits do not depend on its place in the array (vector body or tail)."""
    function = FUNCTIONS[name]
    x_N = prover.random(100_003) * 6
    with _threads(1):
        wanted = function(x_N)
    lengths = (1, 5, 31, 1000, 2049, 70_001)
    spans = [slice(first, first + n) for n in lengths for first in (0, 1, 7)]
    prover.compare(
        name, "any place", lambda: ((function(x_N[s].clone()), wanted[s]) for s in spans)
    )
    is_broken = prover.checks[-1].differing > 0
    if is_broken:
        prover.dropped.append(replace(prover.checks.pop(), op=f"{LIBRARY} {name}"))
    return not is_broken


def _linear(prover: _Prover, width: int, outputs: int) -> None:
    """Forward and both gradients of y = x w^T."""
    shape, is_large = f"{width} -> {outputs}", width * outputs > LARGE
    rows, spans = (FEW_ROWS, FEW_SPANS) if is_large else (ROWS, SPANS)
    x_MK, w_NK = prover.random(rows, width), prover.random(outputs, width)
    dy_MN = prover.random(rows, outputs)
    prover.rows("linear", shape, x_MK, lambda x: fixed_product(x, w_NK.T), spans)
    prover.rows("linear, dx", shape, dy_MN, lambda dy: fixed_product(dy, w_NK), spans)
    with _threads(1):
        wanted = token_product(dy_MN, x_MK), token_sum(dy_MN)
    prover.note("sums", wanted[0])
    prover.compare(
        "linear, dw and dbias",
        shape,
        lambda: zip((token_product(dy_MN, x_MK), token_sum(dy_MN)), wanted, strict=True),
    )


def _attention(prover: _Prover, config: ModelConfig) -> None:
    """Sequences alone and beside one another, forward and backward."""
    lens = [1, 2, KV_TILE, 3 * KV_TILE + 5, 17, KV_TILE + 1]
    edges = [0, *itertools.accumulate(lens)]
    heads, width = (config.num_heads, config.num_kv_heads, config.num_kv_heads), config.head_dim
    qkv = [prover.random(edges[-1], count, width) for count in heads]
    do_THE = prover.random(edges[-1], heads[0], width)

    def run(first: int, end: int) -> list[Tensor]:
        rows = slice(edges[first], edges[end])
        starts = [edge - edges[first] for edge in edges[first : end + 1]]
        q_THE, k_TKE, v_TKE = (x[rows] for x in qkv)
        o_THE, lse_TH = packed_forward(q_THE, k_TKE, v_TKE, starts)
        kept = q_THE, k_TKE, v_TKE, o_THE, lse_TH
        return [o_THE, lse_TH, *packed_backward(do_THE[rows], *kept, starts)]

    with _threads(1):
        alone = [run(index, index + 1) for index in range(len(lens))]
    forward = [torch.cat(parts) for parts in zip(*(each[:2] for each in alone), strict=True)]
    shape = f"{heads[0]}/{heads[1]} heads of {width}"
    spans = [(0, len(lens)), (1, 4), (3, 6)]
    prover.compare(
        "attention",
        shape,
        lambda: (
            (got, wanted[edges[first] : edges[end]])
            for first, end in spans
            for got, wanted in zip(run(first, end), forward, strict=False)
        ),
    )
    with _threads(1):
        together = run(0, len(lens))[2:]
    prover.compare(
        "attention, gradients", shape, lambda: zip(run(0, len(lens))[2:], together, strict=True)
    )


def _schedules(calls: dict[Call, tuple[Proof, ...]]) -> tuple[list[Check], list[Check]]:
    """Of every schedule in use: for how many calls, and the values compared with the plain one's;
    and what was passed over."""
    chosen, dropped = {}, []
    for call, tried in calls.items():
        *others, last = tried
        count, values = chosen.get(last.schedule, (0, 0))
        chosen[last.schedule] = count + 1, values + last.values
        dropped += [Check(p.schedule, str(call), p.values, p.differing) for p in others]
    return [
        Check(f"{name} against plain", f"{count} calls", values, 0)
        for name, (count, values) in chosen.items()
        if values
    ], dropped


def _warn(calls: dict[Call, tuple[Proof, ...]], dropped: list[Check]) -> None:
    """One line for each thing that is not used: what runs in its place, and what that costs."""
    where = f"on {processor_name()} with {torch.get_num_threads()} threads"
    replaced: dict[tuple[str, str], list[Call]] = {}
    for call, tried in calls.items():
        for passed_over in tried[:-1]:
            key = passed_over.schedule, tried[-1].schedule
            replaced.setdefault(key, []).append(call)
    for (library, other), members in replaced.items():
        warnings.warn(
            f"{library} sums {len(members)} kinds of product in another order {where} (such as"
            f" {members[0]}): {other} runs there, which takes {COSTS[other]} as long",
            stacklevel=3,
        )
    for check in dropped:
        if check.op.startswith(LIBRARY):
            warnings.warn(
                f"{check.op} depends on an element's place {where} ({check.differing} of"
                f" {check.values} values): a plain one runs, which takes 20 times as long",
                stacklevel=3,
            )
