"""What the report says in words and numbers: the verdict of each run, and the table of all."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.report_panels import lag_tokens
from recipes.report_runs import (
    Group,
    Run,
    Value,
    accuracies_of,
    compared_kl,
    differing_settings,
    of,
)

COMPARED, DIFFERING = of("parity/tokens_compared"), of("parity/tokens_differing")
LAG_COMPARED, LAG_DIFFERING = (
    of("parity/lag_rescored_compared"),
    of("parity/lag_rescored_differing"),
)
ULP = of("parity/max_ulp")
NOTHING = "–"
MOST_REASON = 160
DISPROVED = ("ParityError", "ProofError")
CORRECTED = {
    "none": "not corrected",
    "tis": "corrected by truncated importance weights",
    "mis": "corrected by leaving out tokens with a large ratio",
}


@dataclass(frozen=True)
class Verdict:
    """tone: "good", "bad" or "open" (nothing is claimed). Sentences, most important first."""

    tone: str
    headline: str
    details: Sequence[str]


def verdict(run: Run) -> Verdict:
    """What the run's record proves about its log-probabilities, and what the record lacks."""
    compared = int(_sum(run, COMPARED) + _sum(run, LAG_COMPARED))
    differing = int(_sum(run, DIFFERING) + _sum(run, LAG_DIFFERING))
    details = [*_lag_details(run), *_kl_details(run), *_gaps(run)]
    amount = f"{differing:,} of {compared:,} tokens differ"
    if run.stop_reason.startswith(DISPROVED):
        headline = f"STOPPED at step {run.last_step + 1}: the next batch could not be proved"
        before = f"Before that, {amount}"
        return Verdict("bad", headline, [run.stop_reason, before, *_largest(run), *details])
    if not compared:
        return Verdict("open", "Nothing was compared yet: nothing is proved", details)
    if run.mode in CORRECTED:
        share = f" ({_percent(differing / compared)})"
        headline = f"Comparison run (mode {run.mode}): {amount}{share}, {CORRECTED[run.mode]}"
        about = "The sampler ran ordinary kernels, so a difference was to be expected"
        return Verdict("open", headline, [about, *_largest(run), *details])
    name = "Bitwise" if run.mode == "bitwise" else "Mode unknown (no settings kept)"
    if differing:
        return Verdict("bad", f"{name}, BROKEN: {amount}", [*_largest(run), *details])
    headline = f"{name}: {compared:,} tokens compared, 0 differ"
    return Verdict("good" if run.mode else "open", headline, details)


def _sum(run: Run, value: Value) -> float:
    return sum(run.values(value))


def _largest(run: Run) -> list[str]:
    ulp = max(run.values(ULP), default=0)
    return [f"Largest difference: {int(ulp):,} units in the last place"] if ulp else []


def _lag_details(run: Run) -> list[str]:
    compared, differing = int(_sum(run, LAG_COMPARED)), int(_sum(run, LAG_DIFFERING))
    stale = int(sum(n for lag, n in lag_tokens(Group(run.name, (run,))).items() if lag))
    if not compared and not stale:
        return []
    said = f"Of these, stale tokens proved again: {compared:,} compared, {differing:,} differ"
    left = stale - compared
    return [said, f"{left:,} stale tokens were not proved again"] if left > 0 else [said]


def _kl_details(run: Run) -> list[str]:
    numbers = run.values(compared_kl)
    return [f"Largest KL(sampler || trainer): {_number(largest(numbers))}"] if numbers else []


def _gaps(run: Run) -> list[str]:
    """What keeps the sums from covering the whole run."""
    said = []
    have = {row["step"] for row in run.steps}
    missing = sum(step not in have for step in range(1, run.last_step + 1))
    if missing:
        said.append(f"{missing} earlier step{'s' * (missing > 1)} not on record")
    silent = sum(COMPARED(row) is None or DIFFERING(row) is None for row in run.steps)
    if silent:
        said.append(f"{silent} step{'s' * (silent > 1)} without a parity record")
    lost = sum(
        "kl/sampler_trainer" in row and row["kl/sampler_trainer"] is None for row in run.steps
    )
    if lost:
        said.append(f"KL is no number at {lost} step{'s' * (lost > 1)}")
    return said


def largest(numbers: Sequence[float]) -> float | None:
    """The number of the largest size; None of none."""
    return max(numbers, key=abs, default=None)


def state(run: Run) -> str:
    """How far the run is, in words."""
    done, total = run.last_step, run.total_steps
    if run.ended:
        return f"ended after step {done}"
    far = f"step {done} of {total}" if total else f"step {done}"
    if run.stop_reason:
        return f"{far}; stopped by {run.stop_reason[:MOST_REASON]}"
    return f"{far}; not ended: still under way, or stopped"


def table(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Row name -> a cell for each run; rows that no run has a number for are left out."""
    rows: dict[str, list[str]] = {
        "state": [state(run) for run in runs],
        "steps on record": [f"{len(run.steps):,}" for run in runs],
    }
    rows |= {name: [_setting(x) for x in column] for name, column in _settings(runs).items()}
    for kind in dict.fromkeys(
        k for run in runs for row in run.evaluations for k in accuracies_of(row)
    ):
        rows[f"accuracy, {kind.replace('_', ', ')}"] = [_accuracy(run, kind) for run in runs]
    for name, cell in NUMBERS.items():
        rows[name] = [cell(run) for run in runs]
    return {name: cells for name, cells in rows.items() if set(cells) != {NOTHING}}


def _settings(runs: Sequence[Run]) -> Mapping[str, Sequence[Any]]:
    """Those that differ; the mode and the seed in any case."""
    kept = [run for run in runs if run.config]
    always = {name: [run.config.get(name) for run in runs] for name in ("mode", "seed")}
    differing = differing_settings(runs) if len(kept) == len(runs) else {}
    return {f"--{n.replace('_', '-')}": c for n, c in {**always, **differing}.items()}


def _setting(value: Any) -> str:
    if value is None:
        return NOTHING
    return str(value) if isinstance(value, str | int | float) else repr(value)


def _accuracy(run: Run, kind: str) -> str:
    found = [(row["step"], row) for row in run.evaluations if kind in accuracies_of(row)]
    if not found:
        return NOTHING
    ends = [found[0]] if len(found) == 1 else [found[0], found[-1]]
    return "\n".join(f"step {step}: {_share(row, kind)}" for step, row in ends)


def _share(row: Mapping[str, Any], kind: str) -> str:
    share, low, high = accuracies_of(row)[kind]
    return f"{100 * share:.1f}% ({100 * low:.1f} to {100 * high:.1f})"


def _ends_of_reward(run: Run) -> str:
    numbers = run.values(of("reward"))
    return f"{numbers[0]:.3f} → {numbers[-1]:.3f}" if numbers else NOTHING


def _counted(value: Value) -> Callable[[Run], str]:
    return lambda run: f"{int(_sum(run, value)):,}" if run.values(value) else NOTHING


def _largest_of(value: Value) -> Callable[[Run], str]:
    return lambda run: _number(largest(run.values(value)))


def _oldest(run: Run) -> str:
    numbers = run.values(of("lag/versions_max"))
    return f"{max(numbers):g}" if numbers else NOTHING


def _median_of(name: str) -> Callable[[Run], str]:
    def cell(run: Run) -> str:
        numbers = run.values(of(name))
        return f"{statistics.median(numbers):,.0f}" if numbers else NOTHING

    return cell


def _seconds(run: Run) -> str:
    seconds = run.values(of("step_time"))
    return f"{sum(seconds):,.1f} s" if seconds else NOTHING


def _number(number: float | None) -> str:
    """A zero that is exact looks other than one that is only small."""
    if number is None:
        return NOTHING
    return "0.0 exactly" if number == 0 else f"{number:.3g}"


def _percent(share: float) -> str:
    """Never 0% or 100% for what is not."""
    shown = f"{100 * share:.1f}%"
    return f"{100 * share:.3g}%" if shown in ("0.0%", "100.0%") and share not in (0, 1) else shown


NUMBERS: dict[str, Callable[[Run], str]] = {
    "reward, first → last step": _ends_of_reward,
    "fresh tokens compared": _counted(COMPARED),
    "fresh tokens differing": _counted(DIFFERING),
    "stale tokens proved again": _counted(LAG_COMPARED),
    "stale tokens differing": _counted(LAG_DIFFERING),
    "largest KL(sampler || trainer)": _largest_of(compared_kl),
    "largest KL from mismatch": _largest_of(of("kl/mismatch")),
    "largest KL from lag": _largest_of(of("kl/lag")),
    "oldest token, versions behind": _oldest,
    "rollout, tokens/s (median)": _median_of("tokens_per_second/rollout"),
    "trainer, tokens/s (median)": _median_of("tokens_per_second/train"),
    "time of all steps": _seconds,
}
