"""Bits of the engine under any schedule: what each request gives alone, hypothesis draws the rest.

A script of arrivals, steps, aborts, weight updates in flight (with or without abort and resumption)
and restarts runs under random limits; or requests are shared out over engines and actors.
Every completion, finished or cut, is compared with its own run: one request at a time, no prefix
cache, with the weights changed after the same tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from engine_alone import Alone, Weights, assert_as_alone, reordered_engine
from gpu import needs_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_models import toy_folder

from rollout import Completion, Engine, EngineConfig, SamplingParams
from rollout.actor import AsyncRolloutActor, RolloutActor

SHARED = [1, 40, 41, 42, 43, 44, 45, 46]
PROMPTS = ([5], SHARED, [*SHARED, 9], [*SHARED, *range(50, 58)], [1, *range(20, 45)], SHARED * 2)
TEMPERATURES = (1.0, 0.7, 0.0, 1.3)
LONGEST = 26 + 10
# The default draws are the same in every run; the profile "thorough" draws others each time.
EXAMPLES = settings().max_examples
DRAWS = settings(
    deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 100
)
WANTED = (
    *("sent back", "weights", "cut", "restart", "abort", "prefix hits"),
    *("hits that leave one token", "hits of prompts that end on a page edge"),
    *("groups asked for one by one", "Engines", "RolloutActors", "AsyncRolloutActors"),
)
seen: Counter[str] = Counter()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("property") / "model")


ON_GPU = pytest.param({"device": "cuda", "dtype": "bfloat16"}, marks=needs_gpu, id="cuda")


@pytest.fixture(scope="module", params=[pytest.param({}, id="cpu"), ON_GPU])
def place(request):
    """On a GPU decode steps are captured, with padding; what is run alone is not."""
    return request.param


@pytest.fixture(scope="module")
def alone(folder, place):
    return Alone(folder, **place)


configs = st.builds(
    EngineConfig,
    page_size=st.sampled_from([1, 2, 3, 4, 7, 16, 64]),
    max_batch_tokens=st.integers(1, 48),
    max_sequences=st.integers(1, 8),
    prefill_chunk=st.integers(1, 40),
    prefix_cache=st.booleans(),
)
additions = st.tuples(
    st.just("add"),
    st.sampled_from(PROMPTS),
    st.builds(
        SamplingParams,
        max_tokens=st.sampled_from([10, 7, 4, 1]),
        temperature=st.sampled_from(TEMPERATURES),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, 0, 12]),
        min_tokens=st.sampled_from([0, 1]),
        n=st.sampled_from([1, 1, 1, 2, 3, 8]),
        first_sample=st.integers(0, 2),
        seed=st.integers(0, 1),
        ignore_eos=st.booleans(),
    ),
)
operations = st.lists(
    st.one_of(
        additions,
        st.tuples(st.just("step"), st.integers(1, 8)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("weights")),
        st.tuples(st.just("cut")),
        st.tuples(st.just("restart")),
    ),
    max_size=12,
)
scripts = st.builds(list.__add__, st.lists(additions, min_size=2, max_size=4), operations)


class Run:
    """One engine under a script; a restart begins another, whose requests are submitted again."""

    def __init__(self, folder, config: EngineConfig, weights: Weights, asked: dict) -> None:
        self.engine, self.weights = Engine(folder, config), weights
        self.asked: dict = {}
        count_hits(self.engine)
        for prompt, params in asked.values():
            self.add(prompt, params)

    def add(self, prompt, params: SamplingParams) -> None:
        self.asked[self.engine.add_request(prompt, params)] = prompt, params

    def do(self, operation: str, *arguments) -> list[Completion]:
        seen[operation] += 1
        if operation == "add":
            self.add(*arguments)
        elif operation == "abort":
            names = list(self.asked)
            return self.engine.abort(names[arguments[0] % len(names)]) if names else []
        elif operation == "weights":
            return self.weights.load(self.engine, self.engine.version + 1)
        elif operation == "cut":
            for one in self.weights.load(self.engine, self.engine.version + 1, "abort"):
                pair = self.asked[one.request_id]
                self.asked[self.engine.resume(one, pair[1])] = pair
        else:
            return [one for _ in range(arguments[0]) for one in self.engine.step()]
        return []

    def drain(self) -> list[Completion]:
        done = []
        while self.engine.has_work:
            done += self.engine.step()
            self.engine.scheduler.check()
        seen["sent back"] += self.engine.scheduler.counters["sent_back"]
        return done


def count_hits(engine: Engine) -> None:
    """Let `seen` know the kinds of prefix hits that the engine has."""
    prefix, size = engine.scheduler.prefix, engine.config.page_size
    attach = prefix.attach

    def counting(sample, pages) -> None:
        attach(sample, pages)
        if pages:
            seen["prefix hits"] += 1
            seen["hits that leave one token"] += sample.remaining == 1
            seen["hits of prompts that end on a page edge"] += len(sample.tokens) % size == 0

    prefix.attach = counting


def with_pages(config: EngineConfig, spare_pages: int, place: dict) -> EngineConfig:
    return replace(config, num_pages=-(-LONGEST // config.page_size) + spare_pages, **place)


@settings(DRAWS, max_examples=EXAMPLES // 2)
@given(config=configs, spare_pages=st.integers(0, 6), script=scripts)
def test_any_schedule_gives_what_each_request_gives_alone(
    folder, alone, place, config, spare_pages, script
):
    config = with_pages(config, spare_pages, place)
    run = Run(folder, config, alone.weights, {})
    seen["schedules"] += 1
    for operation, *arguments in script:
        if operation == "restart":
            seen[operation] += 1
            done = run.do("step", 2)
            ended = {one.request_id for one in done}
            check(alone, run, done)
            left = {name: pair for name, pair in run.asked.items() if name not in ended}
            run = Run(folder, config, alone.weights, left)
            continue
        done = run.do(operation, *arguments)
        run.engine.scheduler.check()
        check(alone, run, done)
    check(alone, run, run.drain())
    assert run.engine.scheduler.pool.available == config.num_pages


def check(alone: Alone, run: Run, done: list[Completion]) -> None:
    for one in done:
        seen["tokens"] += assert_as_alone(alone, one, run.asked[one.request_id][1])
        seen["completions"] += 1


def one_by_one(prompt, params: SamplingParams) -> list[tuple]:
    """The n requests that a request with n is."""
    firsts = range(params.first_sample, params.first_sample + params.n)
    return [(prompt, replace(params, n=1, first_sample=first)) for first in firsts]


def answered(engine, asked: list[tuple]) -> list[Completion]:
    """By an engine, or by an actor of either kind."""
    groups = engine.generate(*(list(column) for column in zip(*asked, strict=True)))
    if asyncio.iscoroutine(groups):
        groups = asyncio.run(groups)
    return [one for group in groups for one in group]


@settings(DRAWS, max_examples=EXAMPLES // 8)
@given(
    config=configs,
    spare_pages=st.integers(0, 6),
    kinds=st.lists(
        st.sampled_from([Engine, RolloutActor, AsyncRolloutActor]), min_size=1, max_size=4
    ),
    asked=st.lists(st.tuples(additions, st.booleans(), st.integers(0, 3)), min_size=2, max_size=8),
)
def test_any_engines_and_actors_give_what_each_request_gives_alone(
    folder, alone, place, config, spare_pages, kinds, asked
):
    """Requests shared out over one to four of them; a group is also asked for one by one."""
    config = with_pages(config, spare_pages, place)
    alone.weights.load(alone.engine, 0)
    shares: list[list[tuple]] = [[] for _ in kinds]
    for (_, prompt, params), apart, index in asked:
        seen["groups asked for one by one"] += apart and params.n > 1
        pairs = one_by_one(prompt, params) if apart else [(prompt, params)]
        shares[index % len(kinds)].extend(pairs)
    seen["sets of engines"] += 1
    for kind, share in zip(kinds, shares, strict=True):
        seen[f"{kind.__name__}s"] += 1
        flat = [params for _, params in share for _ in range(params.n)]
        done = answered(kind(folder, config), share) if share else []
        for one, params in zip(done, flat, strict=True):
            seen["tokens"] += assert_as_alone(alone, one, params)
            seen["completions"] += 1


def test_enough_was_compared():
    """Prints what was drawn: pytest -rP shows it, --hypothesis-profile=thorough draws more."""
    for name, count in seen.items():
        print(f"{name:<42}{count:>8,}")
    assert seen["tokens"] > 1000 and seen["schedules"] >= EXAMPLES // 2
    never = [name for name in WANTED if not seen[name]]
    assert not never, f"never drawn: {never}"


def test_the_comparison_sees_ops_in_another_order(folder, alone, place):
    """The negative control: the same comparison, an engine without contracts."""
    engine = reordered_engine(folder, **place)
    params = SamplingParams(max_tokens=10, n=3, ignore_eos=True)
    with pytest.raises(AssertionError):
        for group in engine.generate(PROMPTS, params):
            for one in group:
                assert_as_alone(alone, one, params)
