"""What the prefix cache saves a group of 8: both sides in one run, and their bits compared.

A group is asked for as one request with n = 8, or as 8 requests with first_sample 0 to 7. Prompts
are random and the cache is empty at the start of a run, so a group shares with itself only. A rate
is output tokens over the seconds from the first request to the last completion, the median of the
repeats; the sides take turns. All four runs of a repeat must have equal tokens and float32
logprobs; the control, an engine with exact=False and the cache, must not. (On a GPU that wants a
model whose products the vendor library splits: random-71M or a published one.)

Example: python -m benchmarks.bench_prefix --output benchmarks/results/prefix_cpu.json
         python -m benchmarks.bench_prefix --device cuda --groups 16 --tokens 64
"""

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.bench_scenarios import TINY, Groups, commit, count
from benchmarks.random_models import LAYERS, make_folder, replace_files
from rollout import Engine, EngineConfig, SamplingParams
from shared_ops.attest_cache import processor_name

GROUP = 8
TINY_PROMPTS, PROMPTS = (64, 256, 480), (64, 256, 512)


class Case(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    groups: int


class Run(NamedTuple):
    """One way to serve the groups: seconds, what came out, and what the engine counted."""

    seconds: float
    groups: Groups
    computed: int
    hit_rate: float


def prompts_of(case: Case, vocabulary: int, seed: int) -> list[list[int]]:
    source = random.Random(f"{case} {seed}")
    return [
        [source.randrange(5, vocabulary) for _ in range(case.prompt_tokens)]
        for _ in range(case.groups)
    ]


def served(engine: Engine, prompts: list[list[int]], case: Case, apart: bool) -> Run:
    params = SamplingParams(case.output_tokens, n=GROUP, ignore_eos=True)
    each = [params]
    if apart:
        each = [replace(params, n=1, first_sample=index) for index in range(GROUP)]
    asked = [(prompt, one) for prompt in prompts for one in each]
    engine.scheduler.prefix.drop()
    before = dict(engine.scheduler.counters)
    _wait(engine)
    began = time.perf_counter()
    groups = engine.generate([prompt for prompt, _ in asked], [one for _, one in asked])
    _wait(engine)
    seconds = time.perf_counter() - began
    flat = [one for group in groups for one in group]
    after = engine.scheduler.counters
    new = {name: after[name] - before.get(name, 0) for name in after}
    hit_rate = new["cached_tokens"] / new["admitted_tokens"]
    groups = [flat[start : start + GROUP] for start in range(0, len(flat), GROUP)]
    return Run(seconds, groups, new["computed_tokens"], hit_rate)


def _wait(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def measured(engines: dict[bool, Engine], case: Case, repeats: int) -> list[dict]:
    """Two rows, one for each way to ask, with the rates of both sides and their bits."""
    vocabulary = engines[True].vocab_limit
    ways = [(cached, apart) for apart in (False, True) for cached in (True, False)]
    warm_up = case._replace(output_tokens=2)
    runs: dict[tuple[bool, bool], list[Run]] = {way: [] for way in ways}
    for way in ways:
        served(engines[way[0]], prompts_of(case, vocabulary, 0), warm_up, way[1])
    for seed in range(1, repeats + 1):
        prompts = prompts_of(case, vocabulary, seed)
        for cached, apart in ways:
            runs[cached, apart].append(served(engines[cached], prompts, case, apart))
    wanted = [run.groups for run in runs[False, False]]
    return [
        row_of(case, apart, runs[True, apart], runs[False, apart], wanted)
        for apart in (False, True)
    ]


def row_of(
    case: Case, apart: bool, cached: list[Run], without: list[Run], wanted: list[Groups]
) -> dict:
    """wanted: what one request of 8 without the cache gave, in each repeat."""
    counts = [
        count(run.groups, groups)
        for side in (cached, without)
        for run, groups in zip(side, wanted, strict=True)
        if run.groups is not groups
    ]
    tokens = case.groups * GROUP * case.output_tokens
    rates = {
        name: round(tokens / statistics.median(run.seconds for run in side), 1)
        for name, side in (("cached", cached), ("without", without))
    }
    return {
        **case._asdict(),
        "asked": "8 requests" if apart else "n = 8",
        **{f"output_tokens_per_second/{name}": rate for name, rate in rates.items()},
        "speedup": round(rates["cached"] / rates["without"], 2),
        "computed_tokens/cached": cached[0].computed,
        "computed_tokens/without": without[0].computed,
        "cache_hit_rate": round(cached[0].hit_rate, 3),
        "compared": sum(pair[0] for pair in counts),
        "differing": sum(pair[1] for pair in counts),
    }


def control(folder: Path, engines: dict[bool, Engine], case: Case) -> dict:
    ordinary = Engine(folder, replace(engines[True].config, exact=False))
    prompts = prompts_of(case, engines[True].vocab_limit, 1)
    pair = (served(engine, prompts, case, False).groups for engine in (ordinary, engines[False]))
    compared, differing = count(*pair)
    return {"control": "exact=False", "compared": compared, "differing": differing}


def bench(folder: Path, config: EngineConfig, cases: list[Case], repeats: int) -> dict:
    engines = {
        cached: Engine(folder, replace(config, prefix_cache=cached)) for cached in (True, False)
    }
    rows = []
    for case in cases:
        for row in measured(engines, case, repeats):
            rows.append(row)
            rates = [row[f"output_tokens_per_second/{side}"] for side in ("cached", "without")]
            print(
                f"| {folder.name} | {case.prompt_tokens} | {row['asked']} | {rates[0]:,.0f} |"
                f" {rates[1]:,.0f} | {row['speedup']:.2f} | {row['cache_hit_rate']:.0%} |"
                f" {row['compared']:,} | {row['differing']} |",
                flush=True,
            )
    found = control(folder, engines, cases[0])
    print(f"{folder.name}, control: {found['differing']:,} of {found['compared']:,} differ")
    return {
        "model": folder.name,
        "parameters": engines[True].model_config.num_parameters,
        "rows": rows,
        **{f"control/{name}": value for name, value in found.items() if name != "control"},
    }


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="bfloat16 on a GPU and float32 on a CPU, unless given")
    parser.add_argument("--model", nargs="*", choices=["tiny", *LAYERS])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="of output, each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if bits differ, or if the control's do not."""
    given, at = parsed(arguments), commit()
    on_gpu = given.device.startswith("cuda")
    dtype = given.dtype or ("bfloat16" if on_gpu else "float32")
    config = EngineConfig(device=given.device, dtype=dtype, max_batch_tokens=4096)
    print("| model | prompt | asked as | cached, tokens/s | without | ratio | hits", end="")
    print(" | compared | differing |\n|---|---|---|---|---|---|---|---|---|")
    results = []
    with tempfile.TemporaryDirectory() as base:
        for name in given.model or (["random-71M"] if on_gpu else ["tiny", "random-42M"]):
            lengths = TINY_PROMPTS if name == "tiny" else PROMPTS
            cases = [Case(length, given.tokens, given.groups) for length in lengths]
            if name == "tiny":
                results.append(bench(TINY, config, cases, given.repeats))
            else:
                with replace_files():
                    folder = make_folder(name, Path(base))
                    results.append(bench(folder, config, cases, given.repeats))
            gc.collect()
    where = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "dtype": dtype}
    if not on_gpu:
        where |= {"processor": processor_name(), "threads": str(torch.get_num_threads())}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "commit": at}
    if given.output:
        result = {**where, **versions, "group": GROUP, "models": results}
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    differing = sum(row["differing"] for result in results for row in result["rows"])
    return int(differing > 0 or any(result["control/differing"] == 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())
