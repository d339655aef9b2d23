"""How to continue a prompt: what a request may ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_TEMPERATURE = 1e-6


class RequestError(ValueError):
    """A request that cannot be served; the message names the setting and the mend."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    max_tokens: most tokens drawn for a completion.
    temperature: logits are divided by it; 0 is greedy, with the logprobs of temperature 1.
    top_p, top_k, min_p: keep the likeliest tokens only (`shared_ops.sample.kept` says which). The
        logprobs are those of the kept set, renormalised, and `Completion.kept_thresholds` lets the
        trainer compute the same bits.
    n: completions of the prompt; sample i of them is numbered `first_sample + i` and draws with
        that number, so n = 8 gives what eight requests with first_sample = 0..7 give.
    seed: any whole number.
    stop_token_ids: drawing one of these ends the completion, besides the model folder's
        end-of-sequence ids.
    ignore_eos: the folder's end-of-sequence ids do not end the completion.
    min_p: see top_p; in 0..1, 0 keeps every token.
    min_tokens: until so many tokens are drawn, what would end the completion is banned (token ids)
        or overlooked (strings).
    stop: strings; the completion ends with the token that completes one of them in its text. Needs
        an engine with `decode`. Tokens are returned as drawn, so the text may run past the string.
    logit_bias: token id -> number added to its logit (before the temperature); -inf bans it. Kept
        as sorted pairs.
    banned_token_ids: never drawn.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    first_sample: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, tuple(int(token) for token in getattr(self, name)))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", _sorted_pairs(self.logit_bias))
        self._check_counts()
        self._check_filters()
        require(all(self.stop), "stop holds an empty string: leave it out")
        for token, bias in self.fixed_biases():
            require(
                bias < math.inf,  # false for NaN
                f"logit_bias of token {token} is {bias}: use a number, or -inf to ban it",
            )

    def _check_counts(self) -> None:
        for name in ("max_tokens", "n", "seed", "top_k", "first_sample", "min_tokens"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole, f"{name} is {value!r}: use a whole number")
        require(self.max_tokens >= 1, f"max_tokens is {self.max_tokens}: use at least 1")
        require(self.n >= 1, f"n is {self.n}: use at least 1")
        require(self.first_sample >= 0, f"first_sample is {self.first_sample}: use 0 or more")
        require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}: use 0 to max_tokens, which is {self.max_tokens}",
        )

    def _check_filters(self) -> None:
        fits = self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf
        require(
            fits,
            f"temperature is {self.temperature}: use 0 (greedy), or {LEAST_TEMPERATURE} or more",
        )
        require(
            0 < self.top_p <= 1,
            f"top_p is {self.top_p}: use a number above 0 and up to 1 (1 keeps every token)",
        )
        require(self.top_k >= 0, f"top_k is {self.top_k}: use 0 (keeps every token) or more")
        require(
            0 <= self.min_p <= 1,
            f"min_p is {self.min_p}: use 0 (keeps every token) to 1 (keeps the likeliest)",
        )

    @property
    def filters(self) -> bool:
        """Whether the drawn tokens come from a kept set."""
        return self.top_p != 1 or self.top_k != 0 or self.min_p != 0

    @property
    def biases(self) -> bool:
        """Whether there may be anything to add to logits."""
        return bool(self.logit_bias or self.banned_token_ids or self.min_tokens)

    def fixed_biases(self) -> tuple[tuple[int, float], ...]:
        """(token id, bias) of every token, banned ones included."""
        assert isinstance(self.logit_bias, tuple)  # since __post_init__
        return (*self.logit_bias, *((token, -math.inf) for token in self.banned_token_ids))


def _sorted_pairs(
    biases: Mapping[int, float] | tuple[tuple[int, float], ...],
) -> tuple[tuple[int, float], ...]:
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    return tuple(sorted((int(token), float(bias)) for token, bias in pairs))


def require(holds: bool, message: str) -> None:
    if not holds:
        raise RequestError(message)
