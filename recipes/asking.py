"""Where a step's groups come from: asked when they are needed, or ahead of the trainer.

Both ask problems in one order and number them by their place in it; how a group is drawn depends
on its place only, so that asking ahead by 0 draws what asking when needed does.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from recipes.settings import RunConfig
from recipes.task import Task
from rollout.request import Completion, SamplingParams

Groups = list[list[Completion]]


class Source(Protocol):
    """Gives rounds of `prompts_per_step` groups."""

    def round(self, oldest: int) -> tuple[list[int], Groups]:
        """Rows of the problems, and their groups. oldest: version that a token may have."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from, as JSON holds it."""
        ...

    def counts(self) -> dict[str, int]:
        """Metrics of the groups since the last call; empty where nothing is asked ahead."""
        ...


class Asking:
    """Asks a round and waits for it: every token is drawn by the weights that use it first."""

    def __init__(self, config: RunConfig, task: Task, rollout: Any, state: dict[str, Any]) -> None:
        """rollout: has `generate`. state: of an earlier source, or empty."""
        self._config, self._task, self._rollout = config, task, rollout
        self._position = state.get("position", 0)

    def round(self, oldest: int) -> tuple[list[int], Groups]:
        config = self._config
        rows, prompts = self._task.batch_at(config, self._position)
        batch = self._position // config.prompts_per_step
        groups = self._rollout.generate(prompts, sampling(config, batch, prompts))
        self._position += config.prompts_per_step
        return rows, groups

    def state(self) -> dict[str, Any]:
        return {"position": self._position, "pending": []}

    def counts(self) -> dict[str, int]:
        return {}


class GroupError(RuntimeError):
    """A completion that was asked ahead failed."""


@dataclass
class _Asked:
    place: int
    row: int
    group: Future

    def oldest_version(self) -> int:
        return min(version for one in self.completions() for version in one.policy_versions)

    def completions(self) -> list[Completion]:
        """The finished group.

        Raises:
            GroupError: a completion of it failed; whatever ended the engine's step.
        """
        (group,) = self.group.result()
        for one in group:
            if one.finish_reason == "error":
                raise GroupError(f"problem number {self.place}: a completion failed: {one.message}")
        return group


class _Batch(NamedTuple):
    number: int
    rows: list[int]
    prompts: list[list[int]]
    params: list[SamplingParams]


class AskingAhead:
    """Keeps up to `max_lag` rounds under way beyond the one that the trainer uses.

    A step takes the first groups in asking order that are finished. One that finishes with a token
    older than `max_lag` publications is never used: it is asked again, or dropped, as `over_age`
    says. What was asked and not used when a run stops is asked again when it is resumed.
    """

    def __init__(self, config: RunConfig, task: Task, rollout: Any, state: dict[str, Any]) -> None:
        """rollout: has `submit`. state: of an earlier source, or empty."""
        self._config, self._task, self._rollout = config, task, rollout
        self._next = state.get("position", 0)
        self._again: list[int] = list(state.get("pending", []))
        self._asked: list[_Asked] = []
        self._batch: _Batch | None = None
        self._refreshed = self._dropped = self._across = 0

    def round(self, oldest: int) -> tuple[list[int], Groups]:
        size, rounds = self._config.prompts_per_step, self._config.max_lag or 0
        self._fill(size * (rounds + 1))
        taken = self._first_finished(size, oldest)
        self._asked = [asked for asked in self._asked if asked not in taken]
        self._fill(size * rounds)
        groups = [asked.completions() for asked in taken]
        self._across += sum(len(set(one.policy_versions)) > 1 for group in groups for one in group)
        return [asked.row for asked in taken], groups

    def state(self) -> dict[str, Any]:
        pending = [*(asked.place for asked in self._asked), *self._again]
        return {"position": self._next, "pending": sorted(pending)}

    def counts(self) -> dict[str, int]:
        finished = sum(asked.group.done() for asked in self._asked)
        counts = {
            "async/groups_refreshed": self._refreshed,
            "async/groups_dropped": self._dropped,
            "async/groups_waiting": finished,
            "async/groups_in_flight": len(self._asked) - finished,
            "async/completions_across_updates": self._across,
        }
        self._refreshed = self._dropped = self._across = 0
        return counts if self._config.max_lag else {}

    def _fill(self, limit: int) -> None:
        while len(self._asked) < limit:
            self._asked.append(self._ask(self._next_place()))

    def _next_place(self) -> int:
        if self._again:
            return self._again.pop(0)
        self._next += 1
        return self._next - 1

    def _ask(self, place: int) -> _Asked:
        size = self._config.prompts_per_step
        if self._batch is None or self._batch.number != place // size:
            number = place // size
            rows, prompts = self._task.batch_at(self._config, number * size)
            params = sampling(self._config, number, prompts)
            self._batch = _Batch(number, rows, prompts, params)
        batch, index = self._batch, place % size
        group = self._rollout.submit(batch.prompts[index], batch.params[index])
        return _Asked(place, batch.rows[index], group)

    def _first_finished(self, count: int, oldest: int) -> list[_Asked]:
        while True:
            self._replace_over_age(oldest)
            finished = [asked for asked in self._asked if asked.group.done()]
            if len(finished) >= count:
                return finished[:count]
            under_way = [asked.group for asked in self._asked if not asked.group.done()]
            wait(under_way, return_when=FIRST_COMPLETED)

    def _replace_over_age(self, oldest: int) -> None:
        for index, asked in enumerate(self._asked):
            if not asked.group.done() or asked.oldest_version() >= oldest:
                continue
            if self._config.over_age == "refresh":
                self._refreshed += 1
                self._asked[index] = self._ask(asked.place)
            else:
                self._dropped += 1
                self._asked[index] = self._ask(self._next_place())


def source_of(config: RunConfig, task: Task, rollout: Any, state: dict[str, Any]) -> Source:
    """The one that `max_lag` asks for."""
    kind = Asking if config.max_lag is None else AskingAhead
    return kind(config, task, rollout, state)


def sampling(
    config: RunConfig, batch: int, prompts: Sequence[Sequence[int]]
) -> list[SamplingParams]:
    """How the groups of a batch of prompts are drawn: a seed for every batch, no draw used twice.

    A prompt that the batch holds again goes on with later samples.
    """
    return [
        SamplingParams(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            n=config.group_size,
            seed=config.seed * 1_000_003 + batch,
            first_sample=config.group_size * list(prompts[:place]).count(prompt),
        )
        for place, prompt in enumerate(prompts)
    ]
