"""Times of the CUDA ops beside torch's own, both in one run; a table and a small JSON file.

Device events, median of many, warm-up left out, the L2 cache flushed before each call, random
data. Forward ops are replayed from a CUDA graph, as an engine would; backward ones are launched.
Schedules are those that the attestation of the model's shapes allows. "floor" is the larger of
bytes at 4.25 TB/s and products at 790 TFLOP/s, what one H200 was measured to reach.

Example: python -m benchmarks.bench_ops --output benchmarks/results/ops_h200.json
"""

import argparse
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_ops import ordinary
from shared_ops.attention.op import PagedLayout, packed_attention, paged_attention
from shared_ops.attest_cache import driver_version
from shared_ops.attest_cuda import attest_cuda
from shared_ops.cuda import require_triton
from shared_ops.embedding.op import embedding
from shared_ops.linear.op import linear
from shared_ops.logprob.op import scaled_logits, select_logprobs, token_logprobs
from shared_ops.model.config import ModelConfig, RopeConfig
from shared_ops.rmsnorm.op import rmsnorm
from shared_ops.rope.op import rope
from shared_ops.sample.op import draw
from shared_ops.swiglu.op import swiglu

BYTES_PER_S, FLOP_PER_S = 4.25e12, 790e12
DTYPE = torch.bfloat16
PAGE = 16


class Model(NamedTuple):
    """The shapes of a decoder's layer that matter here."""

    name: str
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int


MODELS = (
    Model("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936),
    Model("Qwen3-8B", 4096, 12288, 32, 8, 128, 151936),
)


class Case(NamedTuple):
    """One op at one shape: two ways to compute it, and the time that no version can undercut."""

    op: str
    shape: str
    ours: Callable[[], object]
    torchs: Callable[[], object]
    floor_us: float
    is_captured: bool = True


def config_of(model: Model) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        num_layers=1,
        hidden_size=model.width,
        intermediate_size=model.inner,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_width,
        vocab_size=model.vocabulary,
        max_positions=40960,
        norm_eps=1e-6,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        rope=RopeConfig("default", 1e6),
    )


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def floor(nbytes: float, flop: float = 0.0) -> float:
    return max(nbytes / BYTES_PER_S, flop / FLOP_PER_S) * 1e6


def linear_cases(model: Model) -> Iterator[Case]:
    qkv = (model.heads + 2 * model.kv_heads) * model.head_width
    products = {
        "qkv": (model.width, qkv),
        "output": (model.heads * model.head_width, model.width),
        "gate up": (model.width, 2 * model.inner),
        "down": (model.inner, model.width),
    }
    for name, (depth, columns) in products.items():
        w_NK = randn(columns, depth) / math.sqrt(depth)
        for rows in (8, 64, 256, 4096):
            x_TK = randn(rows, depth)
            nbytes = 2 * (depth * columns + rows * (depth + columns))
            yield Case(
                "linear",
                f"{model.name} {name}, {rows} rows",
                lambda x=x_TK, w=w_NK: linear(x, w),
                lambda x=x_TK, w=w_NK: F.linear(x, w),
                floor(nbytes, 2 * rows * depth * columns),
            )


def row_cases(model: Model) -> Iterator[Case]:
    for rows in (256, 8192):
        x_TD, w_D = randn(rows, model.width), randn(model.width)
        gate_up = randn(rows, 2 * model.inner)
        q_THE = randn(rows, model.heads, model.head_width)
        cos, sin = (randn(rows, model.head_width // 2, dtype=torch.float32) for _ in range(2))
        name = f"{model.name}, {rows} rows"
        yield Case(
            "rmsnorm",
            name,
            lambda x=x_TD, w=w_D: rmsnorm(x, w, 1e-6),
            lambda x=x_TD, w=w_D: ordinary.rmsnorm(x, w, 1e-6),
            floor(4 * x_TD.numel()),
        )
        yield Case(
            "swiglu",
            name,
            lambda x=gate_up: swiglu(x),
            lambda x=gate_up: ordinary.swiglu(x),
            floor(3 * gate_up.numel()),
        )
        yield Case(
            "rope of queries",
            name,
            lambda x=q_THE, c=cos, s=sin: rope(x, c, s),
            lambda x=q_THE, c=cos, s=sin: ordinary.rope(x, c, s),
            floor(4 * q_THE.numel() + 8 * cos.numel()),
        )


def decode_cases(model: Model) -> Iterator[Case]:
    heads, kv_heads, width = model.heads, model.kv_heads, model.head_width
    for sequences, context in ((256, 384), (8, 384), (8, 8192), (1, 32768)):
        pages = context // PAGE
        k, v = (randn(sequences * pages, PAGE, kv_heads, width) for _ in "kv")
        k_BKSE, v_BKSE = (randn(sequences, kv_heads, context, width) for _ in "kv")
        q_BHE = randn(sequences, heads, width)
        q_BH1E = q_BHE.unsqueeze(2)
        table_BP = torch.randperm(sequences * pages, device="cuda").view(sequences, pages)
        layout = PagedLayout(list(range(sequences + 1)), [context] * sequences, table_BP)
        yield Case(
            "paged decode (torch: contiguous)",
            f"{model.name}, {sequences} x {context}",
            lambda q=q_BHE, k=k, v=v, layout=layout: paged_attention(q, k, v, layout),
            lambda q=q_BH1E, k=k_BKSE, v=v_BKSE: F.scaled_dot_product_attention(
                q, k, v, enable_gqa=True
            ),
            floor(4 * sequences * context * kv_heads * width),
        )


def packed_cases(model: Model) -> Iterator[Case]:
    heads, kv_heads, width = model.heads, model.kv_heads, model.head_width
    for sequences, length in ((1, 3000), (16, 600)):
        tokens = sequences * length
        leaves = [randn(tokens, n, width).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        starts = list(range(0, tokens + 1, length))
        batched = [
            leaf.detach().view(sequences, length, -1, width).transpose(1, 2).requires_grad_()
            for leaf in leaves
        ]
        name = f"{model.name}, {sequences} x {length}"
        flop = 2 * sequences * heads * width * length * length
        nbytes = 4 * tokens * (heads + kv_heads) * width

        def ours(leaves=leaves, starts=starts) -> Tensor:
            return packed_attention(leaves[0], leaves[1], leaves[2], starts)

        def torchs(batched=batched) -> Tensor:
            return F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)

        yield Case("packed attention", name, ours, torchs, floor(nbytes, flop))
        yield Case(
            "packed attention backward",
            name,
            backward_of(ours, leaves),
            backward_of(torchs, batched),
            floor(3 * nbytes, 2.5 * flop),
            is_captured=False,
        )


def backward_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
    out = forward()
    direction = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, direction, retain_graph=True)


def head_cases(model: Model) -> Iterator[Case]:
    vocabulary, width = model.vocabulary, model.width
    head_VD = (randn(vocabulary, width) / math.sqrt(width)).requires_grad_()
    for rows in (8, 256):
        hidden, ones = randn(rows, width), torch.ones(rows, device="cuda")
        keys = torch.randint(0, 1 << 32, (rows, 2), device="cuda")
        positions = torch.arange(rows, device="cuda")

        def ours(hidden=hidden, ones=ones, keys=keys, positions=positions):
            logits = scaled_logits(hidden, head_VD.detach(), ones, vocabulary)
            tokens = draw(logits, keys, positions)
            return tokens, select_logprobs(logits, tokens)

        def torchs(hidden=hidden, ones=ones):
            logits = ordinary.scaled_logits(hidden, head_VD.detach(), ones, vocabulary)
            noise = torch.empty_like(logits).exponential_().log_()
            tokens = (logits - noise).argmax(-1)
            return tokens, ordinary.select_logprobs(logits, tokens)

        nbytes = 2 * head_VD.numel() + 4 * rows * vocabulary
        name = f"{model.name}, {rows} rows"
        yield Case("head, draw, logprob", name, ours, torchs, floor(nbytes))
    yield from trained_head_cases(model, head_VD)


def trained_head_cases(model: Model, head_VD: Tensor) -> Iterator[Case]:
    tokens, vocabulary = 4096, model.vocabulary
    hidden = randn(tokens, model.width).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    given = (targets, torch.ones(tokens, device="cuda"), vocabulary)
    flop = 2 * tokens * head_VD.numel()
    name = f"{model.name}, {tokens} tokens"

    def step(op) -> object:
        logprobs_T, _ = op(hidden, head_VD, *given)
        return torch.autograd.grad(logprobs_T.sum(), (hidden, head_VD))

    yield Case(
        "token logprobs, forward + backward",
        name,
        lambda: step(token_logprobs),
        lambda: step(ordinary.token_logprobs),
        floor(0, 3 * flop),
        is_captured=False,
    )
    ids = torch.randint(0, vocabulary, (8192,), device="cuda")
    ours, torchs = embedding(ids, head_VD), F.embedding(ids, head_VD)
    direction = torch.randn_like(ours)
    yield Case(
        "embedding backward",
        f"{model.name}, 8192 tokens",
        lambda: torch.autograd.grad(ours, head_VD, direction, retain_graph=True),
        lambda: torch.autograd.grad(torchs, head_VD, direction, retain_graph=True),
        floor(2 * head_VD.numel() + 4 * direction.numel()),
        is_captured=False,
    )


def replay_of(run: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    return graph.replay


def measure(run: Callable[[], object], is_captured: bool, milliseconds: int) -> float:
    """Median microseconds."""
    do_bench = importlib.import_module("triton.testing").do_bench
    run = replay_of(run) if is_captured else run
    return do_bench(run, warmup=5, rep=milliseconds, return_mode="median") * 1e3


def commit_of(given: str | None) -> str:
    if given:
        return given
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found


def environment(commit: str | None) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": require_triton(),
        "commit": commit_of(commit),
    }


def attested_of(model: Model) -> dict[str, float]:
    report = attest_cuda(config_of(model), DTYPE)
    report.raise_if_broken()
    found = {
        "seconds": round(report.seconds, 2),
        "values": sum(check.values for check in report.checks),
        "dropped": len(report.dropped),
    }
    print(f"{model.name} attested:", ", ".join(f"{key} {value:,}" for key, value in found.items()))
    return found


def run_all(models: tuple[Model, ...], milliseconds: int) -> list[dict]:
    makers = (linear_cases, row_cases, decode_cases, packed_cases, head_cases)
    rows = []
    print(f"{'op':<36}{'shape':<36}{'ours':>10}{'torch':>10}{'floor':>10}{'torch/ours':>12}")
    for case in (case for model in models for make in makers for case in make(model)):
        ours, torchs = (
            measure(run, case.is_captured, milliseconds) for run in (case.ours, case.torchs)
        )
        row = {"op": case.op, "shape": case.shape, "ours_us": ours, "torch_us": torchs}
        rows.append({k: v if isinstance(v, str) else round(v, 1) for k, v in row.items()})
        rows[-1]["floor_us"] = round(case.floor_us, 1)
        print(
            f"{case.op:<36}{case.shape:<36}{ours:>10.1f}{torchs:>10.1f}{case.floor_us:>10.1f}"
            f"{torchs / ours:>12.2f}",
            flush=True,
        )
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_ops", description=__doc__)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="default: git's HEAD")
    parser.add_argument("--model", choices=[model.name for model in MODELS])
    parser.add_argument("--milliseconds", type=int, default=25, help="of measuring, each")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device here: run this on a machine with one", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    models = tuple(model for model in MODELS if options.model in (None, model.name))
    found = environment(options.commit)
    print(", ".join(f"{key} {value}" for key, value in found.items()), "- microseconds")
    attested = {model.name: attested_of(model) for model in models}
    rows = run_all(models, options.milliseconds)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result = {**found, "attestation": attested, "unit": "us", "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
