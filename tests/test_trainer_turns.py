"""Completions of several turns in the trainer: appended tokens are context, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from bits import differing
from toy_models import toy_folder

from rollout import Completion, Engine, EngineConfig, SamplingParams
from trainer import ParityError, Trainer, TrainerConfig, TrainSample

PROMPTS = [[1, 20, 21, 22, 23], [1, 20, 21], [5]]
TURNS = SamplingParams(max_tokens=60, n=4, stop_token_ids=range(3, 40), ignore_eos=True)
FILTERED = replace(TURNS, top_p=0.8, logit_bias={60: 1.5}, min_tokens=3, temperature=0.7)
ADVANTAGES = (1.0, -0.25, 0.5, 0.75)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("trainer-turns") / "model")


def answer(completion: Completion) -> tuple[int, ...]:
    return (50, 51, 52, 53)[: 1 + len(completion.appended)] if len(completion.appended) < 3 else ()


@pytest.fixture(scope="module")
def completions(folder):
    config = EngineConfig(page_size=4, num_pages=60, prefill_chunk=3)

    def drawn(params):
        groups = Engine(folder, config).generate(PROMPTS, params, environment=answer)
        ones = [one for group in groups for one in group]
        assert sum(len(one.appended) for one in ones) >= 20
        return ones

    return {params: drawn(params) for params in (TURNS, FILTERED)}


def samples_of(completions, params=TURNS) -> list[TrainSample]:
    advantages = ADVANTAGES * len(PROMPTS)
    pairs = zip(completions[params], advantages, strict=True)
    return [TrainSample.of(one, advantage, params.temperature) for one, advantage in pairs]


def poisoned(sample: TrainSample) -> TrainSample:
    """Other values wherever nobody drew a token; the tokens themselves are context and stay."""
    odd = {"behaviour_logprobs": math.nan, "policy_versions": 9, "kept_thresholds": -math.inf}
    changes = {}
    for name, value in odd.items():
        pairs = zip(getattr(sample, name), sample.loss_mask, strict=False)
        changes[name] = tuple(given if is_drawn else value for given, is_drawn in pairs)
    spans = [place for place, is_drawn in enumerate(sample.loss_mask) if not is_drawn]
    more = tuple((place, place + 1, 50, 3.0) for place in spans)
    return replace(sample, **changes, logit_biases=(*sample.logit_biases, *more))


@pytest.mark.parametrize("params", [TURNS, FILTERED], ids=["all tokens", "kept sets"])
def test_drawn_tokens_have_the_engines_bits_and_only_they_are_compared(folder, completions, params):
    ones, samples = completions[params], samples_of(completions, params)
    trainer = Trainer(folder, TrainerConfig(micro_batch_tokens=100))
    scored = trainer.logprobs(samples)
    drawn = [x for one in ones for x, own in zip(one.logprobs, one.is_drawn, strict=True) if own]
    own_N = torch.cat([x[list(s.places)] for x, s in zip(scored, samples, strict=True)])
    assert len(drawn) > 100
    assert differing(own_N, torch.tensor(drawn)) == 0
    assert [len(values) for values in scored] == [len(one.token_ids) for one in ones]
    stats = trainer.step(samples)
    assert (stats.tokens_compared, stats.tokens_differing) == (len(drawn), 0)
    assert stats.metrics["num_tokens"] == sum(s.length + 1 for s in samples)


def test_without_the_mask_parity_fails(folder, completions):
    """The control: appended tokens, which nobody drew, compared like the others."""
    samples = [replace(sample, loss_mask=()) for sample in samples_of(completions)]
    with pytest.raises(ParityError) as raised:
        Trainer(folder, TrainerConfig()).step(samples)
    appended = sum(one.is_drawn.count(False) for one in completions[TURNS])
    assert raised.value.report.tokens_differing == appended
    first = raised.value.first
    assert first is not None
    assert not completions[TURNS][first.sample_index].is_drawn[first.position]


SETTINGS = [
    {"aggregation": "token"},
    {"aggregation": "sequence", "loss": "gspo"},
    {"aggregation": "constant", "max_completion_tokens": 60, "beta": 0.1},
    {"aggregation": "token", "entropy_coefficient": 0.01, "lag_correction": "decoupled"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_given_for_appended_tokens_changes_no_bit(folder, completions, settings):
    results = []
    for change in (lambda sample: sample, poisoned):
        trainer = Trainer(folder, TrainerConfig(**settings, keep_versions=1))
        batch = [change(sample) for sample in samples_of(completions, FILTERED)]
        batch = trainer.with_old_logprobs(batch)
        first, second = trainer.step(batch[:7]), trainer.step(batch[5:])
        assert second.metrics["parity/lag_rescored_compared"] > 50
        results.append((first.metrics, second.metrics, trainer.publish()[0].digest))
    assert results[0] == results[1]


def test_stale_drawn_tokens_are_proved_and_appended_ones_are_not_counted(folder, completions):
    trainer = Trainer(folder, TrainerConfig(keep_versions=2))
    trainer.publish()
    samples = samples_of(completions)
    trainer.step(samples)
    stats = trainer.step(trainer.with_lag_proof([poisoned_values(s) for s in samples]))
    assert stats.metrics["parity/lag_rescored_compared"] == sum(len(s.places) for s in samples)
    assert stats.metrics["parity/lag_rescored_differing"] == 0


def poisoned_values(sample: TrainSample) -> TrainSample:
    pairs = zip(sample.behaviour_logprobs, sample.loss_mask, strict=True)
    values = tuple(given if is_drawn else -7.0 for given, is_drawn in pairs)
    return replace(sample, behaviour_logprobs=values)


def test_denominators_count_drawn_tokens(folder, completions):
    """Fresh tokens have ratio 1, so each one's loss is minus its advantage."""
    samples = samples_of(completions)
    drawn = [len(sample.places) for sample in samples]
    sums = [sample.advantage * count for sample, count in zip(samples, drawn, strict=True)]
    wanted = {
        "token": -sum(sums) / sum(drawn),
        "sequence": -sum(sample.advantage for sample in samples) / len(samples),
        "constant": -sum(sums) / (len(samples) * 60),
    }
    for aggregation, loss in wanted.items():
        config = TrainerConfig(aggregation=aggregation, max_completion_tokens=60)
        assert Trainer(folder, config).step(samples).loss == pytest.approx(loss, rel=1e-6)


def test_one_sample_with_a_mask_learns_what_its_turns_learn(folder, completions):
    """With a token mean; a mean over sequences would weigh each turn like a whole completion."""
    updated = []
    for parts in (lambda one: [one], lambda one: one.turns()):
        trainer = Trainer(folder, TrainerConfig(aggregation="token"))
        pairs = zip(completions[TURNS], ADVANTAGES * len(PROMPTS), strict=True)
        stats = trainer.step([TrainSample.of(p, a) for one, a in pairs for p in parts(one)])
        updated.append(stats)
    assert updated[0].tokens_compared == updated[1].tokens_compared
    assert updated[0].loss == pytest.approx(updated[1].loss, rel=1e-6)
    assert updated[0].grad_norm == pytest.approx(updated[1].grad_norm, rel=1e-4)


def test_bad_masks_and_places_are_refused(folder, completions):
    sample = samples_of(completions)[0]
    with pytest.raises(ValueError, match="loss_mask has 1 entries"):
        replace(sample, loss_mask=(True,))
    with pytest.raises(ValueError, match="loss_mask has no True"):
        replace(sample, loss_mask=(False,) * len(sample.completion_ids))
    trainer, first = Trainer(folder, TrainerConfig()), len(sample.prompt_ids)
    for place, is_drawn in enumerate(sample.loss_mask):
        if not is_drawn:
            with pytest.raises(ValueError, match="drawn tokens"):
                trainer.trace(sample, first + place)
            break
    place = sample.places[-1]
    traced = trainer.trace(sample, first + place)["logprob"].item()
    assert traced == sample.behaviour_logprobs[place]
