"""Who holds which KV page.

Every page is in one of three states: free (no content), held (by one sequence or more), or idle
(content that the prefix cache knows, and no holder). free + held + idle == total, always. Idle
pages are taken back oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    def __init__(self, num_pages: int, forget: Callable[[int], None]) -> None:
        """forget(page) is called when an idle page is about to lose its content."""
        self.num_pages = num_pages
        self.holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._forget = forget

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def take(self) -> int:
        """An empty page with one holder; the caller has seen that one is available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._kept.discard(page)
            self._forget(page)
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        self._idle.pop(page, None)
        self.holders[page] += 1

    def release(self, page: int) -> None:
        self.holders[page] -= 1
        if self.holders[page]:
            return
        if page in self._kept:
            self._idle[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """The content of a held page outlives its holders from now on."""
        self._kept.add(page)

    def drop_kept(self) -> None:
        """No content outlives its holders any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._kept.clear()

    def check(self, held_by: Iterable[Iterable[int]], known: Iterable[int]) -> None:
        """AssertionError unless the books agree with every holder and with the prefix cache."""
        counted = [0] * self.num_pages
        for pages in held_by:
            for page in pages:
                counted[page] += 1
        assert counted == self.holders, "page holders differ from the pages that sequences list"
        held = {page for page, count in enumerate(counted) if count}
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle and not free & held and not idle & held, "a page is in two states"
        assert len(free) + len(idle) + len(held) == self.num_pages, "a page is lost"
        assert set(known) == self._kept and idle <= self._kept <= idle | held, (
            "the prefix cache lists other pages"
        )
