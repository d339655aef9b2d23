"""What an engine accepts: a prompt and its parameters, checked against the model."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollout.params import RequestError, SamplingParams, require
from rollout.request import TOKEN_TYPE, Completion, Environment, Request
from rollout.scheduler import NOT_FINITE
from rollout.stops import Decode


class Limits(NamedTuple):
    """Of the model: ids of prompts are below vocab_size, of drawn tokens below vocab_limit."""

    vocab_size: int
    vocab_limit: int
    max_positions: int
    eos_ids: tuple[int, ...]
    decode: Decode | None


def checked_request(
    name: str,
    prompt: Sequence[int],
    params: SamplingParams,
    environment: Environment | None,
    limits: Limits,
) -> Request:
    """RequestError where the model can never serve it."""
    prompt_ids = checked_prompt(prompt, limits.vocab_size)
    length = len(prompt_ids) + params.max_tokens
    require(
        length <= limits.max_positions,
        f"a prompt of {len(prompt_ids)} tokens with max_tokens {params.max_tokens} exceeds the"
        f" model's {limits.max_positions} positions: shorten the prompt or lower max_tokens",
    )
    require(
        limits.decode is not None or not params.stop,
        "stop strings need text: give the engine decode=, a function from token ids to text",
    )
    eos_ids = () if params.ignore_eos else limits.eos_ids
    stop_ids = frozenset(params.stop_token_ids).union(eos_ids)
    _check_biases(params, stop_ids, limits)
    if environment is not None:
        environment = _checked(environment, limits.vocab_size)
    return Request(name, prompt_ids, params, stop_ids, limits.decode, environment)


def _check_biases(params: SamplingParams, stop_ids: frozenset[int], limits: Limits) -> None:
    biases = params.fixed_biases()
    held_back = stop_ids if params.min_tokens else frozenset()
    for token in (*(token for token, _ in biases), *held_back):
        require(
            0 <= token < limits.vocab_size,
            f"token id {token} is to be biased, banned or held back: the model's ids are 0 to"
            f" {limits.vocab_size - 1}",
        )
    banned = {token for token, bias in biases if bias == float("-inf")} | held_back
    require(
        sum(token < limits.vocab_limit for token in banned) < limits.vocab_limit,
        "every token is banned: shorten logit_bias or banned_token_ids",
    )


def _checked(environment: Environment, vocab_size: int) -> Environment:
    """The environment, what it appends checked like a prompt."""

    def append(completion: Completion) -> Sequence[int]:
        more = environment(completion)
        return checked_prompt(more, vocab_size) if more else ()

    return append


def checked_prompt(prompt: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        raise RequestError("the prompt is text: pass its token ids")
    prompt_ids = _whole_numbers(prompt)
    require(len(prompt_ids) > 0, "the prompt is empty: pass at least one token id")
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


def one_each(
    params: SamplingParams | Sequence[SamplingParams], prompts: int
) -> Sequence[SamplingParams]:
    """The parameters of each prompt."""
    if isinstance(params, SamplingParams):
        return [params] * prompts
    if len(params) != prompts:
        raise RequestError(
            f"{len(params)} sampling parameters for {prompts} prompts: pass one for all or one each"
        )
    return params


def check_resumable(completion: Completion, params: SamplingParams) -> None:
    """RequestError unless the completion was cut and there is more to draw."""
    require(
        completion.finish_reason == "abort",
        f"{completion.request_id} ended with {completion.finish_reason!r}: only an aborted"
        " completion can be resumed",
    )
    require(
        len(completion.token_ids) < params.max_tokens,
        f"max_tokens is {params.max_tokens} and {len(completion.token_ids)} tokens are drawn:"
        " raise max_tokens",
    )


def raise_if_failed(completion: Completion) -> None:
    """FloatingPointError or RuntimeError where the completion ended with an error."""
    if completion.finish_reason == "error":
        is_numeric = completion.message.startswith(NOT_FINITE)
        raise (FloatingPointError if is_numeric else RuntimeError)(completion.message)
