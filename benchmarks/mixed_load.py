"""A load with everything in it that must not change a bit, and a record of what was in it.

Prompts of 1 to `longest` tokens (logarithms uniform, edges of pages and chunks among them), half of
them beginning alike, arrive in bursts and join while others decode, long ones in several chunks.
Then a flood of short prompts fills every place at once; as their completions grow together, pages
run out and samples are sent back, and as they end, the number of sequences that decode goes down to
1. The weights change in flight, so that the KV of all that runs is computed again and later tokens
are drawn by other weights.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

from rollout import Completion, Engine, SamplingParams
from rollout.scheduler import Scheduler, StepPlan

LONG = 129
FLOOD_PROMPT, FLOOD_MORE = 32, 120
EDGES = (1, 2, 15, 16, 17, 64, 127, 128, 129, 130, 511, 512, 513, 1023, 1024, 1025, 2047, 2048)
Name = tuple[str, int]


class Mixture(NamedTuple):
    """`requests` prompts of 1 to `longest` tokens, each continued by fewest to `most` tokens, then
    `flood` prompts of at most 32, continued by FLOOD_MORE more; weights change `updates` times."""

    requests: int
    longest: int = 2048
    flood: int = 512
    fewest: int = 20
    most: int = 140
    updates: int = 2


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams


def asked(mixture: Mixture, vocabulary: int, seed: int = 0) -> list[Asked]:
    """Every second prompt begins with tokens that others begin with too."""
    source = random.Random(seed)
    shared = [source.randrange(vocabulary) for _ in range(mixture.longest)]
    edges = [length for length in EDGES if length <= mixture.longest]
    found = []
    for index in range(mixture.requests + mixture.flood):
        is_flood = index >= mixture.requests
        length = edges[index // 4 % len(edges)]
        if index % 4 or is_flood:
            longest = min(FLOOD_PROMPT, mixture.longest) if is_flood else mixture.longest
            length = round(math.exp(source.uniform(0, math.log(longest))))
        common = source.randrange(length) if index % 2 else 0
        own = [source.randrange(vocabulary) for _ in range(length - common)]
        count = source.randint(mixture.fewest, mixture.most) + FLOOD_MORE * is_flood
        params = SamplingParams(count, n=1 + (index % 8 == 0), seed=index, ignore_eos=True)
        found.append(Asked([*shared[:common], *own], params))
    return found


def bursts(mixture: Mixture, seed: int = 0) -> Iterator[tuple[int, int]]:
    """(requests that arrive together, steps that follow): doubling, random ones, the flood."""
    source, left, size = random.Random(seed), mixture.requests, 1
    while left:
        count = min(left, size or source.randint(1, 64))
        left -= count
        yield count, source.randint(1, 6)
        size = 2 * size if 0 < size < 128 else 0
    yield mixture.flood, 20


class Watch:
    """What the requests of a run went through, seen at the planner's calls.

    counts: how often; samples: by the name of an ingredient, which samples had it; sizes: numbers
    of sequences that decoded in one step.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.samples: dict[str, set[Name]] = {}
        self.sizes: Counter[int] = Counter()

    @contextmanager
    def on(self, scheduler: Scheduler) -> Iterator[None]:
        """Look on while the block runs."""
        commit, attach = scheduler.commit, scheduler.prefix.attach
        send_back, change = scheduler._send_back, scheduler.change_weights

        def committing(plan: StepPlan, *drawn):
            self._step(plan)
            return commit(plan, *drawn)

        def attaching(sample, pages) -> None:
            attach(sample, pages)
            if pages:
                self._note("prefix hits", sample)

        def sending_back():
            sample = send_back()
            self._note("preempted", sample)
            return sample

        def changing(*which):
            self.counts["updates"] += 1
            self.counts["samples in flight at an update"] += len(scheduler.running)
            with mock.patch.object(scheduler, "_send_back", send_back):
                return change(*which)

        with (
            mock.patch.object(scheduler, "commit", committing),
            mock.patch.object(scheduler.prefix, "attach", attaching),
            mock.patch.object(scheduler, "_send_back", sending_back),
            mock.patch.object(scheduler, "change_weights", changing),
        ):
            yield

    def _note(self, what: str, sample) -> None:
        self.counts[what] += 1
        self.samples.setdefault(what, set()).add((sample.request.request_id, sample.index))

    def _step(self, plan: StepPlan) -> None:
        decoding = [row.sample for row in plan.rows if row.count == 1 and row.sample.logprobs]
        self.sizes[len(decoding)] += 1
        joining = [row for row in plan.rows if row.count >= LONG and decoding]
        for row in joining:
            self._note(f"joins of {LONG} tokens or more", row.sample)
            if row.start:
                self._note("joins at a chunk boundary", row.sample)
        for sample in decoding if joining else ():
            self._note("decoded beside such a join", sample)


def run(
    engine: Engine, mixture: Mixture, change: Callable[[int], object], seed: int = 0
) -> tuple[list[Completion], Watch]:
    """Serve the load. change(i) puts other weights into the engine, for i from 1 on.

    Returns:
        The completions, cut by nothing, and what they went through.
    """
    requests = asked(mixture, engine.model_config.vocab_size, seed)
    waiting, done, watch, updates = list(requests), [], Watch(), 0
    with watch.on(engine.scheduler):
        for count, steps in bursts(mixture, seed):
            for one in waiting[:count]:
                engine.add_request(one.prompt, one.params)
            del waiting[:count]
            for _ in range(steps):
                done += engine.step()
            share = 1 - len(waiting) / len(requests)
            if updates < mixture.updates and share >= (updates + 1) / (mixture.updates + 1):
                updates += 1
                change(updates)
        while engine.has_work:
            done += engine.step()
    wanted = sum(one.params.n * one.params.max_tokens for one in requests)
    drawn = sum(len(one.token_ids) for one in done)
    if drawn != wanted:
        raise RuntimeError(f"{drawn} of {wanted} tokens were drawn: {done[-1].message}")
    return done, watch


def require_all(watch: Watch, mixture: Mixture, completions: list[Completion]) -> dict[str, int]:
    """The counts; RuntimeError where an ingredient is missing, for then nothing was tried."""
    crossed = [one for one in completions if len(set(one.policy_versions)) > 1]
    watch.samples["lived through an update"] = {
        (one.request_id, one.sample_index) for one in crossed
    }
    sizes = [size for size in watch.sizes if size]
    counts = {
        **watch.counts,
        "lived through an update": len(crossed),
        "longest prompt": max(len(one.prompt_ids) for one in completions),
        "smallest batch": min(sizes),
        "largest batch": max(sizes),
        "different batch sizes": len(sizes),
    }
    wanted = ("prefix hits", "preempted", "joins at a chunk boundary", "decoded beside such a join")
    missing = [name for name in wanted if not counts.get(name)]
    if mixture.updates and not crossed:
        missing.append("lived through an update")
    if missing:
        raise RuntimeError(f"the mixed load has no {', no '.join(missing)}: it tests nothing")
    return counts
