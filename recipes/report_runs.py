"""Run folders as the report reads them: forgiving of damage, and saying what it was."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.curves import accuracies
from recipes.run_folder import SETTINGS

METRICS, EVALUATIONS, COMPLETIONS = "metrics.jsonl", "evaluations.jsonl", "completions.jsonl"
LINES_NAMED = 5
Row = Mapping[str, Any]
Value = Callable[[Row], float | None]


class ReportError(ValueError):
    """No report can be made; one line says of what, and what to give instead."""


@dataclass(frozen=True)
class Run:
    """What a run's folder holds; `steps` and `evaluations` rise by step, each step once.

    config: as in config.json; empty without that file. summary: None until the run has ended.
    damage: sentences on what could not be read.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    summary: Mapping[str, Any] | None
    stopped: Mapping[str, Any] | None
    damage: Sequence[str]

    @property
    def stop_reason(self) -> str:
        """What ended the run before its time, as far as it could say so; otherwise empty."""
        return str((self.stopped or {}).get("reason", ""))

    @property
    def mode(self) -> str | None:
        """bitwise, none, tis or mis; None where no settings were kept."""
        return self.config.get("mode")

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def total_steps(self) -> int:
        """As many as were asked for; a prolonged run has more than its first settings say."""
        asked = self.config.get("steps")
        return max(asked if isinstance(asked, int) else 0, self.last_step)

    @property
    def ended(self) -> bool:
        """Whether the closing summary was written, and nothing after it."""
        return self.summary is not None and self.summary.get("steps") == len(self.steps)

    def values(self, value: Value) -> list[float]:
        """One number for each step that has it."""
        return [number for number in map(value, self.steps) if number is not None]

    def points(self, value: Value) -> dict[int, float]:
        """step -> number, for the steps that have it."""
        found = ((row["step"], value(row)) for row in self.steps)
        return {step: number for step, number in found if number is not None}


@dataclass(frozen=True)
class Group:
    """Runs drawn as one line: a single run, or several that differ in nothing but the seed."""

    label: str
    runs: Sequence[Run] = field(default_factory=tuple)

    @property
    def is_band(self) -> bool:
        return len(self.runs) > 1


def of(name: str) -> Value:
    """The metric `name` of a step; None where it lacks or is no number (NaN is kept as null)."""

    def value(row: Row) -> float | None:
        found = row.get(name)
        return found if isinstance(found, int | float) and math.isfinite(found) else None

    return value


def accuracies_of(row: Row) -> dict[str, tuple[float, float, float]]:
    """kind -> (share, low, high) of an evaluation, for the kinds that have all three numbers."""
    found = accuracies(row).items()
    return {kind: three for kind, three in found if all(isinstance(x, int | float) for x in three)}


def compared_kl(row: Row) -> float | None:
    """KL(sampler || trainer) of a step; None where nothing was compared."""
    counted = (row.get("parity/tokens_compared"), row.get("parity/lag_rescored_compared"))
    return of("kl/sampler_trainer")(row) if any(counted) else None


def load_runs(folders: Sequence[str]) -> list[Run]:
    """All runs, with names that tell them apart.

    Raises:
        ReportError: a folder is missing, holds no run, or is given twice.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    resolved = [path.resolve() for path in paths]
    for place, path in enumerate(resolved):
        if path in resolved[:place]:
            raise ReportError(f"{paths[place]}: given twice, leave one out")
    names = _names(resolved)
    return [
        _load(path, shown, name) for path, shown, name in zip(resolved, paths, names, strict=True)
    ]


def _names(paths: Sequence[Path]) -> list[str]:
    """Folder names, with as many of the parents' as it takes."""
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[1:][-depth:]) or path.name for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _load(path: Path, shown: Path, name: str) -> Run:
    if not path.is_dir():
        what = "is no folder" if path.exists() else "no such folder"
        raise ReportError(f"{shown}: {what}: give a run's folder, as --out named it")
    if not (path / METRICS).exists() and not (path / SETTINGS).exists():
        raise ReportError(
            f"{shown}: not a run's folder (neither {METRICS} nor {SETTINGS} in it): "
            "give the folder that --out named"
        )
    damage: list[str] = []
    try:
        return Run(
            folder=path,
            name=name,
            config=_json(path / SETTINGS, damage) or {},
            steps=_by_step(path / METRICS, damage),
            evaluations=_by_step(path / EVALUATIONS, damage),
            summary=_json(path / "summary.json", damage),
            stopped=_json(path / "stopped.json", damage),
            damage=damage,
        )
    except OSError as error:
        raise ReportError(f"{shown}: cannot be read ({error.strerror or error})") from error


def _json(path: Path, damage: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8", "replace"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        damage.append(f"{path.name} is damaged and was left out")
        return None
    return found


def _by_step(path: Path, damage: list[str]) -> list[Row]:
    rows = {row["step"]: row for row in records(path, damage)}
    return [rows[step] for step in sorted(rows)]


def records(path: Path, damage: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The whole records of a JSON lines file, each with its step; adds to `damage` what was not."""
    if not path.exists():
        return
    broken, cut = [], False
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            record = _record(line)
            if record is not None:
                yield record
            elif line.endswith("\n"):
                broken.append(number)
            else:
                cut = True
    if damage is not None:
        damage += _said(path.name, broken, cut)


def _record(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(found, dict) and isinstance(found.get("step"), int)
    return found if whole else None


def _said(name: str, broken: Sequence[int], cut: bool) -> list[str]:
    said = []
    if broken:
        more = f" and {len(broken) - LINES_NAMED} more" if len(broken) > LINES_NAMED else ""
        lines = ", ".join(map(str, broken[:LINES_NAMED])) + more
        plural = "s" * (len(broken) > 1)
        said.append(f"{name}: {len(broken)} damaged line{plural} left out (line{plural} {lines})")
    if cut:
        said.append(f"{name}: the last line is cut short and was left out")
    return said


def settings(run: Run) -> dict[str, Any]:
    """Dotted name -> value, without what a side only repeats of the run's own settings."""
    flat = dict(_flat(run.config, ""))
    repeated = {"rollout.exact": flat.get("mode") == "bitwise"}
    for side in ("rollout", "trainer"):
        repeated |= {f"{side}.{name}": flat.get(name) for name in ("device", "dtype", "mode")}
    repeated["trainer.max_completion_tokens"] = flat.get("max_tokens")
    return {
        name: value
        for name, value in flat.items()
        if not (name in repeated and repeated[name] == value)
    }


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Setting -> its value in each run (None where a run lacks it), for those that differ."""
    each = [settings(run) for run in runs]
    names = dict.fromkeys(name for one in each for name in one)
    columns = {name: [one.get(name) for one in each] for name in names}
    return {n: column for n, column in columns.items() if any(x != column[0] for x in column)}


def group_runs(runs: Sequence[Run], apart: bool = False) -> list[Group]:
    """Runs that share all settings but the seed, together; `apart` leaves each on its own."""
    groups: list[list[Run]] = []
    for run in runs:
        fits = (g for g in groups if not apart and all(_differ_by_seed(one, run) for one in g))
        twin = next(fits, None)
        if twin is None:
            groups.append([run])
        else:
            twin.append(run)
    return [Group(_label(each), tuple(each)) for each in groups]


def _differ_by_seed(one: Run, other: Run) -> bool:
    if not one.config or not other.config:
        return False
    return differing_settings([one, other]).keys() == {"seed"}


def _label(runs: Sequence[Run]) -> str:
    name = runs[0].name
    if len(runs) == 1:
        return name
    return f"{name} +{len(runs) - 1} (mean, n = {len(runs)})"
