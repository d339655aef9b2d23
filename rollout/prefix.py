"""Full pages found again by content.

A page's key is (number of the page before it, bytes of its own token ids); the first page of a
sequence follows the root. Equal keys therefore mean equal tokens from position 0 on: bytes are
compared, no hash is trusted. A number is given once and never again, and new weights bring a new
root, so KV of other weights cannot be found.

Only full pages are shared. A page that is written to has one holder, hence nothing is ever copied
on write.
"""

from __future__ import annotations

from array import array
from itertools import count

from rollout.pages import PagePool
from rollout.request import Sample

Key = tuple[int, bytes]


class PrefixCache:
    def __init__(self, num_pages: int, page_size: int, enabled: bool = True) -> None:
        self.pool = PagePool(num_pages, self._forget)
        self.page_size = page_size
        self.enabled = enabled
        self._numbers = count()
        self._root = next(self._numbers)
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._number_of: dict[int, int] = {}

    def find(self, tokens: array) -> tuple[list[int], Key | None]:
        """Pages that hold the KV of a prefix of tokens, and the key of the first that is missing.

        The last token is never covered; the key is None where no further page could serve.
        """
        pages: list[int] = []
        chain = self._root
        for index in range((len(tokens) - 1) // self.page_size if self.enabled else 0):
            key = self._key(chain, tokens, index)
            page = self._page_of.get(key)
            if page is None:
                return pages, key
            pages.append(page)
            chain = self._number_of[page]
        return pages, None

    def attach(self, sample: Sample, pages: list[int]) -> None:
        """Start a sample that holds nothing on pages that `find` returned."""
        for page in pages:
            self.pool.hold(page)
        sample.pages.extend(pages)
        sample.full_pages = len(pages)
        sample.computed = len(pages) * self.page_size
        sample.chain = self._number_of[pages[-1]] if pages else self._root

    def record(self, sample: Sample) -> None:
        """Make the pages that the sample has filled known.

        Where the content is known already, the sample goes over to the known page. So whoever
        holds a page holds the known pages before it, and these never become idle first.
        """
        shared = self.enabled and not sample.is_private
        while (sample.full_pages + 1) * self.page_size <= sample.computed and shared:
            index = sample.full_pages
            key = self._key(sample.chain, sample.tokens, index)
            own = sample.pages[index]
            known = self._page_of.get(key)
            if known is None:
                self._enter(key, own)
            elif known != own:
                self.pool.hold(known)
                sample.pages[index] = known
                self.pool.release(own)
            sample.chain = self._number_of[sample.pages[index]]
            sample.full_pages += 1

    def next_key(self, sample: Sample) -> Key | None:
        """Key of the page that the sample fills next, if its tokens are known up to its end."""
        if self.enabled and not sample.is_private and self.fills_next(sample):
            return self._key(sample.chain, sample.tokens, sample.full_pages)
        return None

    def fills_next(self, sample: Sample) -> bool:
        """Whether the tokens of the page that the sample fills next are known."""
        return (sample.full_pages + 1) * self.page_size <= len(sample.tokens)

    def detach(self, sample: Sample) -> None:
        """Give back every page, last first: a page is then taken back before its predecessor."""
        for page in reversed(sample.pages):
            self.pool.release(page)
        del sample.pages[:]
        sample.computed = sample.full_pages = 0
        sample.is_private = False

    def drop(self) -> None:
        """Forget everything: the weights have changed. Who still holds a page must be private."""
        self.pool.drop_kept()
        self._page_of.clear()
        self._key_of.clear()
        self._number_of.clear()
        self._root = next(self._numbers)

    def check(self, samples: list[Sample]) -> None:
        self.pool.check((sample.pages for sample in samples), self._key_of)
        assert {page: key for key, page in self._page_of.items()} == self._key_of, (
            "keys and pages disagree"
        )
        numbers = {self._root, *self._number_of.values()}
        assert all(chain in numbers for chain, _ in self._page_of), (
            "a page outlived its predecessor"
        )
        for sample in samples:
            assert len(sample.pages) * self.page_size >= sample.computed, (
                "tokens are computed without a page"
            )
            private = sample.pages[sample.full_pages :]
            assert all(self.pool.holders[page] == 1 for page in private), (
                "a page that is written to is shared"
            )

    def _enter(self, key: Key, page: int) -> None:
        self._page_of[key] = page
        self._key_of[page] = key
        self._number_of[page] = next(self._numbers)
        self.pool.keep(page)

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        del self._number_of[page]

    def _key(self, chain: int, tokens: array, index: int) -> Key:
        start = index * self.page_size
        return chain, tokens[start : start + self.page_size].tobytes()
