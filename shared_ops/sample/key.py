"""The key of a request's random draws; no torch, so that a planner may use it."""

import hashlib
from collections.abc import Sequence


def request_key(seed: int, prompt_ids: Sequence[int], sample_index: int) -> tuple[int, int]:
    """Two 32-bit words that depend on the seed, the prompt's tokens and the sample's index only.

    Two prompts, or two samples of one prompt, get unrelated draws; a request submitted again gets
    the same ones, whatever engine runs it and whatever runs beside it.
    """
    text = f"{seed}|{sample_index}|" + ",".join(map(str, prompt_ids))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
