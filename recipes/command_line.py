"""From the command line's words to a RunConfig."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from recipes.presets import preset_of
from recipes.run_folder import started_with
from recipes.settings import RunConfig, resolved


def parse(arguments: Sequence[str] | None = None) -> RunConfig:
    """The run that the words describe; every field is a flag, nested ones by their dotted name.

    Raises:
        ValueError: a setting cannot work; the one-line message names it.
        SystemExit: --help, or words that are no flags.
    """
    words = _with_choices(sys.argv[1:] if arguments is None else arguments)
    import tyro

    start = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    start.add_argument("--preset")
    start.add_argument("--model")
    start.add_argument("--out")
    start.add_argument("--resume", default="off")
    start.add_argument("--seed", type=int, default=0)
    chosen, _ = start.parse_known_args(words)
    default = preset_of(chosen.preset, chosen.model)
    if chosen.resume != "off":
        place = {"out": chosen.out, "resume": chosen.resume, "seed": chosen.seed}
        default = _overlaid(default, started_with(replace(default, **place)))
    config = tyro.cli(
        RunConfig,
        prog="python -m recipes.grpo_gsm8k",
        description="GRPO on grade-school word problems, on-policy to the bit.",
        default=default,
        args=words,
    )
    return resolved(config)


def _with_choices(words: Sequence[str]) -> list[str]:
    """The words, with those of the time when recompute was a flag spelled as its choices."""
    spelled = {"true": "full", "false": "none"}
    found: list[str] = []
    for place, word in enumerate(words):
        follows = words[place + 1] if place + 1 < len(words) else "--"
        if word == "--trainer.no-recompute":
            found += ["--trainer.recompute", "none"]
        elif word == "--trainer.recompute" and follows.startswith("--"):
            found += [word, "full"]
        elif place and words[place - 1] == "--trainer.recompute":
            found.append(spelled.get(word.lower(), word))
        else:
            found.append(word)
    return found


def _overlaid(record: Any, values: dict[str, Any]) -> Any:
    """The record with values by name, nested records too; a name that it lacks is passed over."""
    changes = {}
    for each in fields(record):
        if each.name in values:
            old, new = getattr(record, each.name), values[each.name]
            new = _overlaid(old, new) if is_dataclass(old) else new
            changes[each.name] = tuple(new) if isinstance(new, list) else new
    return replace(record, **changes)


def is_ours(error: BaseException) -> bool:
    """Whether an error speaks to the user by itself; others keep their traceback."""
    package = type(error).__module__.partition(".")[0]
    ours = package in ("recipes", "rollout", "trainer", "shared_ops")
    return ours or isinstance(error, OSError | FloatingPointError)
