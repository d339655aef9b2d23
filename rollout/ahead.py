"""Planning a step while the one before it still runs.

A sample that grows needs a page and a place for its next token, and neither depends on which token
it draws. So a decode step can be planned, and its input tokens taken on the device, before the
host has seen them. What depends on them lags one step: a row whose sample turned out to have ended
is computed in vain and thrown away, and its page is nobody's by the time another step writes.
"""

from __future__ import annotations

from functools import lru_cache

from rollout.request import Sample, SamplingParams
from rollout.scheduler import PlanRow, Scheduler, StepPlan

# Settings that a captured decode step honours; a request that sets another one runs uncaptured.
CAPTURED_SETTINGS = frozenset(
    {"max_tokens", "temperature", "n", "seed", "stop_token_ids", "first_sample", "ignore_eos"}
)


@lru_cache(maxsize=4096)
def is_plain(params: SamplingParams) -> bool:
    """Whether every setting outside CAPTURED_SETTINGS has its default."""
    return all(
        getattr(params, name) == field.default
        for name, field in SamplingParams.__dataclass_fields__.items()
        if name not in CAPTURED_SETTINGS
    )


def is_decode(plan: StepPlan) -> bool:
    """Whether every row computes one token and draws the next, with plain settings."""
    return all(
        row.count == 1 and row.draws and is_plain(row.sample.request.params) for row in plan.rows
    )


def is_live(row: PlanRow) -> bool:
    """Whether a row under way is still what its sample needs next."""
    sample, start, count = row
    return (
        sample.finish_reason is None
        and sample.computed == start
        and start + count == len(sample.tokens)
    )


def plan_after(scheduler: Scheduler, plan: StepPlan) -> StepPlan | None:
    """The decode step after the decode step `plan`, which is under way and not committed.

    None where there is more to do than to let every running sample grow by a token: a sample could
    be admitted, or a page is missing. A sample that reaches its max_tokens in `plan` is left out.
    """
    growing = [row.sample for row in plan.rows if is_live(row)]
    staying = [
        sample for sample in growing if len(sample.logprobs) + 1 < sample.request.params.max_tokens
    ]
    may_admit = scheduler.waiting and len(staying) < scheduler.config.max_sequences
    if not staying or may_admit or len(growing) != len(scheduler.running):
        return None
    if not _make_room(scheduler, staying):
        return None
    return StepPlan(tuple(PlanRow(sample, len(sample.tokens), 1) for sample in staying))


def _make_room(scheduler: Scheduler, samples: list[Sample]) -> bool:
    """Pages for the token that each is about to draw; False, and none taken, if they lack."""
    size = scheduler.config.page_size
    short = [sample for sample in samples if len(sample.pages) * size <= len(sample.tokens)]
    if len(short) > scheduler.pool.available:
        return False
    for sample in short:
        sample.pages.append(scheduler.pool.take())
    return True
