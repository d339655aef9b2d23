"""The task of a run: problems, prompts, decoding and rewards. No ray here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from recipes.data import Problems, load_problems, rows_at
from recipes.gsm8k import correctness_reward, encode_prompts
from recipes.models import check_lengths, load_tokenizer
from recipes.rewards import RewardFunction, Rewards, compute_rewards
from recipes.settings import RunConfig, SettingError
from rollout.request import Completion
from shared_ops.model.config import ModelConfig


@dataclass(frozen=True)
class Task:
    """Train and held-out problems with their prompts, and what a completion earns.

    train_prompts, test_prompts: token ids, one list a problem.
    reward_functions, reward_weights: as `recipes.rewards.compute_rewards` takes them.
    """

    tokenizer: Any
    train: Problems
    test: Problems | None
    encode: Callable[[Sequence[str]], list[list[int]]]
    test_prompts: list[list[int]]
    reward_functions: Sequence[RewardFunction] = (correctness_reward,)
    reward_weights: Sequence[float] = (1.0,)
    _prompts: dict[int, list[int]] = field(default_factory=dict)

    def batch(self, config: RunConfig, step: int) -> tuple[list[int], list[list[int]]]:
        """Rows and prompts of one step where every step asks `prompts_per_step`."""
        return self.batch_at(config, step * config.prompts_per_step)

    def batch_at(self, config: RunConfig, position: int) -> tuple[list[int], list[list[int]]]:
        """Rows and prompts of `prompts_per_step` problems after the first `position` asked."""
        rows = rows_at(config.seed, position, config.prompts_per_step, len(self.train))
        missing = sorted({row for row in rows if row not in self._prompts})
        questions = [self.train.questions[row] for row in missing]
        self._prompts.update(zip(missing, self.encode(questions), strict=True))
        return rows, [self._prompts[row] for row in rows]

    def text(self, token_ids: Sequence[int]) -> str:
        """Completion tokens as text, special tokens left out."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def rewards(self, rows: Sequence[int], groups: Sequence[Sequence[Completion]]) -> Rewards:
        """Rewards of the completions in order, group after group."""
        texts = [self.text(one.token_ids) for group in groups for one in group]
        columns = self.train.columns(rows, repeat=len(groups[0]))
        return compute_rewards(self.reward_functions, self.reward_weights, texts, columns)

    def right(self, groups: Sequence[Sequence[Completion]], strict: bool) -> list[list[bool]]:
        """Which completions of each held-out problem are right; all have the same number."""
        assert self.test is not None
        size = len(groups[0])
        texts = [self.text(one.token_ids) for group in groups for one in group]
        answers = [answer for answer in self.test.answers for _ in range(size)]
        scores = correctness_reward(texts, answers, strict=strict)
        flat = [score == 1.0 for score in scores]
        return [flat[start : start + size] for start in range(0, len(flat), size)]


def load_task(config: RunConfig, folder: Path) -> Task:
    """Read data and tokenizer, and check that the prompts fit the model.

    Raises:
        DataError, HubError, SettingError: one line that names the setting.
    """
    tokenizer = load_tokenizer(folder)
    encode = partial(
        encode_prompts,
        tokenizer,
        instruction=config.instruction,
        say=cache(print),
        enable_thinking=False,
    )
    train = load_problems(config.data, "train")
    test, test_prompts = None, []
    if config.evaluation.problems:
        test = load_problems(config.data, "test", limit=config.evaluation.problems)
        test_prompts = encode(test.questions)
    functions = [reward_function(path) for path in config.reward_functions]
    task = Task(tokenizer, train, test, encode, test_prompts, functions, config.reward_weights)
    _, first_prompts = task.batch(config, 0)
    check_lengths(ModelConfig.from_folder(folder), first_prompts + test_prompts, config.max_tokens)
    return task


def reward_function(path: str) -> RewardFunction:
    """The function at a dotted import path, such as recipes.gsm8k.correctness_reward.

    Raises:
        SettingError: there is no such module, or no such function in it.
    """
    module, _, name = path.rpartition(".")
    try:
        function: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise SettingError(
            f"--reward-functions {path}: cannot be imported ({error}): "
            "give package.module.function, importable from here"
        ) from error
    if not callable(function):
        raise SettingError(f"--reward-functions {path}: is no function")
    return cast(RewardFunction, function)
