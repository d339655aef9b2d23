"""Grade-school word problems with GSM8K's answer form, made on the spot from small templates.

A problem is a question and a worked answer whose last line is `#### N`:

    >>> problem("train", 3)["answer"].splitlines()[-1].startswith("#### ")
    True

Everything is a pure function of (split, index): no file, no state, no wall clock.

**Train and test are disjoint by construction.** A question is fixed by its template, its numbers
and its words. A hash of (template, numbers) puts one fifth of all number choices in test and the
rest in train; each split draws again until its own side comes up. So a test question's numbers
never occur with that template in train, whatever the names and things are.

Draws use `Random(str).random()` alone, the part of `random` that Python promises to keep stable.
"""

import hashlib
from dataclasses import dataclass
from random import Random

SPLITS = ("train", "test")
NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo",
    "Iris", "Jon", "Kaya", "Liam", "Mona", "Nils", "Olga", "Theo",
)  # fmt: skip
ITEMS = (
    "apples", "beads", "buttons", "cards", "coins", "eggs", "figs", "lemons", "marbles", "nuts",
    "pears", "pens", "plums", "rings", "shells", "stamps", "stickers", "stones", "tickets", "toys",
)  # fmt: skip
BOXES = ("bags", "baskets", "bowls", "boxes", "drawers", "jars", "tins", "trays")
PLACES = ("attic", "barn", "garden", "kitchen", "park", "shed", "street", "yard")

LARGEST_RESULT = 99
TEST_SHARE = 5
TEMPTING_OPERATION = {"+": "-", "-": "+", "*": "+", "/": "-"}


@dataclass(frozen=True)
class Template:
    """One kind of story.

    ranges: inclusive bounds of the numbers a, b, c, d of the question.
    steps: "Label: left op right"; operands name a question number, or x, y: results of steps 1, 2.
    """

    name: str
    question: str
    ranges: tuple[tuple[int, int], ...]
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One line of working: `label: left operation right = result`."""

    label: str
    left: int
    operation: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.label}: {self.left} {self.operation} {self.right} = {self.result}"


TEMPLATES = (
    Template(
        "give",
        "{name} picks {a} {item} and gives {b} to {other}. How many {item} does {name} keep?",
        ((8, 40), (2, 20)),
        ("Kept: a - b",),
    ),
    Template(
        "find",
        "{name} owns {a} {item} and finds {b} more in the {place}. How many {item} is that now?",
        ((6, 40), (3, 30)),
        ("Now: a + b",),
    ),
    Template(
        "pack",
        "{a} {box} stand in the {place}, each with {b} {item} inside. How many {item} are inside?",
        ((2, 9), (3, 11)),
        ("Inside: a * b",),
    ),
    Template(
        "share",
        "{name} deals {a} {item} evenly to {b} friends. How many {item} does each friend get?",
        ((8, 72), (2, 9)),
        ("Each: a / b",),
    ),
    Template(
        "pack_and_find",
        "{name} fills {a} {box} with {b} {item} each, then finds {c} more {item}. "
        "How many {item} in total?",
        ((2, 8), (2, 9), (2, 20)),
        ("Packed: a * b", "Total: x + c"),
    ),
    Template(
        "rows",
        "A hall has {a} rows of {b} chairs. People sit on {c} of them. How many chairs are free?",
        ((2, 8), (3, 8), (3, 20)),
        ("Chairs: a * b", "Free: x - c"),
    ),
    Template(
        "lose_and_buy",
        "{name} starts with {a} {item}, loses {b} in the {place} and buys {c} later. "
        "How many {item} does {name} have at the end?",
        ((8, 30), (2, 15), (3, 20)),
        ("After: a - b", "End: x + c"),
    ),
    Template(
        "share_and_add",
        "{name} splits {a} {item} evenly among {b} friends, then hands every friend {c} more. "
        "How many {item} does one friend hold?",
        ((8, 72), (2, 9), (2, 15)),
        ("Each: a / b", "Holds: x + c"),
    ),
    Template(
        "read",
        "A book has {a} pages. {name} reads {b} pages a day for {c} days. How many pages remain?",
        ((20, 60), (3, 9), (2, 6)),
        ("Read: b * c", "Remain: a - x"),
    ),
    Template(
        "more_than",
        "{other} has {a} {item}. {name} has {b} more than {other}. "
        "How many {item} do both have together?",
        ((4, 30), (2, 20)),
        ("More: a + b", "Together: a + x"),
    ),
    Template(
        "times_as_many",
        "{other} has {a} {item}. {name} has {b} times as many. "
        "How many {item} do both have together?",
        ((3, 12), (2, 6)),
        ("Times: a * b", "Together: a + x"),
    ),
    Template(
        "change",
        "{name} buys {a} {item} at {b} dollars each and pays with {c} dollars. "
        "How many dollars come back?",
        ((2, 7), (2, 8), (20, 60)),
        ("Cost: a * b", "Back: c - x"),
    ),
    Template(
        "pool",
        "{name} brings {a} {item} and {other} brings {b}. They fill {c} {box} evenly. "
        "How many {item} go in each?",
        ((4, 40), (4, 30), (2, 8)),
        ("Sum: a + b", "Each: x / c"),
    ),
    Template(
        "tank",
        "A tank holds {a} litres. The {place} takes {b} litres and the school {c}. "
        "How many litres stay?",
        ((20, 60), (3, 20), (3, 20)),
        ("Taken: b + c", "Stay: a - x"),
    ),
    Template(
        "red_and_blue",
        "Each of {a} {box} holds {b} red and {c} blue {item}. How many {item} are there?",
        ((2, 8), (2, 9), (2, 9)),
        ("One: b + c", "All: a * x"),
    ),
    Template(
        "bake",
        "{name} bakes {a} trays of {b} buns, eats {c} and packs the rest evenly in {d} {box}. "
        "How many buns go in each?",
        ((2, 8), (3, 9), (1, 9), (2, 8)),
        ("Buns: a * b", "Rest: x - c", "Each: y / d"),
    ),
)


def problem(split: str, index: int) -> dict[str, str]:
    """The problem number `index` (>= 0, no upper end) of a split.

    Returns {"question": one line of text, "answer": working, then `#### N` with 0 <= N <= 99}.
    Raises ValueError for an unknown split or a negative index.
    """
    template, numbers, question = _draw(split, index)
    return {"question": question, "answer": _answer(_work(template, numbers))}


def tempting_answers(split: str, index: int) -> list[str]:
    """Wrong-method answers to the same problem, for the warm start only.

    Each either takes one wrong operation (worked on correctly from there) or stops before the last
    step. Never empty, no repeats, and none ends in the right number.
    """
    template, numbers, _ = _draw(split, index)
    return _tempting(template, numbers)


def _tempting(template: Template, numbers: dict[str, int]) -> list[str]:
    right = _work(template, numbers)
    wrong = [_work(template, numbers, wrong_step=i) for i in range(len(template.steps))]
    wrong += [right[:count] for count in range(1, len(right))]
    answers = [_answer(steps) for steps in wrong if steps and steps[-1].result != right[-1].result]
    return list(dict.fromkeys(answers))


def _draw(split: str, index: int) -> tuple[Template, dict[str, int], str]:
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, use 'train' or 'test'")
    if index < 0:
        raise ValueError(f"index: got {index}, use 0 or more")
    rng = Random(f"wordproblems {split} {index}")
    template = _pick(rng, TEMPLATES)
    numbers = _numbers(rng, template, split)
    name, other = _pick(rng, NAMES), _pick(rng, NAMES)
    while other == name:
        other = _pick(rng, NAMES)
    words = {"name": name, "other": other, "item": _pick(rng, ITEMS)}
    words |= {"box": _pick(rng, BOXES), "place": _pick(rng, PLACES)}
    return template, numbers, template.question.format(**words, **numbers)


def _numbers(rng: Random, template: Template, split: str) -> dict[str, int]:
    while True:
        values = [_pick(rng, range(low, high + 1)) for low, high in template.ranges]
        numbers = dict(zip("abcd", values, strict=False))
        if _split_of(template, values) == split and _is_fair(template, numbers):
            return numbers


def _split_of(template: Template, values: list[int]) -> str:
    digest = hashlib.blake2b(f"{template.name} {values}".encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def _is_fair(template: Template, numbers: dict[str, int]) -> bool:
    """Whole positive results throughout, and at least one wrong method that shows in the end."""
    steps = _work(template, numbers)
    return bool(steps) and min(s.result for s in steps) > 0 and bool(_tempting(template, numbers))


def _work(template: Template, numbers: dict[str, int], wrong_step: int = -1) -> list[Step]:
    """All steps worked out; empty where a result is not whole, negative or too large."""
    known, steps = dict(numbers), []
    for position, text in enumerate(template.steps):
        label, formula = text.split(": ")
        left_name, operation, right_name = formula.split()
        left, right = known[left_name], known[right_name]
        if position == wrong_step:
            operation = TEMPTING_OPERATION[operation]
            left, right = max(left, right), min(left, right)
        result = _apply(left, operation, right)
        if result is None:
            return []
        steps.append(Step(label, left, operation, right, result))
        known["xyz"[position]] = result
    return steps


def _apply(left: int, operation: str, right: int) -> int | None:
    if operation == "/":
        return left // right if right and left % right == 0 else None
    result = {"+": left + right, "-": left - right, "*": left * right}[operation]
    return result if 0 <= result <= LARGEST_RESULT else None


def _answer(steps: list[Step]) -> str:
    return "\n".join([*map(str, steps), f"#### {steps[-1].result}"])


def _pick(rng: Random, options):
    return options[int(rng.random() * len(options))]
