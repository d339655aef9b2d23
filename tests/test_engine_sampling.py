"""Sampling settings of the engine: what they do, and that both sides have the same bits of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import differing, differing_in_control
from toy_models import EOS, toy_folder

from rollout import Completion, Engine, EngineConfig, RequestError, SamplingParams
from rollout.stops import completes
from trainer import Trainer, TrainerConfig, TrainSample

PROMPTS = [[1, 20, 21, 22, 23], [5], [1, *range(30, 70)], [1, 20, 21, 40]]
LONG = SamplingParams(max_tokens=24, n=3, ignore_eos=True)
SETTINGS = {
    "top-k": replace(LONG, top_k=5),
    "top-p": replace(LONG, top_p=0.7, temperature=1.3),
    "min-p": replace(LONG, min_p=0.1),
    "all three": replace(LONG, top_k=20, top_p=0.95, min_p=0.02, temperature=2.0),
    "biases": replace(LONG, logit_bias={20: 3.0, 21: -2.5}, banned_token_ids=(22, 23)),
    "min tokens": replace(LONG, min_tokens=9, stop_token_ids=(20, 30, 40), ignore_eos=False),
    "greedy with a filter": replace(LONG, top_p=0.5, temperature=0.0),
    "everything": replace(
        LONG, top_k=9, top_p=0.9, logit_bias={20: 1.5}, min_tokens=4, ignore_eos=False
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("sampling") / "model")


@pytest.fixture(scope="module")
def trainer(folder):
    return Trainer(folder, TrainerConfig())


def as_sample(one: Completion, temperature: float, **changes) -> TrainSample:
    given = {"kept_thresholds": one.kept_thresholds, "logit_biases": one.logit_biases}
    return TrainSample(
        one.prompt_ids,
        one.token_ids,
        one.logprobs,
        1.0,
        one.policy_versions,
        temperature,
        **{**given, **changes},
    )


def drawn(completions) -> torch.Tensor:
    return torch.tensor([x for one in completions for x in one.logprobs], dtype=torch.float32)


@pytest.mark.parametrize("setting", SETTINGS)
def test_trainer_has_the_bits_that_were_drawn_with(folder, trainer, setting):
    params = SETTINGS[setting]
    groups = Engine(folder, EngineConfig(page_size=4)).generate(PROMPTS, params)
    ones = [one for group in groups for one in group]
    drawn_N = drawn(ones)
    samples = [as_sample(one, params.temperature) for one in ones]
    assert len(drawn_N) > 100
    assert differing(torch.cat(trainer.logprobs(samples)), drawn_N) == 0
    without = [
        as_sample(one, params.temperature, kept_thresholds=(), logit_biases=()) for one in ones
    ]
    assert differing_in_control(torch.cat(trainer.logprobs(without)), drawn_N) > 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_batch_mates_change_no_bit(folder, setting):
    mixed = [SETTINGS[setting], *(each for each in SETTINGS.values())]
    prompts = [PROMPTS[index % 4] for index in range(len(mixed))]
    config = EngineConfig(page_size=4, prefill_chunk=7)
    beside = Engine(folder, config).generate(prompts, mixed)[0]
    alone = [
        Engine(folder).generate(prompts[:1], replace(mixed[0], n=1, first_sample=index))[0][0]
        for index in range(3)
    ]
    for one, other in zip(beside, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.kept_thresholds == other.kept_thresholds
    assert differing(drawn(beside), drawn(alone)) == 0


def test_a_step_on_filtered_samples_passes_the_parity_check(folder):
    params = SETTINGS["everything"]
    ones = Engine(folder).generate(PROMPTS, params)
    samples = [as_sample(one, 1.0) for group in ones for one in group]
    samples = [replace(sample, advantage=(-1.0) ** index) for index, sample in enumerate(samples)]
    trainer = Trainer(folder, TrainerConfig(mode="bitwise"))
    stats = trainer.step(samples)
    assert stats.tokens_compared > 100 and stats.tokens_differing == 0
    assert stats.grad_norm > 0


def test_what_travels_with_a_completion(folder):
    engine = Engine(folder)
    plain, filtered = engine.generate(PROMPTS[:1] * 2, [LONG, SETTINGS["top-k"]])
    assert plain[0].kept_thresholds == () == plain[0].logit_biases
    assert all(len(one.kept_thresholds) == len(one.token_ids) for one in filtered)
    assert all(value <= 0 for one in filtered for value in one.kept_thresholds)
    ((one, *_),) = engine.generate(PROMPTS[:1], SETTINGS["everything"])
    length = len(one.token_ids)
    assert one.logit_biases == ((0, length, 20, 1.5), (0, 4, EOS, float("-inf")))


def test_one_kept_token_has_logprob_zero(folder):
    ones = Engine(folder).generate(PROMPTS, replace(LONG, top_k=1, n=1))
    greedy = Engine(folder).generate(PROMPTS, replace(LONG, temperature=0, n=1))
    assert [one.token_ids for (one,) in ones] == [one.token_ids for (one,) in greedy]
    assert all(one.logprobs == (0.0,) * 24 for (one,) in ones)


def test_banned_tokens_are_never_drawn_and_biases_count(folder):
    engine, flat = Engine(folder), replace(LONG, temperature=50.0, n=40)
    banned = replace(flat, banned_token_ids=range(0, 113, 2), logit_bias={1: 400.0, 3: "-inf"})
    tokens = [t for one in engine.generate(PROMPTS[:1], banned)[0] for t in one.token_ids]
    assert len(tokens) == 960
    assert not {t for t in tokens if t % 2 == 0 or t == 3}
    assert tokens.count(1) > 900


def test_min_tokens_holds_every_stop_back(folder):
    stops = replace(LONG, n=40, stop_token_ids=range(60), ignore_eos=False)
    early = Engine(folder).generate(PROMPTS[:1], stops)[0]
    late = Engine(folder).generate(PROMPTS[:1], replace(stops, min_tokens=6))[0]
    assert min(len(one.token_ids) for one in early) < 6
    assert all(len(one.token_ids) > 6 for one in late)
    assert not {token for one in late for token in one.token_ids[:6]} & set(range(60))


def letters(tokens: list[int]) -> str:
    """Two letters a token, so that strings begin and end inside tokens."""
    return "".join(chr(97 + token // 16) + chr(97 + token % 16) for token in tokens)


def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it(folder):
    engine = Engine(folder, decode=letters)
    whole = engine.generate(PROMPTS[:1], replace(LONG, n=1))[0][0]
    text = letters(list(whole.token_ids))
    stop = text[13:16]
    end = text.find(stop) + len(stop)
    ((cut,),) = engine.generate(PROMPTS[:1], replace(LONG, n=1, stop=("zzzz", stop)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: -(-end // 2)]
    assert cut.logprobs == whole.logprobs[: len(cut.token_ids)]
    late = replace(LONG, n=1, stop=stop, min_tokens=len(cut.token_ids) + 1)
    ((longer,),) = engine.generate(PROMPTS[:1], late)
    assert len(longer.token_ids) > len(cut.token_ids)


def test_a_stop_string_may_end_in_a_character_of_several_tokens():
    pieces = [b"a", *(bytes([byte]) for byte in "é".encode()), b"b"]

    def decode(tokens):
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    assert [completes(decode, [0, 1, 2, 3][:n], ("aé",)) for n in (1, 2, 3, 4)] == [
        False, False, True, False,
    ]  # fmt: skip
    assert completes(decode, [0] * 100 + [3], ("ab",))
    assert not completes(decode, [0, 3] + [0] * 3, ("ab",))


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
    ],
)
def test_wrong_parameters_are_named(wrong, named):
    with pytest.raises(RequestError, match=named) as caught:
        SamplingParams(**{"max_tokens": 4, **wrong})
    assert "\n" not in str(caught.value)
