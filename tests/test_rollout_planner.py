"""The planner: behaviour over random schedules, without torch and without a model.

A slot of the pretended KV holds what a real one depends on: every token up to it, and the weights
version. A step reads the whole context of each row through the sample's pages, so a wrong page, a
stale one or one overwritten too early is seen at once.
"""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.admission import checked_prompt
from rollout.config import EngineConfig, EngineError
from rollout.request import Request, RequestError, SamplingParams, samples_of
from rollout.scheduler import Scheduler

STOP = 0


class PretendEngine:
    """A scheduler and a model whose next token is a function of tokens, key and version."""

    def __init__(self, config, num_pages):
        self.scheduler = Scheduler(config, num_pages)
        self.slots = {}
        self.requests = 0

    def add(self, prompt, stop_ids=frozenset({STOP}), **params):
        name = f"request-{self.requests}"
        request = Request(name, tuple(prompt), SamplingParams(**params), stop_ids)
        self.requests += 1
        self.scheduler.add(samples_of(request))
        return request.request_id

    def forward(self, row):
        sample, version = row.sample, self.scheduler.version
        size = self.scheduler.config.page_size
        end = row.start + row.count
        for position in range(end):
            slot = sample.pages[position // size], position % size
            content = (version, tuple(sample.tokens[: position + 1]))
            if position >= row.start:
                self.slots[slot] = content
            assert self.slots.get(slot) == content, "a row reads KV of other tokens or weights"
        return next_token(sample.tokens, sample.key, version)

    def step(self):
        plan = self.scheduler.plan()
        assert plan.num_tokens <= self.scheduler.config.max_batch_tokens
        assert all(1 <= row.count <= self.scheduler.config.prefill_chunk for row in plan.rows)
        assert len({row.sample for row in plan.rows}) == len(plan.rows)
        ends = [self.forward(row) for row in plan.rows]
        tokens = [token for row, token in zip(plan.rows, ends, strict=True) if row.draws]
        done = self.scheduler.commit(plan, tokens, [-float(token) for token in tokens])
        self.scheduler.check()
        return plan, done

    def drain(self):
        done = []
        while self.scheduler.has_work:
            plan, finished = self.step()
            assert plan.rows, "there is work and no progress"
            done += finished
        return done


def next_token(tokens, key, version):
    return hash((tuple(tokens), key, version)) % 7


def assert_true_to_oracle(completion, request_params):
    """Every token is the one that the sample alone would have drawn under the version it names."""
    prompt, params = request_params
    request = Request("alone", tuple(prompt), SamplingParams(**params), frozenset({STOP}))
    sample = samples_of(request)[completion.sample_index]
    for token, version in zip(completion.token_ids, completion.policy_versions, strict=True):
        assert sample.finish_reason is None
        assert token == next_token(sample.tokens, sample.key, version)
        sample.append(token, -float(token), version)
    assert completion.logprobs == tuple(sample.logprobs)
    assert completion.finish_reason == (sample.finish_reason or "abort")
    assert list(completion.policy_versions) == sorted(completion.policy_versions)


configs = st.builds(
    EngineConfig,
    page_size=st.integers(1, 4),
    max_batch_tokens=st.integers(1, 16),
    max_sequences=st.integers(1, 6),
    prefill_chunk=st.integers(1, 8),
    prefix_cache=st.booleans(),
)
prompts = st.one_of(
    st.lists(st.integers(1, 2), min_size=1, max_size=10),
    st.integers(1, 12).map(lambda length: [3] * length),
)
additions = st.tuples(
    st.just("add"),
    prompts,
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 12), "n": st.integers(1, 4), "seed": st.integers(0, 1)}
    ),
)
operations = st.lists(
    st.one_of(
        additions,
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(st.just("weights")),
    ),
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(config=configs, spare_pages=st.integers(0, 12), script=operations)
def test_any_schedule_gives_what_each_request_gives_alone(config, spare_pages, script):
    longest = -(-23 // config.page_size)
    engine = PretendEngine(config, longest + spare_pages)
    asked, done = {}, []
    for operation, *arguments in script:
        if operation == "add":
            prompt, params = arguments
            asked[engine.add(prompt, **params)] = prompt, params
        elif operation == "step":
            for _ in range(arguments[0]):
                done += engine.step()[1]
        elif operation == "abort":
            done += engine.scheduler.abort(f"request-{arguments[0]}")
        else:
            engine.scheduler.change_weights(engine.scheduler.version + 1)
        engine.scheduler.check()
    done += engine.drain()
    for completion in done:
        assert_true_to_oracle(completion, asked[completion.request_id])
    ended = [(completion.request_id, completion.sample_index) for completion in done]
    expected = [(name, i) for name, (_, params) in asked.items() for i in range(params["n"])]
    assert sorted(ended) == sorted(expected)
    assert engine.scheduler.pool.available == longest + spare_pages


def test_a_group_computes_the_full_pages_of_its_prompt_once():
    engine = PretendEngine(EngineConfig(page_size=4, prefill_chunk=4), num_pages=64)
    engine.add([5] * 18, max_tokens=1, n=8)
    done, computed = [], []
    while engine.scheduler.has_work:
        plan, finished = engine.step()
        computed.append(plan.num_tokens)
        done += finished
    assert len(done) == 8
    # Four chunks by the first sample, then its last two tokens beside those of seven others.
    assert computed == [4, 4, 4, 4, 16]
    assert engine.scheduler.counters["cached_tokens"] == 7 * 16


def test_other_requests_pass_a_group_that_waits_for_its_prompt():
    engine = PretendEngine(EngineConfig(page_size=4, prefill_chunk=4), num_pages=64)
    engine.add([5] * 18, max_tokens=1, n=3)
    engine.add([6, 6], max_tokens=1)
    plan, _ = engine.step()
    assert [(row.sample.request.request_id, row.count) for row in plan.rows] == [
        ("request-0", 4),
        ("request-1", 2),
    ]


def test_a_prompt_seen_before_is_computed_but_for_its_end():
    engine = PretendEngine(EngineConfig(page_size=4), num_pages=64)
    for length, expected in ((8, 8), (8, 4), (9, 1), (5, 1), (4, 4), (3, 3)):
        engine.add([5] * length, max_tokens=1)
        plan, _ = engine.step()
        assert plan.num_tokens == expected


def test_prefix_cache_off_shares_nothing():
    engine = PretendEngine(EngineConfig(page_size=4, prefix_cache=False), num_pages=64)
    engine.add([5] * 18, max_tokens=1, n=3)
    plan, _ = engine.step()
    assert plan.num_tokens == 54
    assert engine.scheduler.pool.free == 64


def test_new_weights_find_no_old_page():
    engine = PretendEngine(EngineConfig(page_size=4), num_pages=64)
    engine.add([5] * 9, max_tokens=1)
    engine.drain()
    engine.scheduler.change_weights(1)
    assert engine.scheduler.pool.free == 64
    engine.add([5] * 9, max_tokens=1)
    assert engine.step()[0].num_tokens == 9


def test_idle_pages_are_taken_back_oldest_first_and_ends_before_beginnings():
    engine = PretendEngine(EngineConfig(page_size=1), num_pages=7)
    for first in (1, 2):
        engine.add([first, 9, 9], max_tokens=1)
        engine.drain()
    engine.add([3, 9, 9], max_tokens=1)
    engine.drain()
    find = engine.scheduler.prefix.find
    lengths = [
        len(find(samples_of(request_for([first, 9, 9, 9]))[0].tokens)[0]) for first in (1, 2, 3)
    ]
    assert lengths == [1, 3, 3]


def request_for(prompt):
    return Request("", tuple(prompt), SamplingParams(max_tokens=1), frozenset())


def test_the_last_admitted_goes_back_first_and_finishes_all_the_same():
    engine = PretendEngine(EngineConfig(page_size=1, prefix_cache=False), num_pages=12)
    for prompt in ([1, 1], [2, 2], [1, 2]):
        engine.add(prompt, stop_ids=frozenset(), max_tokens=9)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.pool.available == 0
    engine.step()
    running = engine.scheduler.running
    assert [sample.request.request_id for sample in running] == ["request-0", "request-1"]
    assert [len(completion.token_ids) for completion in engine.drain()] == [9, 9, 9]


def test_growing_samples_are_not_starved_by_prefill():
    config = EngineConfig(page_size=4, max_batch_tokens=4, prefill_chunk=4, prefix_cache=False)
    engine = PretendEngine(config, num_pages=64)
    engine.add([6], stop_ids=frozenset(), max_tokens=9)
    engine.step()
    engine.add([5] * 40, max_tokens=3)
    for _ in range(4):
        assert [row.count for row in engine.step()[0].rows] == [1, 3]


def test_rows_of_one_token_come_first():
    config = EngineConfig(page_size=4, prefill_chunk=4, prefix_cache=False)
    engine = PretendEngine(config, num_pages=64)
    engine.add([5] * 40, max_tokens=3)
    engine.add([6], stop_ids=frozenset(), max_tokens=3)
    assert [row.count for row in engine.step()[0].rows] == [1, 4]


def test_a_request_that_can_never_fit_is_refused_and_nothing_is_queued():
    scheduler = Scheduler(EngineConfig(page_size=4), num_pages=2)
    with pytest.raises(RequestError, match="num_pages"):
        scheduler.add(samples_of(Request("", (1,) * 6, SamplingParams(max_tokens=4), frozenset())))
    assert not scheduler.has_work
    scheduler.add(samples_of(Request("", (1,) * 6, SamplingParams(max_tokens=3), frozenset())))


def test_a_step_whose_forward_failed_can_be_planned_again():
    engine = PretendEngine(EngineConfig(page_size=2, prefill_chunk=3), num_pages=32)
    for prompt in ([1] * 7, [1] * 7, [2] * 3):
        engine.add(prompt, max_tokens=4, n=2)
    engine.step()
    first, second = engine.scheduler.plan(), engine.scheduler.plan()
    assert first.rows
    assert second.rows == first.rows
    engine.scheduler.check()
    assert len(engine.drain()) == 6


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"n": 0}, "n is 0"),
        ({"first_sample": -1}, "first_sample"),
    ],
)
def test_wrong_parameters_are_named(wrong, named):
    with pytest.raises(RequestError, match=named) as caught:
        SamplingParams(**{"max_tokens": 4, **wrong})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [[], [-1], [10], ["a"], "text", [1.5], [2**70]])
def test_wrong_prompts_are_refused(prompt):
    with pytest.raises(RequestError, match="prompt"):
        checked_prompt(prompt, vocab_size=10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 0},
        {"num_pages": -1},
        {"max_batch_tokens": 1.5},
        {"max_sequences": True},
        {"prefill_chunk": 0},
        {"dtype": "int8"},
        {"memory_share": 0.0},
    ],
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(EngineError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_the_planner_and_the_public_config_load_no_torch():
    code = (
        "import sys, rollout.scheduler; from rollout import EngineConfig, SamplingParams;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
