"""The groups of a step: one batch of prompts, or as many as it takes until enough groups inform."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.rewards import Rewards
from recipes.settings import RunConfig
from recipes.task import Task
from rollout.request import Completion, SamplingParams
from trainer.advantage import is_dead
from trainer.sample import TrainSample

Groups = list[list[Completion]]


@dataclass(frozen=True)
class Drawn:
    """All groups that a step drew, each of G completions.

    rewards: of every completion, group after group.
    kept: indices of the groups to train on.
    rounds: batches of prompts that were asked.
    position: problems asked since the run began; a resumed run goes on from it.
    """

    groups: Groups
    rewards: Rewards
    kept: tuple[int, ...]
    rounds: int
    position: int

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
    rollout: Any,
    step: int,
    position: int,
    watch: Callable[[str], None],
) -> Drawn:
    """Draw and reward the groups of a step.

    rollout: has `generate`. position: problems asked so far. watch: is told when "rollout" and
    "reward" end.
    """
    limit = config.filter_groups.max_num_gen_batches if config.filter_groups.enable else 1
    drawn, asked = None, []
    while True:
        rows, prompts = task.batch_at(config, position)
        groups = rollout.generate(prompts, sampling(config, step, prompts, asked))
        watch("rollout")
        drawn = _with_round(config, drawn, groups, task.rewards(rows, groups), position)
        watch("reward")
        asked, position = [*asked, *prompts], drawn.position
        if len(drawn.kept) >= config.prompts_per_step or drawn.rounds == limit:
            return drawn


def _with_round(
    config: RunConfig, before: Drawn | None, groups: Groups, rewards: Rewards, position: int
) -> Drawn:
    rounds = 1
    if before is not None:
        groups, rewards = before.groups + groups, before.rewards + rewards
        rounds += before.rounds
    wanted = config.prompts_per_step
    drawn = Drawn(groups, rewards, tuple(range(wanted)), rounds, position + wanted)
    if not config.filter_groups.enable:
        return drawn
    informing = [i for i, group in enumerate(drawn.by_group()) if not is_dead(group)]
    last = rounds == config.filter_groups.max_num_gen_batches
    kept = tuple(informing[:wanted]) or (drawn.kept if last else ())
    return Drawn(groups, rewards, kept, rounds, drawn.position)


def sampling(
    config: RunConfig, step: int, prompts: Sequence[list[int]], asked: Sequence[list[int]] = ()
) -> list[SamplingParams]:
    """How the completions of a step are drawn: a seed for every step, and no draw used twice.

    A prompt that the step holds again, in this round or among those `asked` before, goes on with
    later samples.
    """
    every = [*asked, *prompts]
    return [
        SamplingParams(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            n=config.group_size,
            seed=config.seed * 1_000_003 + step,
            first_sample=config.group_size * every[: len(asked) + place].count(prompt),
        )
        for place, prompt in enumerate(prompts)
    ]
