"""Questions with gold answers, from four sources, and the order in which training asks them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from recipes import arithmetic, hub, wordproblems
from recipes.answers import gold_number

EMBEDDED, ARITHMETIC = "embedded", "arithmetic"
EMBEDDED_SIZE = {"train": 8192, "test": 512}
# Unseen ones: the warm start learned from train problems and was tuned on test problems from 0 on.
EMBEDDED_FIRST = {"train": 1_000_000, "test": 1_000}
HUB_CONFIG = "main"
SPLITS = ("train", "test")


class DataError(ValueError):
    """Data that cannot be read, or a row that lacks what a row must have."""


@dataclass(frozen=True)
class Problems:
    """Questions and their gold answers, row by row; every answer has a gold number.

    source: what they were loaded from; split: "train" or "test".
    answers: GSM8K answer texts, or bare numbers.
    """

    source: str
    split: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.questions)

    def columns(self, indices: Iterable[int], repeat: int = 1) -> dict[str, list[str]]:
        """{"question", "answer"} of the rows, each row `repeat` times running (a group)."""
        rows = [index for index in indices for _ in range(repeat)]
        return {
            "question": [self.questions[row] for row in rows],
            "answer": [self.answers[row] for row in rows],
        }


def load_problems(source: str, split: str, limit: int | None = None) -> Problems:
    """The first `limit` problems of a split (all where None).

    source: "embedded" (own word problems, no file), "arithmetic" (sums of two small numbers, no
    file), a folder with train.jsonl and test.jsonl, or the name of a data set on the hub in
    GSM8K's form, such as openai/gsm8k.
    Raises DataError (a row is named by file and line) or hub.HubError, in one line.
    """
    if split not in SPLITS:
        raise DataError(f"split: got {split!r}, use 'train' or 'test'")
    if limit is not None and limit <= 0:
        raise DataError(
            f"--data {source}: the number of problems is {limit}, use 1 or more, or none"
        )
    if source == EMBEDDED:
        rows = _embedded(split, limit)
    elif source == ARITHMETIC:
        named = enumerate(arithmetic.problems(split))
        rows = ((f"{ARITHMETIC} {split} problem {index}", problem) for index, problem in named)
    elif Path(source).expanduser().is_dir():
        rows = _folder(Path(source).expanduser(), split)
    else:
        rows = _from_hub(source, split)
    questions, answers = _take(rows, limit)
    if not questions:
        raise DataError(f"--data {source}: the {split} split is empty")
    return Problems(source, split, tuple(questions), tuple(answers))


def prompt_indices(seed: int, step: int, prompts_per_step: int, size: int) -> list[int]:
    """Which rows of `size` the step number `step` (from 0) asks: a pure function of its arguments.

    Every epoch is a permutation of its own, keyed by (seed, epoch); a step that crosses an epoch's
    end goes on into the next, so no row is left out and a run resumes from a step number alone.
    """
    for name, value, least in (
        ("step", step, 0),
        ("prompts per step", prompts_per_step, 1),
        ("number of problems", size, 1),
    ):
        if value < least:
            raise DataError(f"{name}: got {value}, use {least} or more")
    return rows_at(seed, step * prompts_per_step, prompts_per_step, size)


def rows_at(seed: int, position: int, count: int, size: int) -> list[int]:
    """Which rows of `size` are the `count` ones after the first `position` asked."""
    return [
        _epoch_order(seed, place // size, size)[place % size]
        for place in range(position, position + count)
    ]


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    # Sorted by hash, as random.shuffle promises no order across Python versions.
    def key(index: int) -> bytes:
        return blake2b(f"{seed} {epoch} {index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(size), key=key))


def _take(rows: Iterator[tuple[str, dict]], limit: int | None) -> tuple[list[str], list[str]]:
    questions, answers = [], []
    for where, row in rows:
        question, answer = _checked(where, row)
        questions.append(question)
        answers.append(answer)
        if len(questions) == limit:
            break
    return questions, answers


def _checked(where: str, row: object) -> tuple[str, str]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: is no JSON object, use {{'question': ..., 'answer': ...}}")
    question, answer = (_text(where, row, name) for name in ("question", "answer"))
    if gold_number(answer) is None:
        raise DataError(
            f"{where}: its answer has no gold number, "
            "end it with '#### NUMBER' or give a bare number"
        )
    return question, answer


def _text(where: str, row: dict, name: str) -> str:
    text = row.get(name)
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: has no {name!r} text, give every row one")
    return text


def _embedded(split: str, limit: int | None) -> Iterator[tuple[str, dict]]:
    first = EMBEDDED_FIRST[split]
    for index in range(first, first + (limit or EMBEDDED_SIZE[split])):
        yield f"{EMBEDDED} {split} problem {index}", wordproblems.problem(split, index)


def _folder(folder: Path, split: str) -> Iterator[tuple[str, dict]]:
    path = folder / f"{split}.jsonl"
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path} line {number}", _parsed(path, number, line)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason}), save it as UTF-8") from error
    except OSError as error:
        raise DataError(
            f"--data {folder}: cannot read {path.name} ({error.strerror}), "
            "give a folder with train.jsonl and test.jsonl"
        ) from error


def _parsed(path: Path, number: int, line: str) -> dict:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{path} line {number}: is no JSON ({error}), one object a line") from error


def _from_hub(name: str, split: str) -> Iterator[tuple[str, dict]]:
    hub.require_hub_name(name, "--data")
    hub.go_offline_unless_reachable()
    import datasets

    try:
        rows: Any = datasets.load_dataset(name, HUB_CONFIG, split=split)
    except Exception as error:
        raise hub.hub_error("data set", name, "--data", error) from error
    for number, row in enumerate(rows, 1):
        yield f"{name} {split} row {number}", row
