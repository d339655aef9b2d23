"""Proof, on the machine in use, that the schedules obey their contracts.

A contract rests on facts about libraries that another processor, thread count or version may
break. `attest` checks every fact that a model of the given shape relies on, bit for bit in
float32 on random data, before the first token. It also returns a fingerprint of the results: a
sampler and a trainer whose fingerprints differ do not compute the same function (two kinds of
processor in one cluster, say), and must not start.

`python -m shared_ops.attest FOLDER [--device cuda --dtype bfloat16]` prints the table. What is
checked on a GPU is in `attest_cuda.py`.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from shared_ops.attention.reference import KV_TILE, tile_scores
from shared_ops.attention.reference import ROW_TILE as ATTENTION_ROWS
from shared_ops.attest_report import AttestationError, Check, Report, lora_shapes, product_shapes
from shared_ops.cpu_products import batched_product
from shared_ops.model.config import ModelConfig
from shared_ops.model.lora_config import LoraConfig
from shared_ops.primitives import ROW_TILE, fixed_product, row_sum, token_product

ROW_COUNTS = (1, 3, 16, 17, 80, 144)
CHECK_LIMIT = 1 << 20


@contextmanager
def _threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Prover:
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.checks: list[Check] = []
        self.digest = hashlib.sha256()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def compare(self, op: str, shape: str, wanted: Tensor, variants: Callable[[], list]) -> None:
        """`variants` returns (got, rows) pairs, computed with 1 thread and with all of them."""
        values = differing = 0
        for threads in sorted({1, torch.get_num_threads()}):
            with _threads(threads):
                for got, rows in variants():
                    values += got.numel()
                    same = got.contiguous().view(torch.int32) == wanted[rows].view(torch.int32)
                    differing += int((~same | got.isnan()).sum())
        self.checks.append(Check(op, shape, values, differing))
        self.digest.update(wanted.contiguous().numpy().tobytes())


def _linear(prover: _Prover, width: int, outputs: int) -> None:
    rows = ROW_COUNTS if width * outputs <= CHECK_LIMIT else ROW_COUNTS[:4]
    x_MK, w_NK = prover.random(max(rows) + ROW_TILE, width), prover.random(outputs, width)
    with _threads(1):
        tiles = [fixed_product(tile, w_NK.T) for tile in x_MK.split(ROW_TILE)]
    spans = [slice(first, first + count) for count in rows for first in (0, ROW_TILE - 1)]
    prover.compare(
        "linear",
        f"{width} -> {outputs}",
        torch.cat(tiles),
        lambda: [(fixed_product(x_MK[span], w_NK.T), span) for span in spans],
    )


def _weight_gradient(prover: _Prover, width: int, outputs: int) -> None:
    dy_TN, x_TK = prover.random(300, outputs), prover.random(300, width)
    with _threads(1):
        wanted = token_product(dy_TN, x_TK)
    prover.compare(
        "linear backward",
        f"{width} -> {outputs}",
        wanted,
        lambda: [(token_product(dy_TN, x_TK), slice(None))],
    )


def _row_sum(prover: _Prover, width: int) -> None:
    x_RN = prover.random(40, width)
    with _threads(1):
        wanted = torch.cat([row_sum(row) for row in x_RN.split(1)])
    spans = [slice(0, count) for count in (1, 2, 7, 40)]
    prover.compare(
        "row sum", f"width {width}", wanted, lambda: [(row_sum(x_RN[s]), s) for s in spans]
    )


def _elementwise(prover: _Prover, name: str, function: Callable[[Tensor], Tensor]) -> None:
    """An element's bits must not depend on its place in the array (vector body or tail)."""
    x_N = prover.random(100_003) * 6
    with _threads(1):
        wanted = function(x_N)
    lengths = (1, 5, 31, 1000, 2049, 70_001)
    spans = [slice(first, first + n) for n in lengths for first in (0, 1, 7)]
    prover.compare(
        name, "any place", wanted, lambda: [(function(x_N[s].clone()), s) for s in spans]
    )


def _attention(prover: _Prover, width: int) -> None:
    batch, rows = 6, 8 * ATTENTION_ROWS
    left_BRK = {n: prover.random(batch, rows, n) for n in (width, KV_TILE)}
    k_BNE, v_BNE = prover.random(batch, KV_TILE, width), prover.random(batch, KV_TILE, width)
    products = {
        "scores": (tile_scores, left_BRK[width], k_BNE),
        "values": (batched_product, left_BRK[KV_TILE], v_BNE),
    }
    edges = list(pairwise(range(0, rows + 1, ATTENTION_ROWS)))
    for name, (product, left, right) in products.items():
        with _threads(1):
            singles = [
                product(left[b : b + 1, i:j].contiguous(), right[b : b + 1])[0]
                for b in range(batch)
                for i, j in edges
            ]
        spans = [(b, r) for b in (1, 2, 5, 6) for r in (ATTENTION_ROWS, 3 * ATTENTION_ROWS, rows)]
        prover.compare(
            f"attention {name}",
            f"head width {width}",
            torch.stack(singles).view(batch, rows, -1),
            lambda product=product, left=left, right=right, spans=spans: [
                (product(left[:b, :r].contiguous(), right[:b]), (slice(0, b), slice(0, r)))
                for b, r in spans
            ],
        )


def attest(
    config: ModelConfig,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    lora: LoraConfig | None = None,
) -> Report:
    """Check every fact that a decoder of this shape relies on, on the device in use.

    Args:
        config: the model's shape.
        seed: of the random data; both sides of a run must use the same one.
        device: "cpu" or "cuda" (the current one).
        dtype: on CUDA, of weights and activations; a CPU computes in float32 whatever it is.
        lora: settled settings of adapters; their products are checked as well.

    Returns:
        The checks and their fingerprint; call `raise_if_broken` on it.

    Raises:
        DeviceError: the GPU is too old, or triton is missing or too old.
        AttestationError: on CUDA, the plain schedule of an op is not reproducible.
    """
    if torch.device(device).type == "cuda":
        from shared_ops.attest_cuda import attest_cuda

        return attest_cuda(config, getattr(torch, dtype), seed, lora)
    start = time.perf_counter()
    prover = _Prover(seed)
    for width, outputs in product_shapes(config) + lora_shapes(config, lora):
        _linear(prover, width, outputs)
        if width * outputs <= CHECK_LIMIT:
            _weight_gradient(prover, width, outputs)
    for width in sorted({config.hidden_size, config.head_dim, config.vocab_size, KV_TILE}):
        _row_sum(prover, width)
    _elementwise(prover, "exp", torch.exp)
    _elementwise(prover, "log", lambda x: torch.log(x.abs()))
    _elementwise(prover, "log of float64", lambda x: torch.log(x.abs().double()).float())
    _attention(prover, config.head_dim)
    seconds = time.perf_counter() - start
    return Report(tuple(prover.checks), prover.digest.hexdigest(), seconds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m shared_ops.attest")
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args(arguments)
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    try:
        report = attest(ModelConfig.from_folder(options.model), 0, options.device, dtype)
    except (ValueError, AttestationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'op':<32} {'shape':<24} {'values':>14} {'differing':>10}")
    for check in (*report.checks, *report.dropped):
        print(f"{check.op:<32} {check.shape:<24} {check.values:>14,} {check.differing:>10,}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {report.seconds:.2f} s")
    print(f"fingerprint {report.fingerprint}")
    return int(any(check.differing for check in report.checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
