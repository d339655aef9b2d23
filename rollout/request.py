"""What is asked for, what comes back, and the planner's record of one sample under way."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rollout.params import LEAST_TEMPERATURE, RequestError, SamplingParams
from rollout.stops import Decode, completes
from shared_ops.sample.key import request_key

__all__ = [
    "LEAST_TEMPERATURE",
    "Completion",
    "Environment",
    "Request",
    "RequestError",
    "Sample",
    "SamplingParams",
    "samples_of",
]

TOKEN_TYPE = "q"


@dataclass(frozen=True)
class Completion:
    """One finished sample.

    token_ids: the drawn tokens, the stop token among them; logprobs: of each, at the request's
        temperature, float32 values held exactly; policy_versions: the weights version that drew
        each; finish_reason: "stop", "length" or "abort".

    kept_thresholds: with top_p, top_k or min_p, of each token the float32 threshold of its kept set
        (`shared_ops.logprob.restricted`); otherwise empty.
    logit_biases: (first, end, token id, bias): at completion tokens first..end-1 the bias was added
        to that token's logit before the temperature; -inf banned it.
    Whoever computes the logprobs again needs both.
    appended: (first, end) spans of completion tokens that an environment appended; nobody drew
        them: their logprob is 0 and the loss has to leave them out (`turns` does).

    Example: Completion("request-0", 0, (5, 6), (9, 2), (-0.25, -1.5), (3, 3), "stop").
    """

    request_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: str
    kept_thresholds: tuple[float, ...] = ()
    logit_biases: tuple[tuple[int, int, int, float], ...] = ()
    appended: tuple[tuple[int, int], ...] = ()
    message: str = ""

    @property
    def is_drawn(self) -> tuple[bool, ...]:
        """Of each completion token, whether it was drawn: the mask of the loss."""
        mask = [True] * len(self.token_ids)
        for first, end in self.appended:
            mask[first:end] = [False] * (end - first)
        return tuple(mask)

    def turns(self) -> list[Completion]:
        """One completion for each run of drawn tokens, whose prompt is all that came before.

        Their logprobs are those of the whole, to the bit. All but the last ended with "stop".
        """
        edges = [0, *(edge for span in self.appended for edge in span), len(self.token_ids)]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        return [self._part(first, end) for first, end in spans if first < end]

    def _part(self, first: int, end: int) -> Completion:
        biases = (
            (max(low, first) - first, min(high, end) - first, token, bias)
            for low, high, token, bias in self.logit_biases
        )
        return replace(
            self,
            prompt_ids=(*self.prompt_ids, *self.token_ids[:first]),
            token_ids=self.token_ids[first:end],
            logprobs=self.logprobs[first:end],
            policy_versions=self.policy_versions[first:end],
            finish_reason=self.finish_reason if end == len(self.token_ids) else "stop",
            kept_thresholds=self.kept_thresholds[first:end],
            logit_biases=tuple(each for each in biases if each[0] < each[1]),
            appended=(),
        )


Environment = Callable[[Completion], Sequence[int] | None]


@dataclass(frozen=True)
class Request:
    """A checked prompt, its parameters, and every token id that ends a completion of it.

    decode: text of token ids, where the parameters name stop strings. environment: after a stop,
    asked for tokens to append.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    decode: Decode | None = None
    environment: Environment | None = None

    def biases_at(self, offset: int) -> tuple[tuple[int, float], ...]:
        """(token id, bias) where completion token `offset` is drawn."""
        biases = self.params.fixed_biases()
        if offset < self.params.min_tokens:
            biases += tuple((token, -math.inf) for token in sorted(self.stop_ids))
        return biases

    def biases_of(self, count: int) -> tuple[tuple[int, int, int, float], ...]:
        """As in `Completion.logit_biases`, of that many tokens."""
        early = min(count, self.params.min_tokens)
        fixed = ((0, count, token, bias) for token, bias in self.params.fixed_biases())
        held = ((0, early, token, -math.inf) for token in sorted(self.stop_ids) if early)
        return (*fixed, *held)


@dataclass(eq=False, slots=True)
class Sample:
    """One completion under way.

    The KV of tokens[:computed] lies in pages; the first full_pages of these are known to the prefix
    cache, the last of them under the number `chain`. is_private: some of its KV is of older
    weights, so no page that it fills may become known.
    """

    request: Request
    index: int
    key: tuple[int, int]
    tokens: array
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)
    pages: array = field(default_factory=lambda: array(TOKEN_TYPE))
    computed: int = 0
    full_pages: int = 0
    chain: int = 0
    pending: tuple[int, bytes] | None = None
    awaited: tuple[int, bytes] | None = None
    finish_reason: str | None = None
    appended: list[tuple[int, int]] = field(default_factory=list)
    message: str = ""
    is_private: bool = False

    @property
    def remaining(self) -> int:
        """Tokens that are known and whose KV is not computed yet; never 0 between steps."""
        return len(self.tokens) - self.computed

    def append(
        self, token: int, logprob: float, version: int, threshold: float = -math.inf
    ) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.request.params.filters:
            self.thresholds.append(threshold)
        if self._is_stopped_by(token):
            self.finish_reason = "stop"
        elif len(self.logprobs) == self.request.params.max_tokens:
            self.finish_reason = "length"

    def fail(self, message: str) -> None:
        self.finish_reason, self.message = "error", message

    def ask_environment(self, version: int) -> None:
        """After a stop: go on with what the environment appends, if that leaves room to draw."""
        environment = self.request.environment
        if self.finish_reason != "stop" or environment is None:
            return
        try:
            more = tuple(environment(self.completion()) or ())
        except Exception as error:  # whatever user code raises ends this request alone
            return self.fail(f"environment: {type(error).__name__}: {error}")
        first = len(self.logprobs)
        if not more:
            return
        if first + len(more) >= self.request.params.max_tokens:
            self.finish_reason = "length"
            return
        self.finish_reason = None
        self.tokens.extend(more)
        self.logprobs += [0.0] * len(more)
        self.versions += [version] * len(more)
        self.thresholds += [-math.inf] * (len(more) if self.request.params.filters else 0)
        self.appended.append((first, first + len(more)))

    def restore(self, completion: Completion) -> None:
        """Take up where a completion was cut."""
        self.tokens.extend(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.policy_versions
        self.thresholds += completion.kept_thresholds
        self.appended += completion.appended

    def _is_stopped_by(self, token: int) -> bool:
        request = self.request
        if len(self.logprobs) < request.params.min_tokens:
            return False
        if token in request.stop_ids:
            return True
        if not request.params.stop or request.decode is None:
            return False
        drawn = self.tokens[len(request.prompt_ids) :]
        return completes(request.decode, drawn, request.params.stop)

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
            kept_thresholds=tuple(self.thresholds),
            logit_biases=self.request.biases_of(len(self.logprobs)),
            appended=tuple(self.appended),
            message=self.message,
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
