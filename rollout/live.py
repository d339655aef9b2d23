"""A live view of an engine, for who asks for it at a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from rollout.engine import Engine

INTERVAL = 0.25
SHOWN = (
    ("running", "{:,.0f}"),
    ("waiting", "{:,.0f}"),
    ("preempted", "{:,.0f}"),
    ("finished", "{:,.0f}"),
    ("free_pages", "{:,.0f}"),
    ("cached_pages", "{:,.0f}"),
    ("held_pages", "{:,.0f}"),
    ("cache_hit_rate", "{:.1%}"),
    ("drawn_tokens", "{:,.0f}"),
    ("drawn_tokens_per_second", "{:,.0f}"),
)


@contextmanager
def live_view(engine: Engine, console: Console | None = None) -> Iterator[None]:
    """Show `engine.stats()` after steps, at most every INTERVAL seconds; nothing off a terminal.

    console: where to; None is standard error.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    before, shown_at = engine.on_step, 0.0
    with Live(table_of(engine), console=console, auto_refresh=False, transient=True) as live:

        def show(engine: Engine) -> None:
            nonlocal shown_at
            if before is not None:
                before(engine)
            if time.monotonic() - shown_at >= INTERVAL:
                shown_at = time.monotonic()
                live.update(table_of(engine), refresh=True)

        engine.on_step = show
        try:
            yield
        finally:
            engine.on_step = before


def table_of(engine: Engine) -> Table:
    """One row a number."""
    table = Table(title=f"engine, weights version {engine.version}", show_header=False)
    stats = engine.stats()
    for name, form in SHOWN:
        table.add_row(name.replace("_", " "), form.format(stats[name]))
    return table
