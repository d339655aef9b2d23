"""Bits of the engine under any schedule: what each request gives alone, hypothesis draws the rest.

A script of arrivals, steps, aborts, weight updates in flight (with or without abort and resumption)
and restarts runs under random limits.
Every completion, finished or cut, is compared with its own run: one request at a time, no prefix
cache, with the weights changed after the same tokens.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_models import toy_folder

from rollout import Completion, Engine, EngineConfig, SamplingParams
from shared_ops.model.weights import make_manifest

SHARED = [1, 40, 41, 42, 43, 44, 45, 46]
PROMPTS = ([5], SHARED, [*SHARED, 9], [*SHARED, *range(50, 58)], [1, *range(20, 45)], SHARED * 2)
TEMPERATURES = (1.0, 0.7, 0.0, 1.3)
LONGEST = 26 + 10
compared_tokens = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("property") / "model")


class Weights:
    """Two sets of weights; even versions have the first, odd ones the second."""

    def __init__(self, engine: Engine) -> None:
        first = {name: view.clone() for name, view in engine.weights.views().items()}
        self.sets = [first, {name: tensor * 1.25 for name, tensor in first.items()}]

    def load(self, engine: Engine, version: int, in_flight="recompute") -> list[Completion]:
        tensors = self.sets[version % 2]
        return engine.load_weights(make_manifest(version, tensors), tensors, in_flight)


class Alone:
    """One request at a time; runs are kept, as many schedules ask for the same ones."""

    def __init__(self, folder) -> None:
        config = EngineConfig(prefix_cache=False, max_sequences=1, num_pages=64)
        self.engine = Engine(folder, config)
        self.weights = Weights(self.engine)
        self.run = cache(self._run)

    def _run(self, prompt: tuple, params: SamplingParams, parities: tuple) -> Completion:
        """parities: of the version that draws each token; the last one also draws what follows."""
        engine = self.engine
        self.weights.load(engine, parities[0])
        name = engine.add_request(prompt, params)
        drawn = 0
        while True:
            if drawn and parities[min(drawn, len(parities) - 1)] != engine.version:
                self.weights.load(engine, parities[min(drawn, len(parities) - 1)])
            done = engine.step()
            if done:
                assert [one.request_id for one in done] == [name]
                return done[0]
            drawn += 1


@pytest.fixture(scope="module")
def alone(folder):
    return Alone(folder)


def assert_as_alone(alone: Alone, one: Completion, params: SamplingParams) -> int:
    """torch.equal on tokens and float32 logprobs; a cut completion is a beginning. Their number."""
    count = len(one.token_ids)
    assert count == len(one.logprobs) == len(one.policy_versions)
    if not count:
        assert one.finish_reason == "abort"
        return 0
    changes = {"n": 1, "first_sample": one.sample_index}
    single = SamplingParams(**{**vars(params), **changes})
    parities = tuple(version % 2 for version in one.policy_versions)
    whole = alone.run(one.prompt_ids, single, parities)
    if one.finish_reason != "abort":
        assert (len(whole.token_ids), whole.finish_reason) == (count, one.finish_reason)
    assert torch.equal(torch.tensor(one.token_ids), torch.tensor(whole.token_ids[:count]))
    drawn, wanted = (torch.tensor(c.logprobs[:count], dtype=torch.float32) for c in (one, whole))
    assert drawn.isfinite().all()
    assert one.kept_thresholds == whole.kept_thresholds[:count]
    assert torch.equal(drawn.view(torch.int32), wanted.view(torch.int32))
    return count


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
