"""Several turns in one completion, the asyncio front, its actor, and the live view."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from bits import differing
from rich.console import Console
from toy_models import toy_folder

from rollout import AsyncEngine, Completion, Engine, EngineConfig, RequestError, SamplingParams
from rollout.actor import AsyncRolloutActor
from rollout.live import live_view
from shared_ops.model.weights import make_manifest
from trainer import Trainer, TrainerConfig, TrainSample

PROMPT = [1, 20, 21, 22, 23]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
TURNS = SamplingParams(max_tokens=60, n=4, stop_token_ids=range(3, 40), ignore_eos=True)
ANSWER = (50, 51, 52)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("turns") / "model")


def three_turns(completion: Completion) -> tuple[int, ...]:
    return ANSWER if len(completion.appended) < 2 else ()


def drawn(completions) -> torch.Tensor:
    return torch.tensor([x for one in completions for x in one.logprobs], dtype=torch.float32)


@pytest.mark.parametrize("limits", [{}, {"page_size": 2, "num_pages": 40, "prefill_chunk": 2}])
def test_an_environment_appends_after_a_stop(folder, limits):
    (ones,) = Engine(folder, EngineConfig(**limits)).generate(
        [PROMPT], TURNS, environment=three_turns
    )
    assert [len(one.appended) for one in ones] == [2] * 4
    for one in ones:
        assert one.finish_reason == "stop"
        assert len(one.token_ids) == len(one.logprobs) == len(one.policy_versions)
        for first, end in one.appended:
            assert one.token_ids[first:end] == ANSWER
            assert one.token_ids[first - 1] in TURNS.stop_token_ids
            assert one.logprobs[first:end] == (0.0,) * 3
        assert one.is_drawn.count(False) == 6
        assert sum(len(turn.token_ids) for turn in one.turns()) == one.is_drawn.count(True)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8, "logit_bias": {60: 1.5}, "min_tokens": 3}])
def test_turns_have_the_trainers_bits_and_do_not_depend_on_batch_mates(folder, filters):
    params = replace(TURNS, **filters)
    prompts = [PROMPT, PROMPT[:3], [5]]
    config = EngineConfig(page_size=4, num_pages=60, prefill_chunk=3)
    groups = Engine(folder, config).generate(prompts, params, environment=three_turns)
    turns = [turn for group in groups for one in group for turn in one.turns()]
    samples = [
        TrainSample(
            turn.prompt_ids,
            turn.token_ids,
            turn.logprobs,
            1.0,
            turn.policy_versions,
            kept_thresholds=turn.kept_thresholds,
            logit_biases=turn.logit_biases,
        )
        for turn in turns
    ]
    drawn_N = drawn(turns)
    assert len(turns) >= 30 and len(drawn_N) > 60
    trainer = Trainer(folder, TrainerConfig())
    assert differing(torch.cat(trainer.logprobs(samples)), drawn_N) == 0
    alone = Engine(folder).generate(prompts[1:2], params, environment=three_turns)[0]
    assert [one.token_ids for one in alone] == [one.token_ids for one in groups[1]]
    assert differing(drawn(alone), drawn(groups[1])) == 0


def test_turns_by_hand_draw_from_the_same_logits(folder):
    """Handing all tokens back as a prompt gives the logprobs of the turn, at its own draws."""
    (one,) = Engine(folder).generate(
        [PROMPT], replace(TURNS, n=1, temperature=0), environment=three_turns
    )[0]
    for turn in one.turns():
        (again,) = Engine(folder).generate([turn.prompt_ids], replace(TURNS, n=1, temperature=0))[0]
        assert (again.token_ids, again.logprobs) == (turn.token_ids, turn.logprobs)


def test_what_leaves_no_room_to_draw_is_not_appended(folder):
    engine = Engine(folder)
    (stopped,) = engine.generate([PROMPT], replace(TURNS, n=1))[0]
    length = len(stopped.token_ids)
    for room, reason in ((0, "length"), (3, "length"), (4, "length")):
        params = replace(TURNS, n=1, max_tokens=length + room)
        (one,) = engine.generate([PROMPT], params, environment=lambda _: ANSWER)[0]
        assert one.finish_reason == reason
        assert len(one.token_ids) == (length + 4 if room == 4 else length)


def test_an_environment_that_fails_ends_its_request_alone(folder):
    def fail(completion: Completion):
        raise KeyError("tool")

    engine = Engine(folder)
    bad = engine.add_request(PROMPT, replace(TURNS, n=1), fail)
    wrong = engine.add_request(PROMPT, replace(TURNS, n=1), lambda _: [10**6])
    good = engine.add_request(PROMPT, LONG)
    done = {}
    while engine.has_work:
        done |= {one.request_id: one for one in engine.step()}
        engine.scheduler.check()
    assert (done[bad].finish_reason, done[good].finish_reason) == ("error", "length")
    assert "KeyError" in done[bad].message and "token id 1000000" in done[wrong].message
    with pytest.raises(RuntimeError, match="KeyError"):
        engine.generate([PROMPT], TURNS, environment=fail)


def test_concurrent_requests_get_what_they_get_alone(folder):
    prompts = [PROMPT[:length] for length in (1, 2, 3, 4, 5)]
    params = [replace(LONG, n=1 + index % 3, seed=index) for index in range(5)]
    wanted = Engine(folder).generate(prompts, params)

    async def run():
        front = AsyncEngine(Engine(folder, EngineConfig(page_size=4)))

        async def late(index: int):
            await asyncio.sleep(0.01 * index)
            return await front.generate(prompts[index], params[index])

        groups = await asyncio.gather(*map(late, range(5)))
        front.engine.scheduler.check()
        front.close()
        return groups

    groups = asyncio.run(run())
    for group, other in zip(groups, wanted, strict=True):
        assert [one.token_ids for one in group] == [one.token_ids for one in other]
        assert [one.sample_index for one in group] == list(range(len(other)))
        assert differing(drawn(group), drawn(other)) == 0


def test_a_stream_gives_tokens_as_they_are_drawn(folder):
    async def run():
        front = AsyncEngine(Engine(folder))
        pieces = [piece async for piece in front.stream(PROMPT, replace(LONG, n=2))]
        return pieces, front

    pieces, front = asyncio.run(run())
    assert len(pieces) >= 20
    for index in (0, 1):
        own = [piece for piece in pieces if piece.sample_index == index]
        whole = own[-1].completion
        assert whole is not None and all(piece.completion is None for piece in own[:-1])
        assert tuple(t for piece in own for t in piece.token_ids) == whole.token_ids
        assert tuple(x for piece in own for x in piece.logprobs) == whole.logprobs
    assert not front._queues and not front._sent


def test_a_consumer_that_leaves_aborts_its_request(folder):
    async def run():
        front = AsyncEngine(Engine(folder))
        stays = asyncio.create_task(front.generate(PROMPT, LONG))
        goes = asyncio.create_task(front.generate(PROMPT, replace(LONG, max_tokens=400)))
        await asyncio.sleep(0.05)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        (one,) = await stays
        return one, front.engine

    one, engine = asyncio.run(run())
    assert one.finish_reason == "length"
    assert not engine.has_work and engine.stats()["held_pages"] == 0


def test_weights_are_loaded_between_steps_and_aborted_requests_are_told(folder):
    async def run(in_flight):
        front = AsyncEngine(Engine(folder))
        tensors = {name: view * 1.25 for name, view in front.engine.weights.views().items()}
        waiting = asyncio.create_task(front.generate(PROMPT, replace(LONG, max_tokens=300)))
        while not front._sent:
            await asyncio.sleep(0.001)
        await front.load_weights(make_manifest(1, tensors), tensors, in_flight)
        return await waiting

    (one,) = asyncio.run(run("recompute"))
    assert (one.finish_reason, set(one.policy_versions)) == ("length", {0, 1})
    (one,) = asyncio.run(run("abort"))
    assert (one.finish_reason, set(one.policy_versions)) == ("abort", {0})


def test_a_failing_step_is_raised_for_everybody_who_waits(folder, monkeypatch):
    async def run():
        front = AsyncEngine(Engine(folder))
        with monkeypatch.context() as patch:
            patch.setattr("rollout.engine.sample", lambda *_: 1 / 0)
            calls = [front.generate(PROMPT, LONG) for _ in range(2)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
        return failed, await front.generate(PROMPT, LONG)

    failed, (one,) = asyncio.run(run())
    assert [type(error) for error in failed] == [ZeroDivisionError] * 2
    assert one.finish_reason == "length"


def test_the_async_actor_answers_as_an_engine(folder):
    wanted = Engine(folder).generate([PROMPT, [5]], LONG)

    async def run():
        actor = AsyncRolloutActor(folder, EngineConfig())
        first, second = await asyncio.gather(
            actor.generate([PROMPT, [5]], LONG), actor.generate([PROMPT], LONG)
        )
        with pytest.raises(RequestError):
            await actor.generate([PROMPT, []], LONG)
        assert not actor.engine.has_work
        return first, second

    first, second = asyncio.run(run())
    for got, other in ((first, wanted), (second, wanted[:1])):
        assert [one.token_ids for (one,) in got] == [one.token_ids for (one,) in other]
        assert differing(drawn([one for (one,) in got]), drawn([one for (one,) in other])) == 0


TOUCHING = ("add_request", "step", "abort", "load_weights", "weights_digest", "stats", "trace")


class Guarded(Engine):
    """An engine that notices a second caller."""

    def __init__(self, *arguments) -> None:
        self.inside = self.overlaps = 0
        self.entered: set[str] = set()
        super().__init__(*arguments)

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if name not in TOUCHING:
            return value
        return partial(self._counted, name, value)

    def _counted(self, name: str, method, *arguments):
        nested = name == "weights_digest" and self.inside == 1  # load_weights takes it itself
        self.overlaps += bool(self.inside) and not nested
        self.inside += 1
        self.entered.add(name)
        try:
            time.sleep(0.001)  # lets another thread in, if one is let
            return method(*arguments)
        finally:
            self.inside -= 1


def test_nothing_touches_the_engine_while_it_steps(folder, monkeypatch):
    monkeypatch.setattr("rollout.engine.Engine", Guarded)

    async def run():
        actor = AsyncRolloutActor(folder, EngineConfig())
        engine = actor.engine
        tensors = {name: view.clone() for name, view in engine.weights.views().items()}
        call = asyncio.create_task(actor.generate([PROMPT, [5]], LONG))
        leaves = asyncio.create_task(actor.generate([PROMPT], replace(LONG, max_tokens=400)))
        while not call.done():
            await asyncio.gather(actor.stats(), actor.trace(PROMPT, [5], 5))
            await actor.load_weights(make_manifest(1, tensors), tensors)
        leaves.cancel()
        await asyncio.wait([leaves])
        long = actor.front.between_steps(engine._counted, "long", time.sleep, 0.05)
        cancelled = asyncio.create_task(long)
        while "long" not in engine.entered:
            await asyncio.sleep(0)
        cancelled.cancel()
        await actor.generate([PROMPT], LONG)
        return engine

    engine = asyncio.run(run())
    assert engine.overlaps == 0
    assert engine.entered == {*TOUCHING, "long"}


def test_the_guard_sees_a_second_caller(folder):
    engine = Guarded(folder)
    engine.add_request(PROMPT, LONG)
    other = threading.Thread(target=lambda: [engine.stats() for _ in range(20)])
    other.start()
    while other.is_alive():
        engine.step()
    assert engine.overlaps


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_live_view_shows_itself_at_a_terminal_only(folder, is_terminal):
    engine, text = Engine(folder), io.StringIO()
    seen = []
    engine.on_step = lambda _: seen.append(1)
    with live_view(engine, Console(file=text, force_terminal=is_terminal)):
        engine.generate([PROMPT], LONG)
    steps = engine.stats()["steps"]
    assert len(seen) == steps >= 20
    assert ("cache hit rate" in text.getvalue()) == is_terminal
    engine.generate([PROMPT], LONG)
    assert len(seen) == engine.stats()["steps"] > steps
