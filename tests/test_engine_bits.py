"""Bits of the engine: a request gives the tokens and float32 logprobs that it gives alone.

Every scenario is compared with one request at a time in an engine of its own, with torch.equal.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import tally
import torch
from bits import PLACE
from toy_models import toy_folder

from rollout import Engine, EngineConfig, SamplingParams
from shared_ops.model.weights import load_folder, make_manifest

FAMILIES = ("llama", "qwen2", "qwen3")
SHARED = [1, 40, 41, 42, 43, 44, 45, 46]
# Lengths around multiples of the page sizes in use, and prompts that begin alike.
PROMPTS = [
    [5],
    [1, 7, 8],
    SHARED,
    [*SHARED, 9, 10],
    [*SHARED, *range(50, 58)],
    [*SHARED, *range(50, 60)],
    [1, *range(20, 70)],
    [1, *range(20, 84)],
]
TEMPERATURES = (1.0, 0.7, 0.0, 1.3)
CATALOGUE = [
    (prompt, SamplingParams(max_tokens=14, temperature=TEMPERATURES[index % 4], n=2, seed=index))
    for index, prompt in enumerate(PROMPTS)
]
SCENARIOS = {
    "batch mates": {},
    "one token of prefill a step": {"prefill_chunk": 1},
    "chunks of seven": {"prefill_chunk": 7},
    "small batches": {"max_batch_tokens": 5},
    "two sequences at a time": {"max_sequences": 2},
    "pages of one": {"page_size": 1},
    "pages of three": {"page_size": 3},
    "pages of 128": {"page_size": 128},
    "no prefix cache": {"prefix_cache": False},
    "no prefix cache, chunks": {"prefix_cache": False, "prefill_chunk": 16, "page_size": 8},
    "page pressure": {"page_size": 4, "num_pages": 24},
    "page pressure without cache": {"page_size": 2, "num_pages": 42, "prefix_cache": False},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        family: toy_folder(tmp_path_factory.mktemp(family) / "model", family) for family in FAMILIES
    }


@pytest.fixture(scope="module")
def alone(folders):
    """alone(family, dtype) -> completions of the catalogue, each sample in an engine of its own."""

    @cache
    def complete(family: str = "llama", dtype: str = "float32"):
        return [
            [
                Engine(folders[family], EngineConfig(dtype=dtype)).generate(
                    [prompt], one_sample(params, index)
                )[0][0]
                for index in range(params.n)
            ]
            for prompt, params in CATALOGUE
        ]

    return complete


def one_sample(params: SamplingParams, index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        first_sample=index,
    )


def count_differing(groups, expected) -> tuple[int, int]:
    """Tokens compared, and those whose id or logprob bits differ; a missing one counts as both."""
    compared = differing = 0
    for group, wanted in zip(groups, expected, strict=True):
        for one, other in zip(group, wanted, strict=True):
            assert one.sample_index == other.sample_index
            length = max(len(one.token_ids), len(other.token_ids))
            left, right = (
                torch.tensor([*zip(c.token_ids, bits(c.logprobs), strict=True)])
                for c in (one, other)
            )
            compared += length
            shorter = min(len(left), len(right))
            same = (left[:shorter] == right[:shorter]).all(1).sum().item()
            differing += length - same
    return compared, differing


def bits(logprobs) -> list[int]:
    values = torch.tensor(logprobs, dtype=torch.float32)
    assert torch.isfinite(values).all()
    assert values.tolist() == list(logprobs), "a logprob is no float32 value"
    return values.view(torch.int32).tolist()


def assert_same(groups, expected, at_least: int = 150) -> None:
    compared, differing = count_differing(groups, expected)
    tally.add(compared, differing, PLACE)
    assert compared >= at_least
    assert differing == 0, f"{differing} of {compared} tokens differ"


def generate_all(engine: Engine, order=None):
    order = list(range(len(CATALOGUE))) if order is None else order
    prompts, params = zip(*(CATALOGUE[index] for index in order), strict=True)
    groups = engine.generate(prompts, params)
    engine.scheduler.check()
    back = sorted(range(len(order)), key=order.__getitem__)
    return [groups[index] for index in back]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_limits_pages_and_cache_change_no_bit(folders, alone, scenario):
    engine = Engine(folders["llama"], EngineConfig(**SCENARIOS[scenario]))
    assert_same(generate_all(engine), alone())
    if "pressure" in scenario:
        assert engine.stats()["preempted"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_dtype(folders, alone, family, dtype):
    config = EngineConfig(dtype=dtype, page_size=4, num_pages=32, prefill_chunk=10)
    engine = Engine(folders[family], config)
    assert_same(generate_all(engine), alone(family, dtype))
    assert engine.stats()["preempted"] > 0


def test_a_second_time_from_the_cache(folders, alone):
    engine = Engine(folders["llama"], EngineConfig(page_size=4))
    generate_all(engine)
    before = engine.scheduler.counters["cached_tokens"]
    assert_same(generate_all(engine), alone())
    assert engine.scheduler.counters["cached_tokens"] - before > 200


def test_order_of_submission(folders, alone):
    engine = Engine(folders["llama"], EngineConfig(page_size=8))
    assert_same(generate_all(engine, order=[5, 2, 7, 0, 3, 6, 1, 4]), alone())


def test_n_samples_are_n_requests_with_first_sample(folders):
    prompt = PROMPTS[5]
    eight = Engine(folders["llama"]).generate([prompt], SamplingParams(max_tokens=24, n=8))[0]
    params = [SamplingParams(max_tokens=24, first_sample=index) for index in range(8)]
    ones = Engine(folders["llama"]).generate([prompt] * 8, params)
    assert_same([[one] for one in eight], ones)
    assert len({one.token_ids for one in eight}) == 8


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(folders, alone, seed):
    """Arrivals between steps, aborts, and the same weights loaded anew, under random limits."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    config = EngineConfig(
        page_size=page_size,
        num_pages=80 // page_size + rng.randrange(30),
        max_batch_tokens=rng.choice([3, 17, 64]),
        max_sequences=rng.randrange(1, 9),
        prefill_chunk=rng.choice([2, 9, 64]),
        prefix_cache=rng.random() < 0.8,
    )
    engine = Engine(folders["llama"], config)
    tensors = {name: view.clone() for name, view in engine.weights.views().items()}
    manifest = make_manifest(0, tensors)
    left = rng.sample(range(len(CATALOGUE)), 5)
    names, done = {}, []
    while left or engine.has_work:
        if left and rng.random() < 0.3:
            index = left.pop()
            names[engine.add_request(*CATALOGUE[index])] = index
        if rng.random() < 0.04:
            engine.load_weights(manifest, tensors)
        if names and rng.random() < 0.02:
            done += engine.abort(rng.choice(list(names)))
        done += engine.step()
        engine.scheduler.check()
    ended = [one for one in done if one.finish_reason != "abort"]
    cut = [one for one in done if one.finish_reason == "abort" and one.token_ids]
    wanted = [alone()[names[one.request_id]][one.sample_index] for one in ended]
    assert_same([[one] for one in ended], [[one] for one in wanted], at_least=30)
    for one in cut:
        whole = alone()[names[one.request_id]][one.sample_index]
        assert one.token_ids == whole.token_ids[: len(one.token_ids)]
        assert bits(one.logprobs) == bits(whole.logprobs[: len(one.logprobs)])
    assert len(done) == 2 * len(names)
    assert engine.scheduler.pool.available == config.num_pages


class PackedKV:
    """The trainer's way: one whole sequence, no pages."""

    def __init__(self, ops, length):
        self.ops, self.length = ops, length

    def attend(self, layer, q_THE, k_TKE, v_TKE):
        return self.ops.packed_attention(q_THE, k_TKE, v_TKE, [0, self.length])


def packed_logprobs(engine: Engine, completion, temperature: float) -> torch.Tensor:
    tokens_T = torch.tensor([*completion.prompt_ids, *completion.token_ids])
    hidden_TD = engine.model(
        tokens_T, torch.arange(len(tokens_T)), PackedKV(engine.ops, len(tokens_T))
    )
    first = len(completion.prompt_ids)
    temperature_T = torch.full((len(completion.token_ids),), temperature or 1.0)
    logprobs_T, _ = engine.ops.token_logprobs(
        hidden_TD[first - 1 : -1],
        engine.model.head_VD,
        tokens_T[first:],
        temperature_T,
        engine.vocab_limit,
    )
    return logprobs_T


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_path_logprobs_are_those_of_one_packed_forward(folders, alone, family):
    engine, compared = Engine(folders[family]), 0
    for group, (_, params) in zip(alone(family), CATALOGUE, strict=True):
        for one in group:
            drawn = torch.tensor(one.logprobs)
            assert torch.equal(drawn, packed_logprobs(engine, one, params.temperature))
            compared += len(drawn)
    assert compared >= 150


def test_new_weights_in_flight_give_the_logprobs_of_the_version_that_each_token_names(folders):
    """Old tokens stay; their KV is recomputed, so later logprobs are those of the new weights."""
    engine, old = Engine(folders["llama"], EngineConfig(page_size=4)), Engine(folders["llama"])
    new = Engine(folders["llama"])
    generator = torch.Generator().manual_seed(3)
    for view in new.weights.views().values():
        view.mul_(1 + 0.05 * torch.rand(view.shape, generator=generator))
    for prompt in (PROMPTS[2], PROMPTS[6]):
        engine.add_request(prompt, SamplingParams(max_tokens=24, n=2, ignore_eos=True))
    done = [one for _ in range(9) for one in engine.step()]
    assert not done
    tensors = new.weights.views()
    engine.load_weights(make_manifest(5, tensors), tensors)
    engine.scheduler.check()
    while engine.has_work:
        done += engine.step()
    assert len(done) == 4
    for one in done:
        first = one.policy_versions.index(5)
        assert 0 < first < 24
        assert one.policy_versions == (0,) * first + (5,) * (24 - first)
        drawn, before, after = (
            torch.tensor(one.logprobs),
            packed_logprobs(old, one, 1.0),
            packed_logprobs(new, one, 1.0),
        )
        assert torch.equal(drawn[:first], before[:first])
        assert torch.equal(drawn[first:], after[first:])
        assert not torch.equal(before, after)


def test_trace_ends_in_the_bits_that_were_drawn_with(folders, alone):
    engine = Engine(folders["qwen3"], EngineConfig(page_size=4, prefill_chunk=5))
    for (_, params), group in zip(CATALOGUE, alone("qwen3"), strict=True):
        one = group[0]
        for offset in (0, len(one.token_ids) - 1):
            position = len(one.prompt_ids) + offset
            rows = engine.trace(one.prompt_ids, one.token_ids, position, params.temperature)
            assert rows["logprob"].item() == one.logprobs[offset]
            assert next(iter(rows)) == "embedding"
            assert list(rows)[-3:] == ["final rmsnorm", "logits", "logprob"]


@pytest.mark.usefixtures("reordered")
def test_ops_in_another_order_do_differ(folders):
    """The negative control: the comparison above sees sums whose order follows from the batch."""
    config = EngineConfig(exact=False)
    expected = [
        Engine(folders["llama"], config).generate([prompt], params)[0]
        for prompt, params in CATALOGUE
    ]
    compared, differing = count_differing(
        generate_all(Engine(folders["llama"], EngineConfig(exact=False, prefill_chunk=7))), expected
    )
    assert compared >= 150
    assert differing > 0


def test_loaded_folder_is_the_published_one(folders):
    engine = Engine(folders["llama"])
    config = engine.model_config
    weights = load_folder(folders["llama"], config, torch.float32, "cpu")
    assert make_manifest(0, weights.views()).digest == engine.weights_digest()
