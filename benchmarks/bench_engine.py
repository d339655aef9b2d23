"""Output tokens per second of the rollout engine, exact and unconstrained, in one run.

Random weights of the model's shape, bfloat16, temperature 1, logprobs returned, no early stop, no
shared prefixes, fresh prompts each time; the first tokens of each workload are run beforehand.

"unconstrained" is the same engine with every matrix product left to cuBLAS as it likes, split K
included; split-KV attention goes by load on both sides. `EngineConfig(exact=False)` would be no
fair opponent here: its attention is a Python loop over sequences. Bits are then compared: every
logprob that the exact engine drew with, against the trainer's packed forward.

Example: python -m benchmarks.bench_engine --model Qwen3-0.6B \\
    --output benchmarks/results/engine_h200.json
"""

import argparse
import contextlib
import gc
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.bench_ops import environment
from benchmarks.random_models import LAYERS, make_folder, replace_files
from rollout import Completion, Engine, EngineConfig, SamplingParams
from rollout.graphs import carve
from trainer import TrainSample
from trainer.packing import pack, split_samples
from trainer.parity import compare
from trainer.score import Scorer


class Workload(NamedTuple):
    """`requests` prompts of `prompt` tokens, each continued by `output` tokens."""

    requests: int
    prompt: int
    output: int


class Anchors(NamedTuple):
    """Output tokens per second of the same workload elsewhere, and what is aimed at."""

    vllm: int
    vllm_invariant: int
    floor: int
    target: int
    stretch: int


BIG, MIDDLE, SMALL = Workload(1000, 64, 100), Workload(256, 128, 512), Workload(8, 128, 256)
# vLLM 0.24.0 on an H200: FlashAttention 3, torch.compile, CUDA graphs; its batch-invariant mode.
ANCHORS = {
    ("Qwen3-0.6B", BIG): Anchors(27_400, 18_700, 240_000, 60_000, 100_000),
    ("Qwen3-0.6B", MIDDLE): Anchors(38_100, 28_900, 88_000, 57_000, 72_000),
    ("Qwen3-0.6B", SMALL): Anchors(4_300, 2_000, 23_000, 7_000, 10_000),
    ("Qwen3-8B", BIG): Anchors(16_400, 15_400, 28_000, 20_000, 24_000),
    ("Qwen3-8B", MIDDLE): Anchors(17_200, 13_800, 31_000, 22_000, 26_000),
    ("Qwen3-8B", SMALL): Anchors(1_400, 420, 2_200, 1_700, 1_900),
}
WARM_UP = 8
ENGINE = EngineConfig(
    device="cuda",
    dtype="bfloat16",
    max_sequences=1024,
    max_batch_tokens=16384,
    prefill_chunk=4096,
)


@contextlib.contextmanager
def library_everywhere() -> Iterator[None]:
    """Every product in one cuBLAS call, whatever order it sums in."""
    products = importlib.import_module("shared_ops.products")
    with (
        mock.patch.object(products, "choose", lambda rows, shape: None),
        mock.patch.object(products, "library_limit", lambda depth, columns: products.NEVER),
    ):
        yield


def prompts_of(work: Workload, vocabulary: int, seed: int) -> list[list[int]]:
    source = random.Random(f"{work} {seed}")
    return [
        [source.randrange(vocabulary) for _ in range(work.prompt)] for _ in range(work.requests)
    ]


def rollout(engine: Engine, work: Workload, seed: int) -> tuple[float, list[Completion]]:
    """Seconds from the first request to the last completion, and the completions."""
    prompts = prompts_of(work, engine.model_config.vocab_size, seed)
    params = SamplingParams(max_tokens=work.output, ignore_eos=True, seed=seed)
    torch.cuda.synchronize()
    began = time.perf_counter()
    groups = engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    return seconds, [completion for group in groups for completion in group]


def measure(engine: Engine, work: Workload, repeats: int) -> tuple[list[float], list[Completion]]:
    """Tokens per second of each repeat, and the last completions."""
    rollout(engine, work._replace(output=WARM_UP), seed=0)
    rates, completions = [], []
    for seed in range(1, repeats + 1):
        seconds, completions = rollout(engine, work, seed)
        rates.append(work.requests * work.output / seconds)
    return rates, completions


def mixed(engine: Engine, requests: int, longest: int) -> list[Completion]:
    """Prompts of 1 to `longest` tokens, half of them beginning alike, joining a few at a time."""
    source = random.Random(0)
    vocabulary = engine.model_config.vocab_size
    shared = [source.randrange(vocabulary) for _ in range(longest)]
    done: list[Completion] = []
    for index in range(requests):
        length = source.randrange(1, longest)
        common = source.randrange(length) if index % 2 else 0
        prompt = [*shared[:common], *(source.randrange(vocabulary) for _ in range(length - common))]
        engine.add_request(
            prompt, SamplingParams(max_tokens=source.randrange(20, 120), ignore_eos=True, n=2)
        )
        for _ in range(source.randrange(3)):
            done += engine.step()
    while engine.has_work:
        done += engine.step()
    return done


def differing(engine: Engine, completions: list[Completion], tokens: int) -> tuple[int, int]:
    """Logprobs compared with the trainer's packed forward, and how many differ in any bit.

    Gradients stay enabled, as in training: without them a forward takes fused launches too.
    """
    samples = [
        TrainSample(one.prompt_ids, one.token_ids, one.logprobs, 0.0, one.policy_versions)
        for one in completions
    ]
    scorer, compared, other = Scorer(engine.model, engine.vocab_limit), 0, 0
    for chosen in split_samples([sample.length for sample in samples], tokens):
        logprobs_N, _ = scorer.score(pack(samples, chosen, engine.device))
        drawn = [value for index in chosen for value in samples[index].behaviour_logprobs]
        report = compare(torch.tensor(drawn), logprobs_N.cpu())
        compared, other = compared + report.tokens_compared, other + report.tokens_differing
    return compared, other


@torch.inference_mode()
def replay_ms(engine: Engine, context: int = 384) -> dict[str, float]:
    """Device time of captured steps, every row at one context; the pages are of no use afterwards.

    Without the host, so what the wall clock says beyond it is the host's.
    """
    graphs = engine.graphs
    assert graphs is not None
    found = {}
    for (rows, bound, _), graph in sorted(graphs._graphs.items()):
        if rows not in (8, 256, graphs.max_rows - 24, graphs.max_rows):
            continue
        inputs, _ = carve(graphs._inputs, rows, graphs._pages(bound))
        graphs._pad(inputs)
        pages = torch.arange(inputs.table_BP.numel(), device=engine.device) % graphs.spare_page
        inputs.table_BP.copy_(pages.view_as(inputs.table_BP))
        inputs.contexts_B.fill_(context)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        graph.replay()
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        found[f"{rows} rows, context {context}, captured up to {bound}"] = round(
            start.elapsed_time(end) / 20, 3
        )
    return found


def exact_side(folder: Path, name: str, works: list[Workload], options) -> tuple[dict, dict, dict]:
    """Rates by workload, bits, and device times of the captured steps."""
    engine = Engine(folder, ENGINE)
    rates, bits = {}, {"tokens_compared": 0, "tokens_differing": 0}
    for work in works:
        rates[work], completions = measure(engine, work, options.repeats)
        print(
            f"{name} exact {work}:", ", ".join(f"{rate:,.0f}" for rate in rates[work]), flush=True
        )
        count(bits, differing(engine, completions, 16384))
    if options.mixed:
        count(bits, differing(engine, mixed(engine, options.mixed, 2000), 16384))
    print(f"{name} bits:", bits, flush=True)
    return rates, bits, replay_ms(engine)


def count(bits: dict[str, int], found: tuple[int, int]) -> None:
    bits["tokens_compared"] += found[0]
    bits["tokens_differing"] += found[1]


def unconstrained_side(folder: Path, works: list[Workload], options) -> tuple[dict, dict]:
    """Rates by workload and device times, with every product left to the library."""
    with library_everywhere():
        engine = Engine(folder, ENGINE)
        rates = {}
        for work in works:
            rates[work], _ = measure(engine, work, options.repeats)
            print(f"unconstrained {work}:", ", ".join(f"{r:,.0f}" for r in rates[work]), flush=True)
        return rates, replay_ms(engine)


def row_of(name: str, work: Workload, exact: list[float], free: list[float]) -> dict:
    anchors = ANCHORS[name, work]
    medians = statistics.median(exact), statistics.median(free) if free else None
    return {
        "model": name,
        "workload": f"{work.requests} x {work.prompt} -> {work.output}",
        "exact": round(medians[0]),
        "unconstrained": medians[1] and round(medians[1]),
        "exact_over_unconstrained": medians[1] and round(medians[0] / medians[1], 3),
        "runs_exact": [round(rate) for rate in exact],
        "runs_unconstrained": [round(rate) for rate in free],
        **anchors._asdict(),
    }


def show(rows: list[dict]) -> None:
    columns = {
        "model": 12, "workload": 18, "exact": 9, "unconstrained": 14,
        "exact_over_unconstrained": 26, "target": 9, "stretch": 9, "floor": 9, "vllm": 9,
        "vllm_invariant": 15,
    }  # fmt: skip
    print("output tokens per second")
    print("".join(f"{name:<{width}}" for name, width in columns.items()))
    for row in rows:
        cells = (f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in columns)
        print(
            "".join(f"{cell!s:<{columns[name]}}" for name, cell in zip(columns, cells, strict=True))
        )


def run_model(name: str, works: list[Workload], options) -> tuple[list[dict], dict]:
    with tempfile.TemporaryDirectory() as base, replace_files():
        folder = make_folder(name, Path(base))
        exact, bits, exact_ms = exact_side(folder, name, works, options)
        gc.collect()
        torch.cuda.empty_cache()
        free, free_ms = {work: [] for work in works}, {}
        if not options.exact_only:
            free, free_ms = unconstrained_side(folder, works, options)
        torch.cuda.empty_cache()
    rows = [row_of(name, work, exact[work], free[work]) for work in works]
    return rows, {"bits": bits, "step_ms": exact_ms, "step_ms_unconstrained": free_ms}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_engine", description=__doc__)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="default: git's HEAD")
    parser.add_argument("--model", choices=list(LAYERS), help="default: both")
    parser.add_argument("--workloads", default="0,1,2", help="of the table, by number")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--mixed", type=int, default=300, help="requests of mixed lengths, for bits"
    )
    parser.add_argument("--exact-only", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device here: run this on a machine with one", file=sys.stderr)
        return 1
    works = [(BIG, MIDDLE, SMALL)[int(number)] for number in options.workloads.split(",")]
    rows, details = [], {}
    for name in [options.model] if options.model else list(LAYERS):
        new, details[name] = run_model(name, works, options)
        rows += new
    show(rows)
    print(json.dumps(details, indent=1))
    if options.output:
        result = {**environment(options.commit), "unit": "output tokens/s", "rows": rows, **details}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
