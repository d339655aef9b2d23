"""GSM8K's form of a task: how it is asked, and what a completion earns.

A reward function is a plain `f(completions, **columns) -> list[float | None]` (recipes/rewards.py);
the columns here are `question` and `answer` (recipes/data.py).
"""

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from recipes.answers import boxed_answer, gold_number, lenient_answer, strict_answer

NUMBER_INSTRUCTION = "Answer with the number."
INSTRUCTION = "Reason step by step, then write the final answer as a number after '####'."
BOXED_INSTRUCTION = r"Reason step by step, then write the final answer as a number in \boxed{}."


class TaskError(ValueError):
    """A gold answer without a number, or a tokenizer that makes no proper prompt."""


def correctness_reward(
    completions: list[str], answer: list[str], strict: bool = True, **columns: Any
) -> list[float | None]:
    """1.0 where the completion's final answer equals gold as an exact number, else 0.0.

    answer: per completion a GSM8K answer text (its number follows `####`) or a bare number.
    strict: only a number after the last `####` counts; else, without one, the last number does.
    Raises TaskError, naming the row, for a gold answer without a number.
    """
    return _score(strict_answer if strict else lenient_answer, completions, answer)


def lenient_reward(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """`correctness_reward`, not strict: for models that do not know the form with `####` yet."""
    return correctness_reward(completions, answer, strict=False)


def boxed_reward(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    r"""The same for a number in the last `\boxed{}`; see `correctness_reward`."""
    return _score(boxed_answer, completions, answer)


def encode_prompts(
    tokenizer: Any,
    questions: Sequence[str],
    instruction: str = "",
    say: Callable[[str], None] = print,
    **template_options: Any,
) -> list[list[int]]:
    """Token ids of one prompt a question, ready for the sampler as they are.

    tokenizer: one of transformers. With a chat template the question (and instruction) is a user's
    turn and the template makes the tokens; without one, a plain `Question: ... Answer:` text does,
    and `say` is told so once. template_options go to the template, such as enable_thinking=False.
    Raises TaskError where the template fails, or a prompt is empty or begins with two BOS tokens.
    """
    if getattr(tokenizer, "chat_template", None):
        prompts = [
            _from_template(tokenizer, _joined(question, instruction), template_options)
            for question in questions
        ]
    else:
        say("the tokenizer has no chat template: prompts are plain 'Question: ... Answer:' text")
        prompts = [
            tokenizer(_joined(instruction, f"Question: {question}\nAnswer:"))["input_ids"]
            for question in questions
        ]
    return [_checked(tokenizer, list(prompt)) for prompt in prompts]


def _score(
    read: Callable[[str], Decimal | None], completions: Sequence[str], answer: Sequence[str]
) -> list[float | None]:
    if isinstance(answer, str) or len(answer) != len(completions):
        raise TaskError(
            f"answer: has {len(answer)} rows for {len(completions)} completions, give one each"
        )
    golds = [_gold(row, text) for row, text in enumerate(answer)]
    return [
        1.0 if read(completion) == gold else 0.0
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _gold(row: int, answer: str) -> Decimal:
    number = gold_number(str(answer))
    if number is None:
        raise TaskError(
            f"answer: row {row} has no gold number, end it with '#### NUMBER' or give a bare number"
        )
    return number


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _from_template(tokenizer: Any, text: str, options: dict[str, Any]) -> list[int]:
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **options,
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskError(f"--model: its chat template fails on a user's turn ({reason})") from error


def _checked(tokenizer: Any, prompt: list[int]) -> list[int]:
    if not prompt:
        raise TaskError("--model: its tokenizer turns a question into no tokens, check its files")
    if tokenizer.bos_token_id is not None and prompt[:2] == [tokenizer.bos_token_id] * 2:
        raise TaskError("--model: its chat template begins a prompt with two BOS tokens, mend it")
    return prompt
