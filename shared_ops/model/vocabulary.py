"""How many vocabulary rows a token may come from; no torch here."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared_ops.model.config import ConfigError, ModelConfig


def vocab_limit(folder: str | Path, config: ModelConfig) -> int:
    """One more than the largest id in the folder's tokenizer, at most config.vocab_size.

    Models pad their vocabulary to round sizes; no tokenizer entry stands for the rows after it, and
    neither the sampler nor the trainer may give them probability. Without tokenizer files there is
    nothing to go by and the limit is config.vocab_size.

    Raises:
        ConfigError: a tokenizer file is not JSON.
    """
    for name in ("tokenizer.json", "vocab.json"):
        path = Path(folder) / name
        if path.exists():
            entries = _entries(path, path.stat().st_mtime_ns)
            return min(entries, config.vocab_size) if entries else config.vocab_size
    return config.vocab_size


@lru_cache(maxsize=16)
def _entries(path: Path, modified_ns: int) -> int:
    """Cached under the time of change, as a large tokenizer takes half a second to read."""
    raw = _load(path)
    ids = _token_ids(raw)
    beside = path.parent / "tokenizer_config.json"
    if beside.exists():
        ids += [int(token_id) for token_id in _load(beside).get("added_tokens_decoder", {})]
    return max(ids, default=-1) + 1


def _token_ids(raw: dict[str, Any]) -> list[int]:
    if "model" not in raw:
        return [token_id for token_id in raw.values() if isinstance(token_id, int)]
    vocabulary = raw["model"].get("vocab", {})
    is_unigram = isinstance(vocabulary, list)
    ids = list(range(len(vocabulary))) if is_unigram else list(vocabulary.values())
    return ids + [token["id"] for token in raw.get("added_tokens", [])]


def _load(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
