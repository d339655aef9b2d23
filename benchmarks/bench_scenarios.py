"""What the engine may do, against what it must not change: tokens compared, and tokens differing.

Every scenario runs one catalogue of prompts and is compared, token ids and float32 logprobs as
int32 words, with each sample run alone: one sequence at a time, no prefix cache. Nothing may
differ, but in the control, an engine with exact=False, something must. (On a GPU that wants a model
whose products the vendor library splits, as random-71M; the tiny one's it does not.)

Example: python -m benchmarks.bench_scenarios --output benchmarks/results/scenarios_cpu.json
         python -m benchmarks.bench_scenarios --device cuda --scale 9
"""

import argparse
import gc
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.random_models import LAYERS, make_folder, replace_files
from rollout import Completion, Engine, EngineConfig, SamplingParams
from rollout.actor import RolloutActor
from shared_ops.model.weights import make_manifest

TINY = Path(__file__).resolve().parent.parent / "recipes" / "tiny_model"
GROUP = 4
PROMPTS = 24
TOKENS = 24
PAGE = 8
CONTROL = "control: exact=False"

Groups = list[list[Completion]]


class Bench(NamedTuple):
    """The catalogue and where it runs; `alone` are the completions to compare with."""

    folder: Path
    config: EngineConfig
    prompts: list[list[int]]
    params: list[SamplingParams]
    alone: Groups

    def engine(self, **changes) -> Engine:
        return Engine(self.folder, replace(self.config, **changes))


def catalogue(vocabulary: int, scale: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """24 prompts a scale unit: lengths around page edges, many that begin alike."""
    source = random.Random(0)
    shared = [source.randrange(5, vocabulary) for _ in range(40)]
    prompts, params = [], []
    for index in range(PROMPTS * scale):
        start = shared[: source.choice([0, 7, PAGE, 2 * PAGE, 33])]
        tail = [source.randrange(5, vocabulary) for _ in range(source.choice([1, 7, 8, 9, 24]))]
        prompts.append([0, *start, *tail])
        temperature = (1.0, 0.7, 1.0, 1.3)[index % 4]
        params.append(SamplingParams(TOKENS, temperature, n=GROUP, seed=index % 5, ignore_eos=True))
    return prompts, params


def run_alone(bench: Bench) -> Groups:
    engine = bench.engine(prefix_cache=False, max_sequences=1, page_size=16)
    pairs = zip(bench.prompts, bench.params, strict=True)
    return [engine.generate([prompt], params)[0] for prompt, params in pairs]


def plain(**changes) -> Callable[[Bench], Groups]:
    return lambda bench: bench.engine(**changes).generate(bench.prompts, bench.params)


def under_pressure(**changes) -> Callable[[Bench], Groups]:
    def run(bench: Bench) -> Groups:
        longest = max(map(len, bench.prompts)) + TOKENS
        size = changes.get("page_size", bench.config.page_size)
        at_once = 2 + math.ceil(len(bench.prompts) / PROMPTS)
        engine = bench.engine(**changes, num_pages=at_once * -(-longest // size))
        groups = engine.generate(bench.prompts, bench.params)
        if not engine.stats()["preempted"]:
            raise RuntimeError("nothing was sent back: the scenario tests nothing")
        return groups

    return run


def cached(bench: Bench) -> Groups:
    engine = bench.engine()
    engine.generate(bench.prompts, bench.params)
    return engine.generate(bench.prompts, bench.params)


def whole_prompt_but_one_token_cached(bench: Bench) -> Groups:
    engine = bench.engine(page_size=1)
    engine.generate(bench.prompts, [replace(each, max_tokens=1, n=1) for each in bench.params])
    return engine.generate(bench.prompts, bench.params)


def shuffled(bench: Bench) -> Groups:
    order = random.Random(1).sample(range(len(bench.prompts)), len(bench.prompts))
    prompts, params = [bench.prompts[i] for i in order], [bench.params[i] for i in order]
    groups = bench.engine().generate(prompts, params)
    return [groups[order.index(index)] for index in range(len(order))]


def one_by_first_sample(bench: Bench) -> Groups:
    prompts = [prompt for prompt in bench.prompts for _ in range(GROUP)]
    params = [replace(p, n=1, first_sample=i) for p in bench.params for i in range(GROUP)]
    ones = [group[0] for group in bench.engine().generate(prompts, params)]
    return [ones[start : start + GROUP] for start in range(0, len(ones), GROUP)]


def stepped(during: Callable[[Engine, random.Random], None]) -> Callable[[Bench], Groups]:
    """Arrivals over time, and something that happens between steps."""

    def run(bench: Bench) -> Groups:
        source, engine = random.Random(2), bench.engine()
        left = list(range(len(bench.prompts)))
        asked: dict[str, int] = {}
        groups: Groups = [[] for _ in left]
        while left or engine.has_work:
            if left and source.random() < 0.4:
                index = left.pop(0)
                asked[engine.add_request(bench.prompts[index], bench.params[index])] = index
            during(engine, source)
            for one in engine.step():
                if one.request_id in asked:
                    groups[asked[one.request_id]].append(one)
        return [sorted(group, key=lambda one: one.sample_index) for group in groups]

    return run


def nothing(engine: Engine, source: random.Random) -> None:
    pass


def strangers() -> Callable[[Engine, random.Random], None]:
    """Requests that come, and go before they are finished."""
    names: list[str] = []

    def between(engine: Engine, source: random.Random) -> None:
        if len(names) < 12 and source.random() < 0.3:
            prompt = [0, *range(9, 9 + source.randrange(1, 40))]
            names.append(engine.add_request(prompt, SamplingParams(TOKENS, n=2)))
        if names and source.random() < 0.3:
            engine.abort(source.choice(names))

    return between


def reload(engine: Engine, source: random.Random) -> None:
    """The same weights again, in flight: all KV is dropped and computed anew."""
    if source.random() < 0.05:
        tensors = {name: view.clone() for name, view in engine.weights.views().items()}
        engine.load_weights(make_manifest(0, tensors), tensors)


def restarted(bench: Bench) -> Groups:
    """A second engine takes over what the first had not finished."""
    half = len(bench.prompts) // 2
    first = bench.engine().generate(bench.prompts[:half], bench.params[:half])
    engine = bench.engine()
    for prompt, params in zip(bench.prompts[half:], bench.params[half:], strict=True):
        engine.add_request(prompt, params)
    for _ in range(9):
        engine.step()
    return first + bench.engine().generate(bench.prompts[half:], bench.params[half:])


def four_engines(bench: Bench) -> Groups:
    groups: Groups = [[] for _ in bench.prompts]
    for first in range(4):
        share = slice(first, None, 4)
        groups[share] = bench.engine().generate(bench.prompts[share], bench.params[share])
    return groups


def actor(bench: Bench) -> Groups:
    return RolloutActor(bench.folder, bench.config).generate(bench.prompts, bench.params)


SCENARIOS: dict[str, Callable[[Bench], Groups]] = {
    "all at once": plain(),
    "prefill one token a step": plain(prefill_chunk=1),
    "prefill in chunks of 7": plain(prefill_chunk=7),
    "prefill of 3 beside decode, 9 tokens a step": plain(prefill_chunk=3, max_batch_tokens=9),
    "5 tokens a step": plain(max_batch_tokens=5),
    "2 sequences at a time": plain(max_sequences=2),
    "17 sequences at a time": plain(max_sequences=17),
    "pages of 1": plain(page_size=1),
    "pages of 3": plain(page_size=3),
    "pages of 16": plain(page_size=16),
    "pages of 128": plain(page_size=128),
    "no prefix cache": plain(prefix_cache=False),
    "no prefix cache, chunks of 16": plain(prefix_cache=False, prefill_chunk=16),
    "everything cached already": cached,
    "cached but for the last prompt token": whole_prompt_but_one_token_cached,
    "page pressure": under_pressure(),
    "page pressure, pages of 2": under_pressure(page_size=2),
    "page pressure, no prefix cache": under_pressure(prefix_cache=False),
    "order of submission": shuffled,
    "n = 4 as four requests": one_by_first_sample,
    "arrivals over time": stepped(nothing),
    "arrivals beside strangers": stepped(strangers()),
    "weights loaded again in flight": stepped(reload),
    "engine restarted": restarted,
    "four engines": four_engines,
    "actor": actor,
    CONTROL: plain(exact=False),
}


def words(logprobs: Sequence[float]) -> list[int]:
    return torch.tensor(logprobs, dtype=torch.float32).view(torch.int32).tolist()


def count(groups: Groups, wanted: Groups) -> tuple[int, int]:
    """Tokens compared and differing; a token that only one side has differs, and so does NaN."""
    compared = differing = 0
    for group, others in zip(groups, wanted, strict=True):
        for one, other in zip(group, others, strict=True):
            length = max(len(one.token_ids), len(other.token_ids))
            pairs = (
                list(zip(each.token_ids, words(each.logprobs), strict=True))
                for each in (one, other)
            )
            same = sum(left == right for left, right in zip(*pairs, strict=True))
            compared += length
            differing += length - same + sum(map(math.isnan, one.logprobs))
    return compared, differing


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        help=f"a folder, or one of {', '.join(LAYERS)}; default: the tiny one, random-71M on a GPU",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="bfloat16 on a GPU and float32 on a CPU, unless given")
    parser.add_argument("--scale", type=int, default=1, help="2,304 tokens a scenario and unit")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    on_gpu = given.device.startswith("cuda")
    given.model = given.model or ("random-71M" if on_gpu else str(TINY))
    given.dtype = given.dtype or ("bfloat16" if on_gpu else "float32")
    return given


def run_all(folder: Path, given: argparse.Namespace) -> list[dict]:
    """A row for each scenario, printed as soon as it is there."""
    config = EngineConfig(device=given.device, dtype=given.dtype, page_size=PAGE)
    vocabulary = Engine(folder, config).vocab_limit
    bench = Bench(folder, config, *catalogue(vocabulary, given.scale), [])
    bench.alone.extend(run_alone(bench))
    rows = []
    print("| scenario | tokens compared | differing |\n|---|---|---|")
    for name, run in SCENARIOS.items():
        gc.collect()  # engines that are gone give their memory back before the next one asks
        compared, differing = count(run(bench), bench.alone)
        rows.append({"scenario": name, "compared": compared, "differing": differing})
        print(f"| {name} | {compared:,} | {differing:,} |", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a scenario differs, or if the control does not."""
    given, at, began = parsed(arguments), commit(), time.perf_counter()
    if given.model in LAYERS:
        with tempfile.TemporaryDirectory() as base, replace_files():
            rows = run_all(make_folder(given.model, Path(base)), given)
    else:
        rows = run_all(Path(given.model), given)
    print(f"{time.perf_counter() - began:.0f} s")
    if given.output:
        where = {"device": given.device, "dtype": given.dtype, "torch": torch.__version__}
        if given.device != "cpu":
            where["device"] = torch.cuda.get_device_name()
        result = {**where, "commit": at, "model": Path(given.model).name, "rows": rows}
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    good = all(
        row["compared"] > 0 and (row["differing"] > 0) == (row["scenario"] == CONTROL)
        for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
