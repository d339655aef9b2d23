"""A completion run again with its tokens given, to see each op's output up to one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout.batch import build_batch
from rollout.request import Request, RequestError, Sample, SamplingParams, samples_of
from rollout.scheduler import Scheduler

if TYPE_CHECKING:
    from rollout.engine import Engine


def trace_rows(
    engine: Engine,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    position: int,
    temperature: float,
) -> dict[str, Tensor]:
    """See Engine.trace. Pages and planner are its own, so requests under way are not touched."""
    tokens = [*prompt_ids, *token_ids]
    if not 0 < len(prompt_ids) <= position < len(tokens):
        raise RequestError(
            f"position is {position}: the drawn tokens are {len(prompt_ids)} to {len(tokens) - 1}"
        )
    scheduler, sample = _alone(engine, tuple(prompt_ids), len(token_ids))
    kv = engine._new_kv(scheduler.pool.num_pages)
    pieces: dict[str, list[Tensor]] = {}
    last: dict[str, Tensor] = {}

    def observe(name: str, value: Tensor) -> None:
        pieces.setdefault(name, []).append(value.clone())

    while len(sample.tokens) <= position:
        plan = scheduler.plan()
        draws = plan.rows[0].draws
        is_last = draws and len(sample.tokens) == position
        batch = build_batch(plan, engine.config.page_size, engine.device)
        hidden_TD = engine.model(batch.token_ids_T, batch.positions_T, kv.at(batch), observe)
        if is_last:
            last = _logit_rows(engine, hidden_TD[-1:], tokens[position], temperature)
        forced = tokens[len(sample.tokens) : len(sample.tokens) + draws]
        scheduler.commit(plan, forced, [0.0] * draws)
    return {name: torch.cat(each) for name, each in pieces.items()} | last


def _alone(engine: Engine, prompt_ids: tuple[int, ...], drawn: int) -> tuple[Scheduler, Sample]:
    length = len(prompt_ids) + drawn
    engine.model.reserve(length)
    request = Request("trace", prompt_ids, SamplingParams(max_tokens=drawn), frozenset())
    samples = samples_of(request)
    config = replace(engine.config, max_sequences=1, prefix_cache=False)
    scheduler = Scheduler(config, num_pages=-(-length // config.page_size))
    scheduler.add(samples)
    return scheduler, samples[0]


def _logit_rows(
    engine: Engine, hidden_1D: Tensor, token: int, temperature: float
) -> dict[str, Tensor]:
    temperature_1 = torch.tensor([temperature or 1.0], device=engine.device)
    logits_1V = engine.ops.scaled_logits(
        hidden_1D, engine.model.head_VD, temperature_1, engine.vocab_limit
    )
    token_1 = torch.tensor([token], device=engine.device)
    return {"logits": logits_1V[0], "logprob": engine.ops.select_logprobs(logits_1V, token_1)[0]}
