"""The recipe's command line in a process that kills itself: for benchmarks/bench_resume.py.

    python -m benchmarks.kill_runner TARGET CALL HOW -- WORDS...

TARGET is `module:name` or `module:Class.name`; at its CALL-th call (from 1) the process sends
itself SIGKILL: HOW is "before" or "after" the call, or "cut", after half of the bytes that are its
last argument.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def arm(target: str, call: int, how: str) -> None:
    """Replace the function at `target` by one that kills this process."""
    holder, name = _find(target)
    real = getattr(holder, name)
    calls = 0

    def killing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return real(*args, **kwargs)
        if how == "after":
            real(*args, **kwargs)
        elif how == "cut":
            real(*args[:-1], args[-1][: len(args[-1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(holder, name, killing)


def _find(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    *outer, name = path.split(".")
    holder: Any = importlib.import_module(module)
    for part in outer:
        holder = getattr(holder, part)
    return holder, name


def main(arguments: list[str], run: Callable[[list[str]], int]) -> int:
    target, call, how, _, *words = arguments
    arm(target, int(call), how)
    return run(words)


if __name__ == "__main__":
    from recipes import grpo_gsm8k

    sys.exit(main(sys.argv[1:], grpo_gsm8k.main))
