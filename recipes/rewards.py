"""Calls reward functions and combines what they return; nothing here knows about any one task.

A reward function is a plain `f(completions, **columns) -> list[float | None]`: completions are
texts, each column is a list of the same length. None means "no judgement": that completion has no
total.

No timeout by signal: SIGALRM works on the main thread alone, and elsewhere turns every reward to 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RewardFunction = Callable[..., Sequence[float | None]]


class RewardError(ValueError):
    """A reward function that raised, or returned something that is not one reward a completion."""


@dataclass(frozen=True)
class Rewards:
    """What a batch of B completions earned.

    totals: B weighted sums; None where any function gave None.
    by_function: function name -> its B unweighted rewards.
    """

    totals: list[float | None]
    by_function: dict[str, list[float | None]]

    def __add__(self, more: "Rewards") -> "Rewards":
        """Those of both batches, of the same functions, one after the other."""
        by_function = {
            name: [*own, *more.by_function[name]] for name, own in self.by_function.items()
        }
        return Rewards([*self.totals, *more.totals], by_function)

    def means(self) -> dict[str, float]:
        """`rewards/<function>/mean` over the completions that the function judged."""
        judged = {n: [r for r in c if r is not None] for n, c in self.by_function.items()}
        return {f"rewards/{n}/mean": math.fsum(c) / len(c) for n, c in judged.items() if c}


def compute_rewards(
    functions: Sequence[RewardFunction],
    weights: Sequence[float],
    completions: Sequence[str],
    columns: Mapping[str, Sequence],
) -> Rewards:
    """Calls each function once with all completions and sums their rewards times the weights.

    Raises RewardError, in one line that names the function, where one raises, returns another
    number of rewards than there are completions, or returns NaN, an infinity or no number; and
    where weights or columns do not fit.
    """
    _check_arguments(functions, weights, completions, columns)
    by_function = {
        name: _call(name, function, completions, columns)
        for name, function in zip(_names(functions), functions, strict=True)
    }
    rows = list(zip(*by_function.values(), strict=True))
    return Rewards([_total(row, weights) for row in rows], by_function)


def _check_arguments(functions, weights, completions, columns) -> None:
    if not functions:
        raise RewardError("reward functions: got none, give at least one")
    if len(weights) != len(functions):
        raise RewardError(
            f"reward weights: got {len(weights)} for {len(functions)} functions, give one each"
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise RewardError(f"reward weights: got {weight}, use finite numbers")
    for name, column in columns.items():
        if len(column) != len(completions):
            raise RewardError(
                f"column {name!r}: has {len(column)} rows for {len(completions)} completions, "
                "repeat each prompt's row once a completion"
            )


def _names(functions: Sequence[RewardFunction]) -> list[str]:
    names: list[str] = []
    for function in functions:
        plain = getattr(function, "func", function)
        name = getattr(plain, "__name__", type(plain).__name__)
        taken = sum(name == other.split("#")[0] for other in names)
        names.append(f"{name}#{taken + 1}" if taken else name)
    return names


def _call(name, function, completions, columns) -> list[float | None]:
    try:
        returned = function(list(completions), **{k: list(v) for k, v in columns.items()})
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RewardError(
            f"reward function {name!r} raised {type(error).__name__}: {reason} "
            "(mend it, or let it return None where it cannot judge)"
        ) from error
    if not hasattr(returned, "__len__") or isinstance(returned, str | bytes | Mapping):
        raise RewardError(
            f"reward function {name!r} returned {type(returned).__name__}, "
            "return a list with one number or None a completion"
        )
    if len(returned) != len(completions):
        raise RewardError(
            f"reward function {name!r} returned {len(returned)} rewards for {len(completions)} "
            "completions, return one each, None where it cannot judge"
        )
    return [_checked(name, row, reward) for row, reward in enumerate(returned)]


def _checked(name: str, row: int, reward) -> float | None:
    if reward is None:
        return None
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        shown = " ".join(repr(reward).split())[:80]
        raise RewardError(
            f"reward function {name!r} returned {shown} for completion {row}, "
            "return a finite number, or None where it cannot judge"
        )
    return value


def _total(row: tuple[float | None, ...], weights: Sequence[float]) -> float | None:
    judged = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
    if len(judged) < len(row):
        return None
    total = sum(judged)
    if not math.isfinite(total):
        raise RewardError(f"reward weights: the weighted sum is {total}, use smaller weights")
    return total
