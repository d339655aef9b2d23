"""Behaviour of the engine: what its public methods do, and how they refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from toy_models import ENTRIES, EOS, VOCABULARY, toy_folder

from rollout import Engine, EngineConfig, EngineError, RequestError, SamplingParams
from rollout.actor import RolloutActor
from rollout.admission import Limits, checked_request
from shared_ops.model.config import ConfigError, ModelConfig
from shared_ops.model.vocabulary import vocab_limit
from shared_ops.model.weights import WeightsError, make_manifest

PROMPT = [1, 20, 21, 22, 23]
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("behaviour") / "model")


@pytest.fixture
def engine(folder):
    return Engine(folder, EngineConfig(page_size=4))


def changed_weights(engine: Engine, version: int):
    tensors = {name: view * 1.25 for name, view in engine.weights.views().items()}
    return make_manifest(version, tensors), tensors


def test_greedy_is_what_transformers_generates(folder, engine):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for prompt in (PROMPT, [5], [1, *range(30, 70)]):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
            suppress_tokens=list(range(ENTRIES, VOCABULARY)),
        )
        assert engine.generate([prompt], greedy)[0][0].token_ids == tuple(
            expected[0, len(prompt) :].tolist()
        )


def test_generate_keeps_the_order_of_prompts_and_samples(engine):
    prompts = [[1, index] for index in range(3, 12)]
    params = [SamplingParams(max_tokens=1 + index % 4, n=1 + index % 3) for index in range(9)]
    calls: list[tuple[int, int]] = []
    groups = engine.generate(prompts, params, progress=lambda *counts: calls.append(counts))
    assert [[*group[0].prompt_ids] for group in groups] == prompts
    assert [[one.sample_index for one in group] for group in groups] == [
        list(range(each.n)) for each in params
    ]
    assert calls[-1] == (18, 18)
    assert all(before[0] < after[0] for before, after in pairwise(calls))
    assert engine.generate([], LONG) == []


def test_a_stop_token_ends_the_completion_and_is_part_of_it(folder, engine):
    whole = engine.generate([PROMPT], LONG)[0][0]
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == len(whole.logprobs) == len(whole.policy_versions) == 40
    stop = whole.token_ids[7]
    length = whole.token_ids.index(stop) + 1
    cut = engine.generate([PROMPT], replace(LONG, stop_token_ids=(119, stop)))[0][0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[:length]
    assert cut.logprobs == whole.logprobs[:length]


def test_the_folders_eos_ids_end_a_completion_unless_ignored(folder, engine, tmp_path):
    whole = engine.generate([PROMPT], LONG)[0][0]
    copy = toy_folder(tmp_path / "model")
    eos_ids = [EOS, whole.token_ids[4]]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    other = Engine(copy)
    cut = other.generate([PROMPT], replace(LONG, ignore_eos=False))[0][0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids[-1] in eos_ids
    assert len(cut.token_ids) <= 5
    assert other.generate([PROMPT], LONG)[0][0].token_ids == whole.token_ids


def test_rows_that_no_tokenizer_entry_stands_for_are_never_drawn(engine):
    assert engine.vocab_limit == ENTRIES
    flat = SamplingParams(max_tokens=60, temperature=50.0, n=40, ignore_eos=True)
    drawn = [token for one in engine.generate([PROMPT], flat)[0] for token in one.token_ids]
    assert len(drawn) == 2400
    assert max(drawn) == ENTRIES - 1
    assert len(set(drawn)) == ENTRIES


def test_vocab_limit_reads_what_the_folder_has(folder, tmp_path):
    config = ModelConfig.from_folder(folder)
    assert vocab_limit(folder, config) == ENTRIES
    assert vocab_limit(folder, replace(config, vocab_size=50)) == 50
    assert vocab_limit(tmp_path, config) == VOCABULARY
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 6}))
    assert vocab_limit(tmp_path, config) == 7
    decoder = {"added_tokens_decoder": {"9": {"content": "<end>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(decoder))
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert vocab_limit(tmp_path, config) == 10
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        vocab_limit(tmp_path, config)


def test_requests_by_hand_run_beside_generate_and_come_out_of_step(engine):
    by_hand = engine.add_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    groups = engine.generate([[1, 30, 31]], LONG)
    assert [one.request_id == by_hand for one in groups[0]] == [False]
    assert engine.has_work
    assert [one.request_id for one in engine.step()] == [by_hand]
    assert not engine.has_work
    assert engine.step() == []


def test_abort_returns_what_was_drawn_and_frees_the_pages(engine):
    name = engine.add_request(PROMPT, replace(LONG, n=3))
    other = engine.add_request(PROMPT, replace(LONG, seed=1))
    for _ in range(6):
        assert engine.step() == []
    cut = engine.abort(name)
    engine.scheduler.check()
    assert [(one.sample_index, one.finish_reason) for one in cut] == [
        (index, "abort") for index in range(3)
    ]
    assert all(len(one.token_ids) == len(one.logprobs) >= 5 for one in cut)
    assert engine.abort(name) == [] == engine.abort("nobody")
    done = []
    while engine.has_work:
        done += engine.step()
    assert [one.request_id for one in done] == [other]
    assert engine.stats()["held_pages"] == 0


def test_a_prompt_that_is_refused_starts_none_of_its_batch(engine):
    with pytest.raises(RequestError, match="token id 120"):
        engine.generate([PROMPT, [VOCABULARY]], LONG)
    assert not engine.has_work


def test_generate_that_is_interrupted_leaves_nothing_behind(engine):
    def interrupt(finished: int, total: int) -> None:
        raise KeyboardInterrupt

    params = [replace(LONG, max_tokens=3), LONG]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT, PROMPT], params, progress=interrupt)
    assert not engine.has_work
    engine.scheduler.check()


@pytest.mark.parametrize(
    "prompt, params, named",
    [
        ([1] * 500, SamplingParams(max_tokens=13), "512 positions.*max_tokens"),
        ([1] * 90, SamplingParams(max_tokens=40), "num_pages"),
        (PROMPT, SamplingParams(max_tokens=4, stop=("x",)), "decode="),
        (PROMPT, SamplingParams(max_tokens=4, logit_bias={120: 1.0}), "token id 120"),
        (PROMPT, SamplingParams(max_tokens=4, banned_token_ids=(-1,)), "token id -1"),
        (PROMPT, SamplingParams(max_tokens=4, banned_token_ids=range(113)), "every token"),
        ([], SamplingParams(max_tokens=4), "prompt is empty"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once_in_one_line(folder, prompt, params, named):
    engine = Engine(folder, EngineConfig(page_size=4, num_pages=32))
    with pytest.raises(RequestError, match=named) as caught:
        engine.add_request(prompt, params)
    assert "\n" not in str(caught.value)
    assert not engine.has_work


def test_wrong_number_of_parameters_is_refused(engine):
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        engine.generate([PROMPT], [LONG, LONG])


def test_settings_that_cannot_work_are_named(folder, monkeypatch):
    with pytest.raises(EngineError, match="device"):
        Engine(folder, EngineConfig(device="abacus"))
    with pytest.raises(EngineError, match=r"num_pages 1000000000 .* at most"):
        Engine(folder, EngineConfig(num_pages=10**9))
    monkeypatch.setattr("rollout.memory.free_memory", lambda device: 5000)
    with pytest.raises(EngineError, match="memory_share"):
        Engine(folder)


def test_pages_are_capped_by_free_memory(folder, monkeypatch):
    assert Engine(folder).scheduler.pool.num_pages == 128 * 512 // 16
    page = 2 * 2 * 16 * 2 * 16 * 4
    monkeypatch.setattr("rollout.memory.free_memory", lambda device: 100 * page)
    assert Engine(folder).scheduler.pool.num_pages == 40


def test_load_weights_changes_what_is_drawn_and_proves_it(engine):
    before = engine.generate([PROMPT], LONG)[0][0]
    manifest, tensors = changed_weights(engine, version=3)
    engine.load_weights(manifest, tensors)
    assert engine.version == 3
    assert engine.weights_digest() == manifest.digest
    assert engine.stats()["cached_pages"] == 0
    after = engine.generate([PROMPT], LONG)[0][0]
    assert after.policy_versions == (3,) * 40
    assert after.logprobs != before.logprobs


def test_weights_that_do_not_fit_change_nothing(engine):
    manifest, tensors = changed_weights(engine, version=3)
    digest = engine.weights_digest()
    with pytest.raises(WeightsError, match="missing"):
        engine.load_weights(manifest, dict(list(tensors.items())[1:]))
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    with pytest.raises(WeightsError, match=r"bfloat16.*float32"):
        engine.load_weights(make_manifest(3, halves), halves)
    assert (engine.version, engine.weights_digest()) == (0, digest)
    assert len(engine.generate([PROMPT], LONG)[0]) == 1


def test_weights_damaged_on_the_way_stop_the_engine_until_good_ones_come(engine):
    manifest, tensors = changed_weights(engine, version=3)
    engine.add_request(PROMPT, LONG)
    damaged = dict(tensors)
    damaged["model.norm.weight"] = tensors["model.norm.weight"].nextafter(torch.tensor(9.0))
    with pytest.raises(WeightsError, match="version 3: digest"):
        engine.load_weights(manifest, damaged)
    with pytest.raises(RuntimeError, match="load_weights again"):
        engine.step()
    engine.load_weights(manifest, tensors)
    engine.step()
    assert engine.scheduler.running[0].versions == [3]


def test_weights_that_are_not_finite_are_reported(engine):
    good = changed_weights(engine, version=4)
    tensors = {name: view.clone() for name, view in engine.weights.views().items()}
    tensors["model.norm.weight"][3] = math.nan
    engine.load_weights(make_manifest(3, tensors), tensors)
    with pytest.raises(FloatingPointError, match="version 3"):
        engine.generate([PROMPT], LONG)
    engine.scheduler.check()
    engine.load_weights(*good)
    assert engine.generate([PROMPT], LONG)[0][0].policy_versions == (4,) * 40


def test_a_forward_that_fails_can_be_tried_again(engine, monkeypatch):
    expected = engine.generate([PROMPT], LONG)[0][0]
    engine.add_request(PROMPT, LONG)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("rollout.engine.sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.scheduler.check()
    done = []
    while engine.has_work:
        done += engine.step()
    assert done[0].logprobs == expected.logprobs


def test_stats_count(engine):
    engine.generate([PROMPT * 2], replace(LONG, n=4))
    stats = engine.stats()
    assert stats["drawn_tokens"] == 160
    assert stats["finished"] == 4
    assert stats["running"] == stats["waiting"] == stats["held_pages"] == stats["preempted"] == 0
    # Three of four samples find 8 of their prompt's 10 tokens.
    assert stats["cache_hit_rate"] == 24 / 40
    assert stats["computed_tokens"] == 10 + 3 * 2 + 4 * 39
    assert stats["free_pages"] + stats["cached_pages"] == engine.scheduler.pool.num_pages
    assert stats["drawn_tokens_per_second"] > 0


def test_trace_refuses_a_position_outside_the_completion(engine):
    for position in (0, 4, 8):
        with pytest.raises(RequestError, match="position"):
            engine.trace(PROMPT, [7, 8, 9], position)


def test_ordinary_engine_draws_from_the_kept_set_and_renormalises(folder):
    engine = Engine(folder, EngineConfig(exact=False))
    one = engine.generate([PROMPT], replace(LONG, top_k=1))[0][0]
    greedy = engine.generate([PROMPT], replace(LONG, temperature=0))[0][0]
    assert one.token_ids == greedy.token_ids
    assert one.logprobs == (0.0,) * 40


def test_actor_answers_as_its_engine(folder, engine):
    actor = RolloutActor(folder, EngineConfig(), num_threads=torch.get_num_threads())
    expected = engine.generate([PROMPT], LONG)
    assert actor.generate([PROMPT], LONG) == expected
    manifest, tensors = changed_weights(engine, version=2)
    actor.load_weights(manifest, tensors)
    assert (actor.version(), actor.weights_digest()) == (2, manifest.digest)
    assert actor.stats()["finished"] == 1
    assert "logprob" in actor.trace(PROMPT, [7, 8], 6)


def test_checking_a_request_does_not_look_at_every_token_id() -> None:
    """With so many ids it would not end."""
    limits = Limits(1 << 40, 1 << 40, 2048, (), None)
    params = SamplingParams(max_tokens=4, banned_token_ids=(7, 9))
    assert checked_request("name", PROMPT, params, None, limits).prompt_ids == tuple(PROMPT)
