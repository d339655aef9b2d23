"""The engine's benchmark: its mixed load and its comparison on a CPU, and its options."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_alone import reordered_engine
from gpu import needs_gpu
from toy_models import toy_folder

from benchmarks import mixed_load
from benchmarks.bench_engine import BIG, SMALL, Side, beginning, details_of, is_proved, parsed
from benchmarks.engine_bits import Bits, bits_of, by_ingredient, policy, total
from benchmarks.mixed_load import Mixture, require_all
from benchmarks.random_models import replace_files
from rollout import Completion, Engine, EngineConfig
from shared_ops.model.weights import make_manifest
from trainer.score import Scorer

MIXTURE = Mixture(requests=14, longest=330, flood=10, fewest=2, most=6, updates=1)
LIMITS = {"max_sequences": 10, "prefill_chunk": 140, "max_batch_tokens": 300, "num_pages": 45}
CPU = {"device": "cpu", "dtype": "float32"}
CUDA = pytest.param({"device": "cuda", "dtype": "bfloat16"}, marks=needs_gpu, id="cuda")
Run = tuple[list[Completion], mixed_load.Watch, dict[int, Scorer]]


def served(folder, engine: Engine) -> Run:
    place = engine.dtype, engine.device
    policies = {0: policy(folder, *place)[1]}

    def change(version: int) -> None:
        weights, policies[version] = policy(folder, *place, seed=version)
        engine.load_weights(make_manifest(version, weights.views()), weights.views())

    completions, watch = mixed_load.run(engine, MIXTURE, change)
    return completions, watch, policies


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("mixed") / "model", "qwen3")


@pytest.fixture(scope="module", params=[pytest.param(CPU, id="cpu"), CUDA])
def place(request):
    return request.param


@pytest.fixture(scope="module")
def run(folder, place) -> Run:
    with replace_files(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_load, "FLOOD_MORE", 70)
        return served(folder, Engine(folder, EngineConfig(**LIMITS, **place)))


def test_nothing_differs_in_a_load_with_everything_in_it(run):
    completions, watch, policies = run
    counts = require_all(watch, MIXTURE, completions)
    assert counts["smallest batch"] == 1 and counts["largest batch"] == LIMITS["max_sequences"]
    assert counts["longest prompt"] > LIMITS["prefill_chunk"] and counts["updates"] == 1
    bits = bits_of(policies, completions)
    assert total(bits) == Bits(sum(len(one.token_ids) for one in completions), 0, 0)
    parts = by_ingredient(watch, completions, bits)
    assert {"preempted", "prefix hits", "lived through an update"} <= parts.keys()
    assert all(part.compared > 0 == part.differing for part in parts.values())


def test_the_comparison_sees_ops_in_another_order_other_weights_and_nan(folder, place, run):
    with replace_files(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_load, "FLOOD_MORE", 0)
        completions, _, policies = served(folder, reordered_engine(folder, **LIMITS, **place))
    assert total(bits_of(policies, completions)).differing > 0
    completions, _, policies = run
    crossed = [one for one in completions if len(set(one.policy_versions)) == 2][:2]
    stale = total(bits_of({0: policies[0], 1: policies[0]}, crossed))
    late = sum(version for one in crossed for version in one.policy_versions)
    assert late / 2 < stale.differing <= late
    broken = replace(crossed[0], logprobs=(float("nan"), *crossed[0].logprobs[1:]))
    assert total(bits_of(policies, [broken]))[1:] == (1, 1)
    with pytest.raises(ValueError, match="no policy for versions"):
        bits_of({0: policies[0]}, crossed)


def test_a_load_without_an_ingredient_is_refused(run):
    completions, watch, _ = run
    short = mixed_load.Watch()
    short.counts, short.sizes = watch.counts.copy(), watch.sizes
    del short.counts["preempted"]
    with pytest.raises(RuntimeError, match="no preempted: it tests nothing"):
        require_all(short, MIXTURE, completions)


def test_prompts_and_bursts_are_what_the_mixture_says():
    mixture = Mixture(requests=500)
    asked = mixed_load.asked(mixture, vocabulary=1000)
    lengths = [len(one.prompt) for one in asked]
    assert {1, 16, 17, 128, 129, 512, 513, 2048} <= set(lengths) and max(lengths) == 2048
    assert asked == mixed_load.asked(mixture, vocabulary=1000)
    bursts = list(mixed_load.bursts(mixture))
    assert sum(count for count, _ in bursts) == len(asked) == 1012
    assert [count for count, _ in bursts][:8] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_options_of_the_benchmark():
    assert parsed([]).sides == (True, False) and parsed([]).works[0] == BIG
    assert parsed(["--exact", "on"]).sides == (True,)
    options = parsed(["--exact", "off", "--workloads", "2", "--mixed", "0"])
    assert (options.sides, options.works, options.mixed) == ((False,), [SMALL], 0)
    assert parsed(["--workloads", ""]).works == []
    for words in (["--exact-only"], ["--exact", "no"], ["--workloads", "3"]):
        with pytest.raises(SystemExit):
            parsed(words)


def test_what_counts_as_proved():
    def proved(exact: Bits, control: Bits, sides=(True, False)) -> bool:
        found = details_of(Side({}, {"w": exact}, {}), Side({}, {"w": control}, {}), {})
        return is_proved(found, sides)

    assert proved(Bits(100, 0, 0), Bits(10, 3, 0))
    assert not proved(Bits(100, 1, 0), Bits(10, 3, 0))
    assert not proved(Bits(0, 0, 0), Bits(10, 3, 0))
    assert not proved(Bits(100, 0, 0), Bits(10, 0, 0)), "the control must differ"
    assert proved(Bits(), Bits(10, 3, 0), sides=(False,))


def test_a_beginning_has_as_many_tokens_as_were_asked_for(run):
    completions = run[0]
    first = len(completions[0].token_ids)
    assert beginning(completions, 0) == []
    assert beginning(completions, first) == completions[:1]
    assert beginning(completions, first + 1) == completions[:2]
    assert beginning(completions, 1 << 40) == completions
