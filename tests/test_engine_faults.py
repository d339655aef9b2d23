"""What may go wrong in one request or one step, and updates in flight: who feels it, and what is
lost."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from toy_models import toy_folder

from rollout import Completion, Engine, EngineConfig, EngineError, RequestError, SamplingParams
from rollout.request import Request, samples_of
from rollout.scheduler import Scheduler
from shared_ops.model.weights import make_manifest

PROMPT = [1, 20, 21, 22, 23]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
BAD_TOKEN = 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Untied, so that one token's embedding can be spoilt alone."""
    return toy_folder(tmp_path_factory.mktemp("faults") / "model", "qwen2")


def other_weights(engine: Engine, version: int):
    tensors = {name: view * 1.25 for name, view in engine.weights.views().items()}
    return make_manifest(version, tensors), tensors


def drain(engine: Engine) -> list[Completion]:
    done = []
    while engine.has_work:
        done += engine.step()
        engine.scheduler.check()
    return done


def spoilt(folder, **limits) -> Engine:
    engine = Engine(folder, EngineConfig(page_size=4, **limits))
    engine.weights.views()["model.embed_tokens.weight"][BAD_TOKEN] = math.nan
    return engine


def test_a_request_whose_logits_are_not_finite_fails_alone(folder):
    wanted = Engine(folder).generate([PROMPT], LONG)[0][0]
    engine = spoilt(folder, num_pages=30)
    prompts = [PROMPT, [1, 20, BAD_TOKEN, 4, 5, 6], PROMPT]
    for _ in range(3):  # pages that held NaN serve others later
        good, bad, again = engine.generate(prompts, LONG, on_error="return")
        engine.scheduler.check()
        assert (bad[0].finish_reason, bad[0].token_ids) == ("error", ())
        assert "version 0" in bad[0].message and "\n" not in bad[0].message
        for one in (good[0], again[0]):
            if BAD_TOKEN not in wanted.token_ids:
                assert (one.token_ids, one.logprobs) == (wanted.token_ids, wanted.logprobs)
    assert BAD_TOKEN not in wanted.token_ids
    with pytest.raises(FloatingPointError, match="request-"):
        engine.generate(prompts, LONG)
    assert not engine.has_work


def test_a_token_with_a_spoilt_logit_does_not_reach_the_completion(folder):
    engine = Engine(folder)
    whole = engine.generate([PROMPT], LONG)[0][0]
    spoilt_at = next(
        i for i, token in enumerate(whole.token_ids) if token not in (*PROMPT, *whole.token_ids[:i])
    )
    engine.weights.views()["model.embed_tokens.weight"][whole.token_ids[spoilt_at]] = math.nan
    engine.scheduler.prefix.drop()
    one = engine.generate([PROMPT], LONG, on_error="return")[0][0]
    assert one.finish_reason == "error"
    assert one.token_ids == whole.token_ids[: spoilt_at + 1]


def test_no_memory_in_a_forward_names_the_settings_and_can_be_tried_again(folder, monkeypatch):
    engine = Engine(folder)
    wanted = engine.generate([PROMPT], LONG)[0][0]
    engine.add_request(PROMPT, LONG)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("can't allocate memory"),
    ):
        with monkeypatch.context() as patch:

            def fail(*_, error=error):
                raise error

            patch.setattr("rollout.engine.sample", fail)
            with pytest.raises(EngineError, match=r"max_batch_tokens.*num_pages") as caught:
                engine.step()
        assert "\n" not in str(caught.value)
        engine.scheduler.check()
    assert drain(engine)[0].logprobs == wanted.logprobs


def test_another_error_in_a_forward_is_not_called_memory(folder, monkeypatch):
    engine = Engine(folder)
    engine.add_request(PROMPT, LONG)

    def fail(*_):
        raise RuntimeError("shapes disagree")

    monkeypatch.setattr("rollout.engine.sample", fail)
    with pytest.raises(RuntimeError, match="shapes disagree"):
        engine.step()


@pytest.mark.parametrize("limits", [{}, {"num_pages": 12}])
def test_abort_and_resume_is_recompute(folder, limits):
    """Aborted by an update and resumed, or carried on: the same tokens, logprobs and versions."""
    given = {}
    params = SamplingParams(max_tokens=20, n=2, ignore_eos=True, top_p=0.9, first_sample=3)
    for in_flight in ("recompute", "abort"):
        engine = Engine(folder, EngineConfig(page_size=4, in_flight=in_flight, **limits))
        for prompt in (PROMPT, PROMPT[:2]):
            engine.add_request(prompt, params)
        for _ in range(8):
            assert not engine.step()
        cut = engine.load_weights(*other_weights(engine, 1))
        assert len(cut) == (4 if in_flight == "abort" else 0)
        assert engine.has_work == (in_flight == "recompute")
        for one in cut:
            assert one.finish_reason == "abort"
            engine.resume(one, params)
        done = drain(engine)
        key = lambda one: (one.prompt_ids, one.sample_index)  # noqa: E731
        given[in_flight] = [
            (one.token_ids, one.logprobs, one.policy_versions, one.kept_thresholds)
            for one in sorted(done, key=key)
        ]
        assert all(set(one.policy_versions) >= {1} for one in done)
        assert any(set(one.policy_versions) == {0, 1} for one in done)
    assert len(given["abort"]) == 4
    assert given["abort"] == given["recompute"]


def test_a_cut_completion_can_go_on_as_a_prompt(folder):
    engine = Engine(folder)
    engine.add_request(PROMPT, LONG)
    for _ in range(6):
        engine.step()
    (cut,) = engine.load_weights(*other_weights(engine, 1), in_flight="abort")
    (one,) = engine.generate([[*cut.prompt_ids, *cut.token_ids]], LONG)[0]
    assert set(one.policy_versions) == {1}


def test_keep_is_refused_while_exact(folder):
    engine = Engine(folder)
    with pytest.raises(EngineError, match="in_flight"):
        EngineConfig(in_flight="keep")
    with pytest.raises(EngineError, match="in_flight"):
        engine.load_weights(*other_weights(engine, 1), in_flight="keep")
    with pytest.raises(EngineError, match="in_flight"):
        EngineConfig(in_flight="never")  # type: ignore[arg-type]
    assert engine.version == 0


def test_keep_goes_on_without_computing_anything_again(folder):
    config = EngineConfig(page_size=4, exact=False, in_flight="keep")
    engine = Engine(folder, config)
    engine.add_request(PROMPT * 2, SamplingParams(max_tokens=20, n=3, ignore_eos=True))
    for _ in range(8):
        engine.step()
    before = engine.stats()["computed_tokens"]
    engine.load_weights(*other_weights(engine, 1))
    engine.scheduler.check()
    engine.step()
    assert engine.stats()["computed_tokens"] == before + 3
    late = engine.add_request(PROMPT * 2, LONG)
    done = drain(engine)
    assert [set(one.policy_versions) for one in done if one.request_id != late] == [{0, 1}] * 3
    fresh = Engine(folder, config)
    fresh.load_weights(*other_weights(fresh, 1))
    (alone,) = fresh.generate([PROMPT * 2], LONG)[0]
    (found,) = [one for one in done if one.request_id == late]
    assert found.token_ids == alone.token_ids  # it was given no KV of older weights
    assert engine.stats()["held_pages"] == 0


def test_only_what_was_cut_can_be_resumed(folder):
    engine = Engine(folder)
    (done,) = engine.generate([PROMPT], LONG)[0]
    with pytest.raises(RequestError, match="only an aborted"):
        engine.resume(done, LONG)
    engine.add_request(PROMPT, LONG)
    for _ in range(6):
        engine.step()
    (cut,) = engine.load_weights(*other_weights(engine, 1), in_flight="abort")
    with pytest.raises(RequestError, match="raise max_tokens"):
        engine.resume(cut, SamplingParams(max_tokens=len(cut.token_ids)))


def random_operations(count: int, seed: int) -> Iterator[Scheduler]:
    """A scheduler under arrivals, steps, aborts, updates, failures and appended tokens."""
    source = random.Random(seed)
    scheduler = Scheduler(EngineConfig(page_size=2, max_sequences=6, prefill_chunk=5), 30)
    names = itertools.count()

    def more(completion: Completion) -> tuple[int, ...]:
        if source.random() < 0.1:
            raise KeyError("tool")
        return (7,) * source.randrange(4)

    def step() -> None:
        plan = scheduler.plan()
        drawing = sum(row.draws for row in plan.rows)
        logprobs = [math.nan if source.random() < 0.02 else -1.0 for _ in range(drawing)]
        scheduler.commit(plan, [source.randrange(6) for _ in logprobs], logprobs)

    def arrive() -> None:
        if len(scheduler.waiting) < 30:
            params = SamplingParams(max_tokens=source.randrange(1, 12), n=source.randrange(1, 4))
            prompt = (5,) * source.randrange(1, 9)
            name = f"request-{next(names)}"
            request = Request(name, prompt, params, frozenset({0}), environment=more)
            scheduler.add(samples_of(request))

    def update() -> None:
        scheduler.change_weights(
            scheduler.version + 1, source.choice(["recompute", "keep", "abort"])
        )

    def abort() -> None:
        if scheduler.running:
            scheduler.abort(source.choice(scheduler.running).request.request_id)

    for _ in range(count):
        source.choices([step, arrive, abort, update], [70, 25, 4, 1])[0]()
        scheduler.check()
        yield scheduler
    while scheduler.has_work:
        step()


@pytest.mark.parametrize(
    "count", [4_000, pytest.param(100_000, marks=pytest.mark.slow, id="100000")]
)
def test_random_operations_leave_no_leak(count):
    *_, scheduler = random_operations(count, seed=count)
    assert scheduler.counters["sent_back"] > 20 and scheduler.counters["finished"] > 200
    assert scheduler.pool.available == scheduler.pool.num_pages
    assert not scheduler._pending
    scheduler.prefix.drop()
    assert scheduler.pool.free == scheduler.pool.num_pages
