"""What the report charts: one panel a metric, in the order of the page."""

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.report_runs import Group, Row, Run, Value, compared_kl, of

LAG_TOKENS = "lag/tokens/"


@dataclass(frozen=True)
class Panel:
    """A metric over the steps.

    name: of the files. key: what the page calls the metric. unit: of the y axis. note: how to read
    it. always: charted even where it never changes. smooth: long runs get a running mean. percent:
    shares, shown in %.
    """

    section: str
    name: str
    key: str
    title: str
    unit: str
    note: str = ""
    value: Value | None = None
    always: bool = False
    smooth: bool = False
    percent: bool = False

    def read(self, row: Row) -> float | None:
        """The panel's number of a step."""
        return (self.value or of(self.key))(row)


def _share_differing(part: str, whole: str) -> Value:
    def value(row: Row) -> float | None:
        differing, compared = of(part)(row), of(whole)(row)
        return differing / compared if differing is not None and compared else None

    return value


LEARNING, PARITY, LAG = "Learning", "Sampler against trainer", "Lag and its correction"
COMPLETIONS, OPTIMISER, SPEED = "Completions", "Optimiser", "Speed"
SECTIONS = (LEARNING, PARITY, LAG, COMPLETIONS, OPTIMISER, SPEED)
KL = "KL (nats, k3 estimate)"
TOKENS = "share of tokens (%)"

PANELS = (
    Panel(
        LEARNING,
        "reward",
        "reward",
        "Reward",
        "mean reward of the step",
        "Mean over all completions of the step.",
        always=True,
        smooth=True,
    ),
    Panel(LEARNING, "reward_std", "reward_std", "Spread of rewards", "standard deviation"),
    Panel(
        PARITY,
        "parity",
        "parity/tokens_differing",
        "Tokens whose log-probability differs in any bit",
        TOKENS,
        "Share of the fresh tokens compared, as float32 bits.",
        _share_differing("parity/tokens_differing", "parity/tokens_compared"),
        always=True,
        percent=True,
    ),
    Panel(
        PARITY,
        "kl_sampler_trainer",
        "kl/sampler_trainer",
        "KL(sampler || trainer)",
        KL,
        "Of every token compared: both sides with the same weights.",
        compared_kl,
        always=True,
    ),
    Panel(
        PARITY,
        "kl_mismatch",
        "kl/mismatch",
        "KL split: from numerical mismatch",
        KL,
        "Same weights, other numerics; 0.0 exactly in a bitwise run.",
        always=True,
    ),
    Panel(
        PARITY,
        "logp_difference",
        "sampling/sampling_logp_difference/max",
        "Largest difference of log-probabilities",
        "absolute difference (nats)",
    ),
    Panel(
        LAG,
        "kl_lag",
        "kl/lag",
        "KL split: from lag",
        KL,
        "Between the policy that drew the tokens and the policy being trained.",
    ),
    Panel(LAG, "lag_mean", "lag/versions_mean", "Lag, mean over tokens", "versions behind"),
    Panel(LAG, "lag_max", "lag/versions_max", "Lag, oldest token", "versions behind"),
    Panel(
        LAG,
        "rescored",
        "parity/lag_rescored_compared",
        "Stale tokens proved again",
        "tokens a step",
    ),
    Panel(
        LAG,
        "rescored_differing",
        "parity/lag_rescored_differing",
        "Stale tokens that differ when proved again",
        TOKENS,
        "Share of the stale tokens compared.",
        _share_differing("parity/lag_rescored_differing", "parity/lag_rescored_compared"),
        percent=True,
    ),
    *(
        Panel(LAG, name, f"async/{name}", title, unit)
        for name, title, unit in (
            ("groups_waiting", "Groups finished ahead", "groups at the step's end"),
            ("groups_in_flight", "Groups being drawn ahead", "groups at the step's end"),
            ("completions_across_updates", "Completions across updates", "completions a step"),
        )
    ),
    Panel(LAG, "refreshed", "async/groups_refreshed", "Groups drawn anew", "groups a step"),
    Panel(LAG, "dropped", "async/groups_dropped", "Groups dropped as too old", "groups a step"),
    Panel(
        LAG,
        "effective_sample_size",
        "sampling/effective_sample_size",
        "Effective sample size",
        "share of samples (%)",
        "Of the importance weights; 100% where all weights are equal.",
        percent=True,
    ),
    Panel(
        LAG,
        "limited_share",
        "sampling/limited_share",
        "Importance weights limited",
        TOKENS,
        percent=True,
    ),
    *(
        Panel(
            LAG,
            f"clip_{name}",
            f"clip_ratio/{name}_mean",
            f"Ratios clipped, {words}",
            TOKENS,
            percent=True,
        )
        for name, words in (("low", "below"), ("high", "above"), ("region", "both sides"))
    ),
    Panel(
        COMPLETIONS, "length", "completions/mean_length", "Length of completions", "tokens, mean"
    ),
    Panel(
        COMPLETIONS,
        "terminated_length",
        "completions/mean_terminated_length",
        "Length of finished completions",
        "tokens, mean",
    ),
    Panel(
        COMPLETIONS,
        "cut_off",
        "completions/clipped_ratio",
        "Completions cut off at the limit",
        "share of completions (%)",
        percent=True,
    ),
    Panel(
        COMPLETIONS,
        "dead_groups",
        "frac_reward_zero_std",
        "Dead groups",
        "share of groups (%)",
        "Groups whose rewards are all equal: they teach nothing.",
        always=True,
        smooth=True,
        percent=True,
    ),
    Panel(
        COMPLETIONS,
        "groups_drawn",
        "filter_groups/groups_drawn",
        "Groups drawn for a batch",
        "groups a step",
    ),
    Panel(COMPLETIONS, "entropy", "entropy", "Entropy of the draws", "nats a token"),
    Panel(OPTIMISER, "loss", "loss", "Loss", "GRPO loss", "Near 0 is right on fresh samples."),
    Panel(OPTIMISER, "grad_norm", "grad_norm", "Gradient norm", "before clipping"),
    Panel(OPTIMISER, "learning_rate", "learning_rate", "Learning rate", "learning rate"),
    Panel(
        SPEED,
        "rollout_speed",
        "tokens_per_second/rollout",
        "Throughput of the rollout",
        "drawn tokens a second",
    ),
    Panel(
        SPEED,
        "train_speed",
        "tokens_per_second/train",
        "Throughput of the trainer",
        "trained tokens a second",
    ),
    Panel(SPEED, "step_time", "step_time", "Time of a step", "seconds"),
)


def split_panels(runs: Sequence[Run]) -> tuple[list[Panel], dict[Panel, float]]:
    """The panels to chart, and those whose number is one and the same in all steps of all runs."""
    charted, constant = [], {}
    for panel in (*PANELS, *_of_reward_functions(runs)):
        numbers = {number for run in runs for number in run.values(panel.read)}
        if len(numbers) > 1 or (numbers and panel.always):
            charted.append(panel)
        elif numbers:
            constant[panel] = numbers.pop()
    return sorted(charted, key=lambda panel: SECTIONS.index(panel.section)), constant


def _of_reward_functions(runs: Sequence[Run]) -> list[Panel]:
    keys = {key for run in runs for row in run.steps for key in row if _names_a_function(key)}
    if len(keys) < 2:
        return []
    return [
        Panel(
            LEARNING,
            f"reward_function_{place}",
            key,
            f"Reward by {key.split('/')[1]}",
            "mean reward of the step",
            smooth=True,
        )
        for place, key in enumerate(sorted(keys), 1)
    ]


def _names_a_function(key: str) -> bool:
    return key.startswith("rewards/") and key.endswith("/mean")


def lag_tokens(group: Group) -> dict[int, float]:
    """Versions behind -> tokens, over all steps of the group's runs.

    A step without stale tokens logs no counts: all that it compared was fresh.
    """
    totals: dict[int, float] = {}
    for run in group.runs:
        for row in run.steps:
            if of("lag/versions_max")(row) == 0:
                totals[0] = totals.get(0, 0) + (of("parity/tokens_compared")(row) or 0)
                continue
            for key in row:
                behind = key.removeprefix(LAG_TOKENS)
                if key.startswith(LAG_TOKENS) and behind.isdigit():
                    totals[int(behind)] = totals.get(int(behind), 0) + (of(key)(row) or 0)
    return dict(sorted(totals.items()))


def time_parts(group: Group) -> dict[str, float]:
    """Part of a step -> seconds, the mean over all steps of the group's runs."""
    totals: dict[str, float] = {}
    rows = [row for run in group.runs for row in run.steps]
    for row in rows:
        for key in row:
            if key.startswith("time/"):
                part = key.removeprefix("time/")
                totals[part] = totals.get(part, 0.0) + (of(key)(row) or 0.0)
    return {part: seconds / len(rows) for part, seconds in totals.items()}
