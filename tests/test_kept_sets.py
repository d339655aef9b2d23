"""Kept sets and biases: which tokens are kept, the bits of both sides, gradients, frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from bits import differing, differing_in_control
from reordered import REORDERED

from shared_ops.logprob.op import scaled_logits, select_logprobs, token_logprobs
from shared_ops.logprob.restricted import Bias, Restriction, add_bias, keep
from shared_ops.sample.kept import kept_thresholds
from shared_ops.sample.op import draw

INFINITY = math.inf


def thresholds(logits_BV, top_k=0, top_p=1.0, min_p=0.0):
    rows = len(logits_BV)
    return kept_thresholds(
        logits_BV,
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p, dtype=torch.float64),
    )


def kept_tokens(logits_V: torch.Tensor, **filters) -> list[int]:
    logits_1V = logits_V.unsqueeze(0)
    kept_1V = keep(logits_1V.clone(), thresholds(logits_1V, **filters))
    return kept_1V[0].isfinite().nonzero().squeeze(1).tolist()


def test_the_kept_set():
    logits_V = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert kept_tokens(logits_V) == [0, 1, 2, 3]
    assert kept_tokens(logits_V, top_k=2) == [1, 3]
    assert kept_tokens(logits_V, top_k=9) == [0, 1, 2, 3]
    assert kept_tokens(logits_V, top_p=0.7) == [1, 3]
    assert kept_tokens(logits_V, top_p=0.80) == [1, 2, 3]
    assert kept_tokens(logits_V, top_p=1e-9) == [1]
    assert kept_tokens(logits_V, min_p=0.29) == [1, 2, 3]
    assert kept_tokens(logits_V, min_p=1.0) == [1]
    # Of the two likeliest, the first holds two thirds.
    assert kept_tokens(logits_V, top_k=2, top_p=0.6) == [1]
    assert kept_tokens(logits_V, top_k=3, min_p=0.4) == [1, 3]


def test_tokens_that_tie_with_the_last_are_kept():
    logits_V = torch.tensor([0.2, 0.5, 0.1, 0.2]).log()
    assert kept_tokens(logits_V, top_k=2) == [0, 1, 3]
    assert kept_tokens(logits_V, top_p=0.6) == [0, 1, 3]


def test_masked_tokens_are_never_kept():
    logits_V = torch.tensor([1.0, -INFINITY, 2.0, -INFINITY])
    for filters in ({}, {"top_k": 4}, {"top_p": 0.999999}, {"min_p": 1e-9}):
        assert kept_tokens(logits_V, **filters) == [0, 2]


def random_logits(rows=40, vocabulary=977, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocabulary, generator=generator)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_holds_its_mass_and_no_token_too_many(top_p):
    logits_BV = random_logits()
    kept_BV = keep(logits_BV.clone(), thresholds(logits_BV, top_p=top_p)).isfinite()
    p_BV = logits_BV.double().softmax(-1)
    mass_B = (p_BV * kept_BV).sum(-1)
    least_B = torch.where(kept_BV, p_BV, 2.0).amin(-1)
    assert (mass_B > top_p - 1e-7).all()
    assert (mass_B - least_B < top_p + 1e-7).all()


def test_bits_of_a_threshold_depend_on_its_row_only():
    logits_BV = random_logits()
    whole_B = thresholds(logits_BV, top_k=50, top_p=0.8, min_p=0.001)
    ones_B = torch.cat(
        [thresholds(row_1V, top_k=50, top_p=0.8, min_p=0.001) for row_1V in logits_BV.split(1)]
    )
    assert whole_B.isfinite().all() and differing(whole_B, ones_B) == 0
    back_B = thresholds(logits_BV.flip(0), top_k=50, top_p=0.8, min_p=0.001).flip(0)
    assert differing(whole_B, back_B) == 0


def test_frequencies_of_draws_from_a_kept_set():
    """Chi-square over the kept tokens, 120,000 draws; nothing outside is drawn."""
    count, logits_1V = 120_000, 2 * torch.randn(1, 33, generator=torch.Generator().manual_seed(3))
    biased_1V = add_bias(
        logits_1V.clone(), torch.ones(1), bias_of([(0, 4, 1.5), (0, 9, -INFINITY)])
    )
    for filters in ({"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}):
        kept_1V = keep(biased_1V.clone(), thresholds(biased_1V, **filters))
        keys_B2 = torch.tensor([[5, 6]]).expand(count, 2)
        tokens = draw(kept_1V.expand(count, -1), keys_B2, torch.arange(count))
        seen = tokens.bincount(minlength=33)
        expected = kept_1V[0].double().softmax(0) * count
        kept = expected > 0
        assert 2 < int(kept.sum()) < 33 and not kept[9] and not seen[~kept].any()
        chi_square = ((seen - expected)[kept].square() / expected[kept]).sum()
        degrees = int(kept.sum()) - 1
        assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def bias_of(entries) -> Bias:
    rows, tokens, values = zip(*entries, strict=True)
    return Bias(torch.tensor(rows), torch.tensor(tokens), torch.tensor(values))


class Case:
    """Rows as a trainer has them, and their restriction as the sampler would have found it."""

    def __init__(self, dtype=torch.float32, rows=300, width=48, vocabulary=203):
        generator = torch.Generator().manual_seed(1)
        self.hidden_TD = torch.randn(rows, width, generator=generator).to(dtype)
        self.head_VD = (torch.randn(vocabulary, width, generator=generator) / 3).to(dtype)
        self.temperature_T = torch.rand(rows, generator=generator) + 0.5
        self.limit = vocabulary - 3
        entries = [(row, 7 + row % 5, 2.5 - row % 3) for row in range(0, rows, 2)]
        self.bias = bias_of([*entries, *((row, 11, -INFINITY) for row in range(rows))])
        self.logits_TV = scaled_logits(self.hidden_TD, self.head_VD, self.temperature_T, self.limit)
        add_bias(self.logits_TV, self.temperature_T, self.bias)
        self.threshold_T = thresholds(self.logits_TV, top_k=20, top_p=0.9)
        self.threshold_T[::7] = -INFINITY
        keep(self.logits_TV, self.threshold_T)
        keys_T2 = torch.randint(0, 2**32, (rows, 2), generator=generator)
        self.tokens_T = draw(self.logits_TV, keys_T2, torch.arange(rows))

    @property
    def restriction(self) -> Restriction:
        return Restriction(self.threshold_T, self.bias)

    def token_logprobs(self, rows=slice(None), restriction=None):
        chosen = (x[rows] for x in (self.tokens_T, self.temperature_T))
        return token_logprobs(self.hidden_TD[rows], self.head_VD, *chosen, self.limit, restriction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainers_bits_are_the_samplers(dtype):
    case = Case(dtype)
    sampled_T = select_logprobs(case.logits_TV, case.tokens_T)
    trained_T, _ = case.token_logprobs(restriction=case.restriction)
    assert sampled_T.isfinite().all() and differing(trained_T, sampled_T) == 0
    plain_T, _ = case.token_logprobs()
    assert differing_in_control(plain_T, sampled_T) > 100
    reordered_T, _ = REORDERED.token_logprobs(
        case.hidden_TD, case.head_VD, case.tokens_T, case.temperature_T, case.limit,
        case.restriction,
    )  # fmt: skip
    assert differing_in_control(reordered_T, sampled_T) > 0
    assert reordered_T.isfinite().all()


def test_row_blocks_change_no_bit(monkeypatch):
    case = Case()
    whole = case.token_logprobs(restriction=case.restriction)
    monkeypatch.setattr("shared_ops.logprob.restricted.LOGITS_LIMIT", 1)
    pieces = case.token_logprobs(restriction=case.restriction)
    assert [differing(a, b) for a, b in zip(whole, pieces, strict=True)] == [0, 0]


def test_a_restriction_that_keeps_everything_changes_no_bit():
    case = Case()
    free = Restriction(torch.full_like(case.threshold_T, -INFINITY))
    (some_T, _), (all_T, _) = case.token_logprobs(restriction=free), case.token_logprobs()
    assert differing(some_T, all_T) == 0


def test_a_token_outside_the_kept_set_counts_as_kept():
    case = Case()
    outside_T = case.logits_TV.argmin(-1)
    assert (case.logits_TV.gather(1, outside_T[:, None]) == -INFINITY).all()
    case.tokens_T = torch.where(outside_T == 11, 12, outside_T).clamp(max=case.limit - 1)
    logprobs_T, _ = case.token_logprobs(restriction=case.restriction)
    assert (logprobs_T.isfinite() | (case.tokens_T == 11)).all()


def gradients(case: Case, dtype, function, rows):
    hidden_TD, head_VD = (
        x.detach().to(dtype).requires_grad_() for x in (case.hidden_TD, case.head_VD)
    )
    logprobs_T, entropy_T = function(hidden_TD, head_VD)
    weight_T = torch.linspace(-1, 1, rows, dtype=dtype)
    ((logprobs_T * weight_T).sum() + (entropy_T * weight_T.flip(0)).sum()).backward()
    return hidden_TD.grad, head_VD.grad


def test_gradients_against_float64():
    """At most twice the error of torch's own autograd in float32."""
    case = Case()
    kept_TV = case.logits_TV.isfinite()

    def by_torch(hidden_TD, head_VD):
        logits_TV = hidden_TD @ head_VD.T
        values_J = case.bias.values_J.to(logits_TV.dtype)
        places = case.bias.rows_J, case.bias.tokens_J
        bias_TV = torch.zeros_like(logits_TV).index_put(places, values_J)
        logits_TV = (logits_TV + bias_TV) / case.temperature_T.to(logits_TV.dtype)[:, None]
        logprobs_TV = logits_TV.masked_fill(~kept_TV, -INFINITY).log_softmax(-1)
        finite_TV = logprobs_TV.clamp(min=-1e4)
        entropy_T = -(finite_TV.exp() * finite_TV).sum(-1)
        return logprobs_TV.gather(1, case.tokens_T[:, None]).squeeze(1), entropy_T

    def ours(hidden_TD, head_VD):
        return token_logprobs(
            hidden_TD, head_VD, case.tokens_T, case.temperature_T, case.limit, case.restriction
        )

    rows = len(case.tokens_T)
    wanted = gradients(case, torch.float64, by_torch, rows)
    theirs = gradients(case, torch.float32, by_torch, rows)
    mine = gradients(case, torch.float32, ours, rows)
    for exact, other, own in zip(wanted, theirs, mine, strict=True):
        assert exact.abs().max() > 0.1
        assert (own - exact).abs().max() <= 2 * (other - exact).abs().max() + 1e-7
