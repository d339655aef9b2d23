"""Accuracies with their uncertainty, and how much of a GRPO batch can carry signal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054


def wilson_interval(successes: float, total: float, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval (low, high) of a share, both in 0..1; 95% with the default z.

    It assumes independent trials: several samples of one question are not, and make it too narrow.
    At 1,319 questions and 50% it is +-2.7 points. Source: Wilson (1927), J. Am. Stat. Assoc. 22.
    No trials give (0, 1). Raises ValueError unless 0 <= successes <= total.
    """
    if not 0 <= successes <= total:
        raise ValueError(f"successes: got {successes} of {total}, use 0 <= successes <= total")
    if total == 0:
        return 0.0, 1.0
    share, spread = successes / total, z * z / total
    centre = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / total + spread / total / 4)
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    return (low if successes else 0.0), (high if successes < total else 1.0)


def informative_share(accuracy: float, group_size: int) -> float:
    """The expected share of groups that have both right and wrong completions.

    1 - p^G - (1 - p)^G for independent completions of one accuracy p. It is concave
    in p, so where questions differ in difficulty, their mean accuracy gives an upper bound.
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy: got {accuracy}, use a share from 0 to 1")
    if group_size < 1:
        raise ValueError(f"group size: got {group_size}, use 1 or more")
    return 1 - accuracy**group_size - (1 - accuracy) ** group_size


@dataclass(frozen=True)
class Accuracy:
    """`correct` of `total` answers were right; prints as `43.6% (41.0 to 46.3, n = 1,319)`.

    worth: how many independent answers the total tells as much as; None is all of them.
    """

    correct: int
    total: int
    worth: float | None = None

    def __post_init__(self) -> None:
        wilson_interval(self.correct, self.total)

    @property
    def share(self) -> float:
        """correct / total, in 0..1; 0 where nothing was asked."""
        return self.correct / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% Wilson interval, in 0..1."""
        worth = self.total if self.worth is None else self.worth
        return wilson_interval(min(self.share * worth, worth), worth)

    def __str__(self) -> str:
        low, high = self.interval
        worth = "" if self.worth is None else f", worth {self.worth:,.0f}"
        return f"{self.share:.1%} ({100 * low:.1f} to {100 * high:.1f}, n = {self.total:,}{worth})"


def average_accuracy(right: Sequence[Sequence[bool]]) -> Accuracy:
    """avg@k: the share of right answers over P problems with k samples each.

    Samples of one problem resemble each other. With p the share and v the variance of the problems'
    own shares (ddof 1), the answers are worth p (1 - p) / (v / P) independent ones, which is kept
    between P and P k; the interval is Wilson's at that number (an effective sample size, Kish 1965,
    "Survey Sampling").
    """
    problems, answers = len(right), sum(map(len, right))
    share = sum(map(sum, right)) / answers
    own = [sum(one) / len(one) for one in right]
    squares = math.fsum((each - share) ** 2 for each in own)
    worth = float(problems)
    if squares and problems > 1:
        worth = share * (1 - share) * problems * (problems - 1) / squares
    return Accuracy(sum(map(sum, right)), answers, min(max(worth, problems), answers))


def pass_accuracy(right: Sequence[Sequence[bool]]) -> Accuracy:
    """pass@k: the share of problems that at least one of their k samples got right."""
    return Accuracy(sum(map(any, right)), len(right))
