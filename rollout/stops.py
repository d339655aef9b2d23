"""Stop strings, found in the text of tokens that were drawn; text is never turned into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

# Tokens decoded besides the longest string's bytes: the first may lose a leading space or be a
# part of a character.
MARGIN = 8
REPLACEMENT = "\ufffd"


def completes(decode: Decode, tokens: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the last token completes one of the strings.

    A token stands for at least a byte, so as many tokens as the longest string has bytes are looked
    at; one that stands for nothing counts all the same.
    """
    window = max(len(text.encode()) for text in stop) + MARGIN
    last = list(tokens[-window:])
    text, before = decode(last), decode(last[:-1]).rstrip(REPLACEMENT)
    return any(text.find(each, max(0, len(before) - len(each) + 1)) >= 0 for each in stop)
