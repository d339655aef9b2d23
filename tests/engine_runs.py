"""Requests of many kinds that join while others decode, for tests that compare engines."""

from __future__ import annotations

import random

from rollout import Engine, SamplingParams

LIMITS = {
    "default": {},
    "pages of three": {"page_size": 3},
    "page pressure": {"page_size": 4, "num_pages": 20},
    "three sequences": {"max_sequences": 3},
    "small batches": {"max_batch_tokens": 7},
    "no prefix cache": {"prefix_cache": False},
}


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    source = random.Random(seed)
    shared = [source.randrange(3, 110) for _ in range(40)]
    return [
        (
            [*shared[: source.randrange(1, 40)], source.randrange(3, 110)],
            SamplingParams(
                max_tokens=source.randrange(1, 30),
                n=source.randrange(1, 3),
                temperature=(1.0, 0.0, 0.7)[index % 3],
                seed=seed,
            ),
        )
        for index in range(7)
    ]


def served(engine: Engine, turns: int = 2) -> dict[tuple[str, int], tuple]:
    """Requests that join while others decode; (tokens, logprobs) of every sample."""
    waiting = [request for seed in range(turns) for request in requests(seed)]
    done: dict[tuple[str, int], tuple] = {}
    steps = 0
    while waiting or engine.has_work:
        if waiting and steps % 3 == 0:
            engine.add_request(*waiting.pop(0))
        for one in engine.step():
            done[one.request_id, one.sample_index] = (one.token_ids, one.logprobs)
        engine.scheduler.check()
        steps += 1
    assert engine.scheduler.pool.available == engine.scheduler.pool.num_pages
    return done
