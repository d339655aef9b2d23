"""Bits of the engine under any schedule: what each request gives alone, hypothesis draws the rest.

A script of arrivals, steps, aborts, weight updates in flight (with or without abort and resumption)
and restarts runs under random limits.
Every completion, finished or cut, is compared with its own run: one request at a time, no prefix
cache, with the weights changed after the same tokens.
"""

from __future__ import annotations

import pytest
from engine_alone import Alone, Weights, assert_as_alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_models import toy_folder

from rollout import Completion, Engine, EngineConfig, SamplingParams

SHARED = [1, 40, 41, 42, 43, 44, 45, 46]
PROMPTS = ([5], SHARED, [*SHARED, 9], [*SHARED, *range(50, 58)], [1, *range(20, 45)], SHARED * 2)
TEMPERATURES = (1.0, 0.7, 0.0, 1.3)
LONGEST = 26 + 10
compared_tokens = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("property") / "model")


@pytest.fixture(scope="module")
def alone(folder):
    return Alone(folder)


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
        min_tokens=st.sampled_from([0, 1]),
        n=st.integers(1, 3),
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
        for prompt, params in asked.values():
            self.add(prompt, params)

    def add(self, prompt, params: SamplingParams) -> None:
        self.asked[self.engine.add_request(prompt, params)] = prompt, params

    def do(self, operation: str, *arguments) -> list[Completion]:
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
        return done


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configs, spare_pages=st.integers(0, 6), script=scripts)
def test_any_schedule_gives_what_each_request_gives_alone(
    folder, alone, config, spare_pages, script
):
    global compared_tokens
    num_pages = -(-LONGEST // config.page_size) + spare_pages
    config = EngineConfig(**{**vars(config), "num_pages": num_pages})
    run = Run(folder, config, alone.weights, {})
    for operation, *arguments in script:
        if operation == "restart":
            done = run.do("step", 2)
            ended = {one.request_id for one in done}
            compared_tokens += sum(check(alone, run, one) for one in done)
            left = {name: pair for name, pair in run.asked.items() if name not in ended}
            run = Run(folder, config, alone.weights, left)
            continue
        done = run.do(operation, *arguments)
        run.engine.scheduler.check()
        compared_tokens += sum(check(alone, run, one) for one in done)
    compared_tokens += sum(check(alone, run, one) for one in run.drain())
    assert run.engine.scheduler.pool.available == num_pages


def check(alone: Alone, run: Run, one: Completion) -> int:
    return assert_as_alone(alone, one, run.asked[one.request_id][1])


def test_enough_was_compared():
    assert compared_tokens > 2000, f"only {compared_tokens} tokens were compared"


def test_the_comparison_sees_ordinary_ops(folder, alone):
    """The negative control: the same comparison, an engine without contracts."""
    engine = Engine(folder, EngineConfig(exact=False))
    params = SamplingParams(max_tokens=10, n=3, ignore_eos=True)
    with pytest.raises(AssertionError):
        for group in engine.generate(PROMPTS, params):
            for one in group:
                assert_as_alone(alone, one, params)
