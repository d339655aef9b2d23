"""What is asked for, what comes back, and the planner's record of one sample under way."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared_ops.sample.key import request_key

TOKEN_TYPE = "q"
LEAST_TEMPERATURE = 1e-6


class RequestError(ValueError):
    """A request that cannot be served; the message names the setting and the mend."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    max_tokens: most tokens drawn for a completion.
    temperature: logits are divided by it; 0 is greedy, with the logprobs of temperature 1.
    top_p, top_k: keep the likeliest tokens only; refused by an exact engine.
    n: completions of the prompt; sample i of them is numbered `first_sample + i` and draws with
        that number, so n = 8 gives what eight requests with first_sample = 0..7 give.
    seed: any whole number.
    stop_token_ids: drawing one of these ends the completion, besides the model folder's
        end-of-sequence ids.
    ignore_eos: the folder's end-of-sequence ids do not end the completion.
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

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids)
        )
        for name in ("max_tokens", "n", "seed", "top_k", "first_sample"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            _require(whole, f"{name} is {value!r}: use a whole number")
        _require(self.max_tokens >= 1, f"max_tokens is {self.max_tokens}: use at least 1")
        fits = self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf
        _require(
            fits,
            f"temperature is {self.temperature}: use 0 (greedy), or {LEAST_TEMPERATURE} or more",
        )
        _require(
            0 < self.top_p <= 1,
            f"top_p is {self.top_p}: use a number above 0 and up to 1 (1 keeps every token)",
        )
        _require(self.top_k >= 0, f"top_k is {self.top_k}: use 0 (keeps every token) or more")
        _require(self.n >= 1, f"n is {self.n}: use at least 1")
        _require(self.first_sample >= 0, f"first_sample is {self.first_sample}: use 0 or more")

    @property
    def filters(self) -> bool:
        return self.top_p != 1 or self.top_k != 0


@dataclass(frozen=True)
class Completion:
    """One finished sample.

    token_ids: the drawn tokens, the stop token among them; logprobs: of each, at the request's
        temperature, float32 values held exactly; policy_versions: the weights version that drew
        each; finish_reason: "stop", "length" or "abort".

    Example: Completion("request-0", 0, (5, 6), (9, 2), (-0.25, -1.5), (3, 3), "stop").
    """

    request_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class Request:
    """A checked prompt, its parameters, and every token id that ends a completion of it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]


@dataclass(eq=False, slots=True)
class Sample:
    """One completion under way.

    The KV of tokens[:computed] lies in pages; the first full_pages of these are known to the prefix
    cache, the last of them under the number `chain`.
    """

    request: Request
    index: int
    key: tuple[int, int]
    tokens: array
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    pages: array = field(default_factory=lambda: array(TOKEN_TYPE))
    computed: int = 0
    full_pages: int = 0
    chain: int = 0
    pending: tuple[int, bytes] | None = None
    awaited: tuple[int, bytes] | None = None
    finish_reason: str | None = None

    @property
    def remaining(self) -> int:
        """Tokens that are known and whose KV is not computed yet; never 0 between steps."""
        return len(self.tokens) - self.computed

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.stop_ids:
            self.finish_reason = "stop"
        elif len(self.logprobs) == self.request.params.max_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        prompt_ids = self.request.prompt_ids
        return Completion(
            request_id=self.request.request_id,
            sample_index=self.index,
            prompt_ids=prompt_ids,
            token_ids=tuple(self.tokens[len(prompt_ids) :]),
            logprobs=tuple(self.logprobs),
            policy_versions=tuple(self.versions),
            finish_reason=self.finish_reason or "abort",
        )


def samples_of(request: Request) -> list[Sample]:
    params, prompt_ids = request.params, request.prompt_ids
    indexes = range(params.first_sample, params.first_sample + params.n)
    return [
        Sample(
            request,
            index,
            request_key(params.seed, prompt_ids, index),
            array(TOKEN_TYPE, prompt_ids),
        )
        for index in indexes
    ]


def checked_prompt(prompt: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        raise RequestError("the prompt is text: pass its token ids")
    prompt_ids = _whole_numbers(prompt)
    _require(len(prompt_ids) > 0, "the prompt is empty: pass at least one token id")
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"the prompt holds token id {wrong}: the model's ids are 0 to {vocab_size - 1}"
        )
    return prompt_ids


def _whole_numbers(prompt: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(array(TOKEN_TYPE, prompt))
    except (TypeError, OverflowError) as error:
        raise RequestError(
            f"the prompt is no list of token ids ({error}): pass whole numbers"
        ) from None


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RequestError(message)
