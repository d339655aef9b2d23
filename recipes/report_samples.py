"""Completions side by side: the same prompts across runs, early and late, best and worst."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.report_runs import COMPLETIONS, Run, records

PROMPTS_SHOWN, RUNS_SHOWN = 3, 6
PART = 5


@dataclass
class Answers:
    """The best and the worst completion of one prompt in one step of a run.

    rewards: of every completion of that prompt and step.
    """

    step: int
    place: int
    best: Mapping[str, Any]
    worst: Mapping[str, Any]
    rewards: list[float | None] = field(default_factory=list)

    def add(self, one: Mapping[str, Any]) -> None:
        """Counts a completion in; the first of equals stays, and one not judged gives way."""
        reward, best, worst = _reward(one), _reward(self.best), _reward(self.worst)
        self.rewards.append(reward)
        if reward is not None and (best is None or reward > best):
            self.best = one
        if reward is not None and (worst is None or reward < worst):
            self.worst = one


@dataclass(frozen=True)
class Moment:
    """A part of the runs. prompts: text -> the answers of each run, None where it was not asked."""

    title: str
    prompts: Mapping[str, Sequence[Answers | None]]


def moments(runs: Sequence[Run]) -> list[Moment]:
    """The first and the last fifth of the runs, with those prompts that most runs share."""
    found = [_early_and_late(run) for run in runs[:RUNS_SHOWN]]
    titles = ("First steps", "Last steps")
    parts = [[each[part] for each in found] for part in (0, 1)]
    shown = [Moment(titles[part], _chosen(parts[part], later=part == 1)) for part in (0, 1)]
    return [moment for moment in shown if moment.prompts]


def _reward(one: Mapping[str, Any]) -> float | None:
    found = one.get("reward")
    return found if isinstance(found, int | float) else None


Part = dict[str, Answers]


def _early_and_late(run: Run) -> tuple[Part, Part]:
    """Prompt -> answers of the first step that asked it, and of the last; the file is read once."""
    early, late = {}, {}
    width = max(1, run.last_step // PART)
    for one in _completions(run):
        if one["step"] <= width:
            _take(early, one, later=False)
        if one["step"] > max(run.last_step - width, 1):
            _take(late, one, later=True)
    return early, late


def _completions(run: Run) -> Iterator[Mapping[str, Any]]:
    """Of the steps on record: a kill can leave completions of a step that has no line yet."""
    for one in records(run.folder / COMPLETIONS):
        texts = isinstance(one.get("prompt"), str) and isinstance(one.get("completion"), str)
        if texts and one["step"] <= run.last_step:
            yield one


def _take(part: Part, one: Mapping[str, Any], later: bool) -> None:
    prompt, step = one["prompt"], one["step"]
    held = part.get(prompt)
    if held is None or (later and step > held.step):
        held = part[prompt] = Answers(step, len(part), one, one)
    if step == held.step:
        held.add(one)


def _chosen(parts: Sequence[Part], later: bool) -> dict[str, list[Answers | None]]:
    """Prompts in most runs first, then those with unequal rewards, then from the run's end in."""

    def rank(prompt: str) -> tuple[int, bool, int, int]:
        held = [part[prompt] for part in parts if prompt in part]
        unequal = any(_reward(each.best) != _reward(each.worst) for each in held)
        step = max(-each.step if later else each.step for each in held)
        return -len(held), not unequal, step, min(each.place for each in held)

    prompts = sorted(dict.fromkeys(prompt for part in parts for prompt in part), key=rank)
    return {p: [part.get(p) for part in parts] for p in prompts[:PROMPTS_SHOWN]}
