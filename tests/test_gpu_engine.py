"""Bits of captured decode steps on a GPU: against steps that are launched op by op."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from engine_runs import LIMITS, served
from gpu import HALVES, module, needs_gpu, randn, same_bits
from toy_models import toy_folder

from rollout import Completion, Engine, EngineConfig, EngineError, SamplingParams
from shared_ops import attest_fused
from shared_ops.fused.op import can_be, is_allowed, may_draw
from shared_ops.model.config import ModelConfig
from shared_ops.model.weights import make_manifest

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return toy_folder(base / "qwen3", "qwen3", max_position_embeddings=4096)


def engine_of(folder, captured: bool, dtype: torch.dtype = torch.bfloat16, **limits) -> Engine:
    name = str(dtype).removeprefix("torch.")
    config = EngineConfig(device="cuda", dtype=name, cuda_graphs=captured, **limits)
    return Engine(folder, config)


def plain(groups: list[list[Completion]]) -> list[tuple]:
    return [(one.token_ids, one.logprobs) for group in groups for one in group]


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, 110) for _ in range(length)] for length in lengths]


@HALVES
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_captured_steps_give_the_bits_of_launched_ones(folder, limits, dtype) -> None:
    """Joins of prefills into running decodes, shared prefixes, greedy rows, preemption, pads."""
    wanted = served(engine_of(folder, False, dtype, **limits), turns=4)
    engine = engine_of(folder, True, dtype, **limits)
    assert served(engine, turns=4) == wanted
    assert engine.graphs is not None and len(engine.graphs._graphs) >= 2
    assert sum(len(tokens) for tokens, _ in wanted.values()) > 300
    if "num_pages" in limits:
        assert engine.stats()["preempted"] > 0


def test_no_bit_depends_on_the_pad(folder) -> None:
    """The same requests in steps of every padded size up to 72, against a step of their own."""
    prompts = random_prompts([1 + 7 * i % 90 for i in range(70)], seed=1)
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    alone = engine_of(folder, False, max_sequences=1)
    wanted = plain(alone.generate(prompts, params))
    engine = engine_of(folder, True)
    for count in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 70):
        assert plain(engine.generate(prompts[:count], params)) == wanted[:count]
    assert engine.graphs is not None
    assert {1, 2, 4, 8, 16, 24, 32, 40, 64, 72} <= {key[0] for key in engine.graphs._graphs}


@pytest.mark.parametrize("count", [2, 150])
def test_contexts_that_grow_past_a_chunk(folder, count) -> None:
    """From one class of contexts to the next, decode split between programs (2 rows) and not."""
    lengths = [1000 if index % 2 else 2030 for index in range(count)]
    prompts = random_prompts(lengths, seed=2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    given = [
        plain(engine_of(folder, captured, max_sequences=256).generate(prompts, params))
        for captured in (False, True)
    ]
    assert given[0] == given[1] and len(given[0]) == count


def test_captured_steps_see_new_weights(folder) -> None:
    given = []
    for captured in (False, True):
        engine = engine_of(folder, captured)
        views = engine.weights.views()
        other = {name: value * 1.25 for name, value in views.items()}
        prompts = random_prompts([3, 30, 77], seed=4)
        params = SamplingParams(max_tokens=30, ignore_eos=True, n=3)
        before = plain(engine.generate(prompts, params))
        engine.load_weights(make_manifest(1, other), other)
        after = plain(engine.generate(prompts, params))
        assert before != after
        given.append((before, after))
        if engine.graphs is not None:
            count = len(engine.graphs._graphs)
            plain(engine.generate(prompts, params))
            assert len(engine.graphs._graphs) == count
    assert given[0] == given[1]


@HALVES
@pytest.mark.parametrize("head", [16, 64, 80, 128])
def test_fused_launches_give_the_bits_of_the_ops_one_by_one(folder, head, dtype) -> None:
    config = replace(ModelConfig.from_folder(folder), hidden_size=8 * head, head_dim=head)
    assert can_be(attest_fused.widths_of(config, dtype))
    for pairs in (attest_fused.residuals, attest_fused.heads, attest_fused.gated):
        found = pairs(config, lambda *shape: randn(*shape, dtype=dtype))
        assert sum(same_bits(got, wanted) for got, wanted in found) > 1_000_000


@pytest.mark.parametrize("vocabulary", [130, 5003, 49152])
def test_scored_draws_give_the_bits_of_the_ops_one_by_one(vocabulary) -> None:
    compared, differing = 0, 0
    pairs = module("attest_logprob").draws(vocabulary, torch.Generator("cuda").manual_seed(1))
    for got, wanted in pairs:
        compared, differing = compared + got.numel(), differing + int((got != wanted).sum())
    assert compared >= 1_000_000 and differing == 0


def test_the_engine_takes_fused_launches_where_they_were_proved(folder) -> None:
    engine = engine_of(folder, True)
    x_TD = engine.weights.embed_VD[:3]
    assert not is_allowed(x_TD, 16), "gradients are enabled"
    assert may_draw(engine.model.head_VD)
    with torch.inference_mode():
        assert is_allowed(x_TD, 16) and not is_allowed(x_TD, 32)


def test_a_model_that_does_not_fit_is_refused(folder, monkeypatch) -> None:
    monkeypatch.setattr("rollout.memory.free_memory", lambda device: 5000)
    with pytest.raises(EngineError, match=r"^the model's weights take .* is free: use a smaller"):
        engine_of(folder, True)
