"""Output tokens per second of the rollout engine, exact and unconstrained, in one run.

Random weights of the model's shape, bfloat16, temperature 1, logprobs returned, no early stop, no
shared prefixes, fresh prompts each time; the first tokens of each workload are run beforehand.

"unconstrained" is the same engine with `exact=False`: every matrix product is left to cuBLAS as it
likes, split K included, and attention is split by load; so the ratio is what exactness costs.

Bits: every logprob that the exact engine drew with, in every repeat, is compared with a packed
forward over weights of its own, between the timed parts. Then a mixed load (mixed_load.py) of
another engine, with joins, prefix hits, preemptions and weight updates in flight. The same
comparison of what the unconstrained engine drew is the control: it must find differing tokens.

Example: python -m benchmarks.bench_engine --model Qwen3-0.6B \\
    --output benchmarks/results/engine_h200.json
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import mixed_load
from benchmarks.bench_ops import environment
from benchmarks.engine_bits import Bits, bits_of, by_ingredient, policy, total
from benchmarks.random_models import make_folder, replace_files
from rollout import Completion, Engine, EngineConfig, SamplingParams
from rollout.graphs import carve
from shared_ops.model.weights import make_manifest


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
    page_size=64,
)
# So few pages that the flood of the mixed load does not fit once it has grown.
MIXED = EngineConfig(
    device="cuda",
    dtype="bfloat16",
    max_sequences=512,
    max_batch_tokens=4096,
    num_pages=3800,
)
CONTROL_TOKENS = 30_000


class Side(NamedTuple):
    """Output tokens a second by workload, bits by workload, device times of the captured steps."""

    rates: dict[Workload, list[float]]
    bits: dict[str, Bits]
    step_ms: dict[str, float]


NO_SIDE = Side({}, {}, {})


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


def measure(
    engine: Engine, work: Workload, repeats: int, look: Callable[[int, list[Completion]], object]
) -> list[float]:
    """Tokens per second of each repeat; look(repeat, completions) is called in between."""
    rollout(engine, work._replace(output=WARM_UP), seed=0)
    rates = []
    for seed in range(1, repeats + 1):
        seconds, completions = rollout(engine, work, seed)
        rates.append(work.requests * work.output / seconds)
        look(seed, completions)
    return rates


def beginning(completions: list[Completion], tokens: int) -> list[Completion]:
    """The first completions, with at least so many tokens if there are."""
    count, drawn = 0, 0
    while count < len(completions) and drawn < tokens:
        drawn += len(completions[count].token_ids)
        count += 1
    return completions[:count]


@torch.inference_mode()
def replay_ms(engine: Engine, context: int = 384) -> dict[str, float]:
    """Device time of captured steps, every row at one context; the pages are of no use afterwards.

    Without the host, so what the wall clock says beyond it is the host's.
    """
    graphs = engine.graphs
    assert graphs is not None
    found = {}
    for (rows, bound), graph in sorted(graphs._graphs.items()):
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


def run_side(folder: Path, works: list[Workload], repeats: int, exact: bool) -> Side:
    """Every repeat is compared; of the unconstrained engine a part of the last one."""
    policies = {0: policy(folder, torch.bfloat16, "cuda")[1]}
    engine = Engine(folder, replace(ENGINE, exact=exact))
    side = Side({}, {}, {})
    for work in works:
        found: list[Bits] = []

        def look(repeat: int, completions: list[Completion], found: list[Bits] = found) -> None:
            if not exact:
                completions = beginning(completions, CONTROL_TOKENS * (repeat == repeats))
            found += bits_of(policies, completions)

        side.rates[work] = measure(engine, work, repeats, look)
        side.bits[label(work)] = total(found)
        shown = ", ".join(f"{rate:,.0f}" for rate in side.rates[work])
        name = "exact" if exact else "unconstrained"
        print(f"{folder.name} {name} {label(work)}: {shown}; {total(found)}", flush=True)
    return side._replace(step_ms=replay_ms(engine))


def mixed_side(folder: Path, mixture: mixed_load.Mixture) -> dict:
    """What the mixed load was made of, and its bits: all, and of what went through each thing."""
    policies = {0: policy(folder, torch.bfloat16, "cuda")[1]}
    engine = Engine(folder, MIXED)

    def change(version: int) -> None:
        weights, policies[version] = policy(folder, torch.bfloat16, "cuda", seed=version)
        engine.load_weights(make_manifest(version, weights.views()), weights.views())

    began = time.perf_counter()
    completions, watch = mixed_load.run(engine, mixture, change)
    seconds = time.perf_counter() - began
    counts = mixed_load.require_all(watch, mixture, completions)
    bits = bits_of(policies, completions)
    parts = {name: part._asdict() for name, part in by_ingredient(watch, completions, bits).items()}
    print(f"{folder.name} mixed, {seconds:.1f} s: {total(bits)}\n{json.dumps(counts)}", flush=True)
    return {"counts": counts, "bits": total(bits), "bits_by_ingredient": parts}


def label(work: Workload) -> str:
    return f"{work.requests} x {work.prompt} -> {work.output}"


def median(rates: list[float]) -> float | None:
    return statistics.median(rates) if rates else None


def row_of(name: str, work: Workload, exact: list[float], free: list[float]) -> dict:
    ours, other = median(exact), median(free)
    return {
        "model": name,
        "workload": label(work),
        "exact": ours and round(ours),
        "unconstrained": other and round(other),
        "exact_over_unconstrained": ours and other and round(ours / other, 3),
        "runs_exact": [round(rate) for rate in exact],
        "runs_unconstrained": [round(rate) for rate in free],
        **ANCHORS[name, work]._asdict(),
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
    sides, mixed = {True: NO_SIDE, False: NO_SIDE}, {}
    with tempfile.TemporaryDirectory() as base, replace_files():
        folder = make_folder(name, Path(base))
        for exact in options.sides if works else ():
            sides[exact] = run_side(folder, works, options.repeats, exact)
            free_memory()
        if options.mixed and True in options.sides:
            mixture = mixed_load.Mixture(options.mixed, updates=options.updates)
            mixed = mixed_side(folder, mixture)
            free_memory()
    rates = {exact: side.rates for exact, side in sides.items()}
    rows = [row_of(name, work, *(rates[side].get(work, []) for side in sides)) for work in works]
    return rows, details_of(sides[True], sides[False], mixed)


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def details_of(exact: Side, free: Side, mixed: dict) -> dict:
    all_bits = [*exact.bits.values(), *([mixed["bits"]] if mixed else [])]
    by_work = {name: bits._asdict() for name, bits in exact.bits.items()}
    if mixed:
        mixed = {**mixed, "bits": mixed["bits"]._asdict()}
    return {
        "bits": {**total(all_bits)._asdict(), "by_workload": by_work, "mixed": mixed},
        "control": total(free.bits.values())._asdict(),
        "step_ms": exact.step_ms,
        "step_ms_unconstrained": free.step_ms,
    }


def is_proved(details: dict, sides: tuple[bool, ...]) -> bool:
    """No token differs with contracts, and some do without, of those that were compared."""
    bits, control = details["bits"], details["control"]
    good = True not in sides or (bits["compared"] > 0 and bits["differing"] == 0)
    return good and (not control["compared"] or control["differing"] > 0)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_engine", description=__doc__)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="default: git's HEAD")
    parser.add_argument("--model", choices=["Qwen3-0.6B", "Qwen3-8B"], help="default: both")
    parser.add_argument("--workloads", default="0,1,2", help='of the table, by number; "" for none')
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--exact", choices=["on", "off", "both"], default="both")
    parser.add_argument("--mixed", type=int, default=500, help="requests before the flood; 0: none")
    parser.add_argument("--updates", type=int, default=2, help="of weights, in the mixed load")
    options = parser.parse_args(arguments)
    options.sides = {"on": (True,), "off": (False,), "both": (True, False)}[options.exact]
    numbers = [int(number) for number in options.workloads.split(",") if number]
    if not set(numbers) <= {0, 1, 2}:
        parser.error(f"--workloads {options.workloads}: use numbers from 0 to 2")
    options.works = [(BIG, MIDDLE, SMALL)[number] for number in numbers]
    return options


def main(arguments: list[str]) -> int:
    """Print the table; 1 if bits differ, or if the control's do not."""
    options = parsed(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device here: run this on a machine with one", file=sys.stderr)
        return 1
    rows, details = [], {}
    for name in [options.model] if options.model else ["Qwen3-0.6B", "Qwen3-8B"]:
        new, details[name] = run_model(name, options.works, options)
        rows += new
    show(rows)
    print(json.dumps(details, indent=1))
    if options.output:
        result = {**environment(options.commit), "unit": "output tokens/s", "rows": rows, **details}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(is_proved(each, options.sides) for each in details.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
