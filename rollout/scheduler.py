"""Which tokens to compute next: plan() -> StepPlan, then commit(plan, drawn) -> completions.

Rules.
* A sample is admitted with pages for all its known tokens, so only a growing sample can find the
  pool empty.
* Pages go to samples in the order of admission; one that finds none sends the last admitted back to
  wait (it keeps its drawn tokens and recomputes their KV). The first admitted is therefore never
  sent back, and a request is accepted only
  if it fits alone: there is always progress.
* Every growing sample gets its one token before prefill shares out the rest of the batch.
* A waiting sample whose next page is being filled by a running one waits until the page is there.
  So a group computes its prompt once. It holds nothing meanwhile, and others may pass it.
* Nothing is admitted in a step that sent a sample back, nor past a sample that waits for pages.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout.config import EngineConfig, InFlight
from rollout.prefix import Key, PrefixCache
from rollout.request import Completion, RequestError, Sample

NOT_FINITE = "logits are not finite"


class PlanRow(NamedTuple):
    """Compute sample.tokens[start : start + count].

    draws: this reaches the last known token, so a new one is drawn.
    """

    sample: Sample
    start: int
    count: int

    @property
    def draws(self) -> bool:
        return self.start + self.count == len(self.sample.tokens)


@dataclass(frozen=True)
class StepPlan:
    """One forward, rows of one token first.

    Example: two samples that grow and a chunk of a prompt are
    (PlanRow(a, 7, 1), PlanRow(b, 9, 1), PlanRow(c, 0, 16)).
    """

    rows: tuple[PlanRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Scheduler:
    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        self.config = config
        self.version = 0
        self.prefix = PrefixCache(num_pages, config.page_size, config.prefix_cache)
        self.pool = self.prefix.pool
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.counters: Counter[str] = Counter()
        self._pending: dict[Key, Sample] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def require_fits(self, prompt_length: int, max_tokens: int) -> None:
        """RequestError where such a sample could not run even alone."""
        # The last drawn token is never computed, so it needs no slot.
        pages = self._pages_for(prompt_length + max_tokens - 1)
        if pages > self.pool.num_pages:
            raise RequestError(
                f"a prompt of {prompt_length} tokens with max_tokens {max_tokens} needs {pages} KV"
                f" pages and the engine has {self.pool.num_pages}: lower max_tokens or raise"
                " num_pages"
            )

    def add(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self.require_fits(len(sample.tokens), sample.request.params.max_tokens)
        self.waiting.extend(samples)

    def plan(self) -> StepPlan:
        """The next forward, without rows if there is nothing to do; it may be planned again."""
        growing = sum([len(one.tokens) == one.computed + 1 for one in self.running])
        budget = self.config.max_batch_tokens
        growth, prefill = min(growing, budget), max(0, budget - growing)
        before = self.counters["sent_back"]
        rows: list[PlanRow] = []
        while len(rows) < len(self.running):
            sample = self.running[len(rows)]
            start, remaining = sample.computed, sample.remaining
            if remaining == 1:
                count = min(1, growth)
                growth -= count
            else:
                count = min(remaining, self.config.prefill_chunk, prefill)
                prefill -= count
            lacks = start + count > len(sample.pages) * self.config.page_size
            if lacks and not self._find_room(sample, start + count):
                break
            rows.append(PlanRow(sample, start, count))
        if self.counters["sent_back"] == before:
            rows.extend(self._admit(prefill))
        rows.sort(key=lambda row: row.count > 1)
        return StepPlan(tuple(row for row in rows if row.count))

    def commit(
        self,
        plan: StepPlan,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        thresholds: Sequence[float] | None = None,
    ) -> list[Completion]:
        """Book a forward; tokens, logprobs and thresholds are of the rows that draw, in order.

        A sample whose logprob is not finite ends with an error, without that token.
        """
        thresholds = [-math.inf] * len(tokens) if thresholds is None else thresholds
        drawn = iter(zip(tokens, logprobs, thresholds, strict=True))
        finished: list[Sample] = []
        for row in plan.rows:
            sample, draws = row.sample, row.draws
            sample.computed += row.count
            self.prefix.record(sample)
            if draws:
                self._append(sample, *next(drawn))
            if sample.finish_reason:
                finished.append(sample)
            elif sample.pending is not None or self.prefix.fills_next(sample):
                self._announce(sample)
        self._leave(finished)
        self.counters.update(
            steps=1,
            computed_tokens=plan.num_tokens,
            drawn_tokens=len(tokens),
            finished=len(finished),
        )
        return [sample.completion() for sample in finished]

    def _append(self, sample: Sample, token: int, logprob: float, threshold: float) -> None:
        if math.isfinite(logprob):
            sample.append(token, logprob, self.version, threshold)
            sample.ask_environment(self.version)
        else:
            sample.fail(
                f"{NOT_FINITE} under weights version {self.version}, after"
                f" {len(sample.tokens)} tokens of {sample.request.request_id}: look for NaN or"
                " infinity in the weights, or use a dtype of wider range"
            )

    def abort(self, request_id: str) -> list[Completion]:
        """The unfinished samples of a request, ended; none if it is unknown or finished."""
        waiting = [sample for sample in self.waiting if sample.request.request_id == request_id]
        running = [sample for sample in self.running if sample.request.request_id == request_id]
        if waiting:
            self.waiting = deque(
                sample for sample in self.waiting if sample.request.request_id != request_id
            )
        for sample in waiting + running:
            sample.finish_reason = "abort"
        self._leave(running)
        return [
            sample.completion()
            for sample in sorted(waiting + running, key=lambda sample: sample.index)
        ]

    def change_weights(self, version: int, in_flight: InFlight = "recompute") -> list[Completion]:
        """Drop the prefix cache. Unfinished samples keep their tokens and go on under the new
        version, with their KV recomputed or kept, or are aborted and returned."""
        cut: list[Completion] = []
        if in_flight == "abort":
            left = (*self.running, *self.waiting)
            names = dict.fromkeys(sample.request.request_id for sample in left)
            cut = [one for name in names for one in self.abort(name)]
        elif in_flight == "keep":
            for sample in self.running:
                self._withdraw(sample)
                sample.is_private = True
        else:
            while self.running:
                self._send_back()
        self.prefix.drop()
        self.version = version
        return cut

    def check(self) -> None:
        """Raise AssertionError where the books do not agree."""
        self.prefix.check(self.running)
        assert not any(sample.pages or sample.computed for sample in self.waiting), (
            "a waiting sample holds pages"
        )
        assert all(sample.remaining > 0 for sample in self.running), (
            "a running sample has nothing to compute"
        )
        assert len(self.running) <= self.config.max_sequences, (
            "more sequences run than max_sequences"
        )
        for key, sample in self._pending.items():
            assert sample in self.running and sample.pending == key, (
                "nobody is filling an awaited page"
            )

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _find_room(self, sample: Sample, tokens: int) -> bool:
        """Give the sample pages for that many tokens; False where it had to be sent back itself."""
        while len(sample.pages) < self._pages_for(tokens):
            if self.pool.available:
                sample.pages.append(self.pool.take())
            elif self._send_back() is sample:
                return False
        return True

    def _send_back(self) -> Sample:
        sample = self.running.pop()
        self._withdraw(sample)
        self.prefix.detach(sample)
        self.waiting.appendleft(sample)
        self.counters["sent_back"] += 1
        return sample

    def _admit(self, budget: int) -> list[PlanRow]:
        rows: list[PlanRow] = []
        passed: list[Sample] = []
        while self.waiting and budget and len(self.running) < self.config.max_sequences:
            sample = self.waiting.popleft()
            pages = self._prefix_pages(sample)
            if pages is None:
                passed.append(sample)
                continue
            if not self._start(sample, pages):
                self.waiting.appendleft(sample)
                break
            count = min(sample.remaining, self.config.prefill_chunk, budget)
            budget -= count
            rows.append(PlanRow(sample, sample.computed, count))
        self.waiting.extendleft(reversed(passed))
        return rows

    def _prefix_pages(self, sample: Sample) -> list[int] | None:
        """Known pages the sample can start on; None while the next one is being filled."""
        if sample.awaited in self._pending:
            return None
        pages, sample.awaited = self.prefix.find(sample.tokens)
        return None if sample.awaited in self._pending else pages

    def _start(self, sample: Sample, pages: list[int]) -> bool:
        """Admit a sample if there are pages for it and one more for each running one to grow."""
        total = self._pages_for(len(sample.tokens))
        used = total - len(pages) + sum(self.pool.is_idle(page) for page in pages)
        if used + len(self.running) > self.pool.available:
            return False
        self.prefix.attach(sample, pages)
        sample.pages.extend(self.pool.take() for _ in range(total - len(pages)))
        self.counters.update(admitted_tokens=len(sample.tokens), cached_tokens=sample.computed)
        self.running.append(sample)
        self._announce(sample)
        return True

    def _announce(self, sample: Sample) -> None:
        """Let others wait for the page that this sample fills next."""
        self._withdraw(sample)
        sample.pending = self.prefix.next_key(sample)
        if (
            sample.pending is not None
            and self._pending.setdefault(sample.pending, sample) is not sample
        ):
            sample.pending = None

    def _withdraw(self, sample: Sample) -> None:
        if sample.pending is not None:
            del self._pending[sample.pending]
            sample.pending = None

    def _leave(self, samples: list[Sample]) -> None:
        if not samples:
            return
        for sample in samples:
            self._withdraw(sample)
            self.prefix.detach(sample)
        self.running = [sample for sample in self.running if sample.finish_reason is None]
