"""The groups of a step: one batch of prompts, or as many as it takes until enough groups inform."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.asking import Groups, Source
from recipes.rewards import Rewards
from recipes.settings import RunConfig
from recipes.task import Task
from trainer.advantage import is_dead
from trainer.sample import TrainSample


@dataclass(frozen=True)
class Drawn:
    """All groups that a step drew, each of G completions.

    rewards: of every completion, group after group.
    kept: indices of the groups to train on.
    rounds: rounds of `prompts_per_step` groups that it took.
    """

    groups: Groups
    rewards: Rewards
    kept: tuple[int, ...]
    rounds: int

    def by_group(self) -> list[list[float | None]]:
        """Rewards in lists of G."""
        size, totals = len(self.groups[0]), self.rewards.totals
        return [totals[start : start + size] for start in range(0, len(totals), size)]

    def trained(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Those of the kept groups, of one sample a completion."""
        size = len(self.groups[0])
        return [samples[group * size + place] for group in self.kept for place in range(size)]


def draw_groups(
    config: RunConfig,
    task: Task,
    source: Source,
    oldest: int,
    watch: Callable[[str], None],
) -> Drawn:
    """Draw and reward the groups of a step.

    oldest: version that a token may have. watch: is told when "rollout" and "reward" end.
    """
    limit = config.filter_groups.max_num_gen_batches if config.filter_groups.enable else 1
    drawn = None
    while True:
        rows, groups = source.round(oldest)
        watch("rollout")
        drawn = _with_round(config, drawn, groups, task.rewards(rows, groups))
        watch("reward")
        if len(drawn.kept) >= config.prompts_per_step or drawn.rounds == limit:
            return drawn


def _with_round(config: RunConfig, before: Drawn | None, groups: Groups, rewards: Rewards) -> Drawn:
    rounds = 1
    if before is not None:
        groups, rewards = before.groups + groups, before.rewards + rewards
        rounds += before.rounds
    wanted = config.prompts_per_step
    drawn = Drawn(groups, rewards, tuple(range(wanted)), rounds)
    if not config.filter_groups.enable:
        return drawn
    informing = [i for i, group in enumerate(drawn.by_group()) if not is_dead(group)]
    last = rounds == config.filter_groups.max_num_gen_batches
    kept = tuple(informing[:wanted]) or (drawn.kept if last else ())
    return Drawn(groups, rewards, kept, rounds)
