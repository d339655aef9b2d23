"""The engine as an actor of a real Ray cluster: calls that overlap, weights in flight, streams.

Every completion is compared, bit for bit, with what its request gives alone in this process.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_alone import Alone, assert_as_alone
from toy_models import toy_folder

from recipes.runtime import _Remote, _RemoteSides, _runtime_env
from recipes.trainer_group import TrainerGroup
from rollout import Completion, EngineConfig, SamplingParams
from rollout.actor import AsyncRolloutActor, remote_class
from rollout.config import EngineError
from shared_ops.model.weights import make_manifest
from trainer.actor import remote_class as trainer_class

pytestmark = pytest.mark.ray

SHARED = [1, 40, 41, 42, 43, 44, 45, 46]
PROMPTS = ([5], SHARED, [*SHARED, 9], [*SHARED, *range(50, 58)], [1, *range(20, 45)], SHARED * 2)
SHORT = SamplingParams(max_tokens=24, n=2, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, n=2, ignore_eos=True)
TIGHT = EngineConfig(page_size=4, num_pages=100, max_sequences=3, prefill_chunk=3)
ASIDE = 60  # seconds that nothing here comes near


@pytest.fixture(scope="module")
def ray():
    import ray

    options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init("local", num_cpus=2, runtime_env=_runtime_env("local"), **options)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("ray-engine") / "model")


@pytest.fixture(scope="module")
def alone(folder):
    return Alone(folder)


@pytest.fixture(scope="module")
def served(ray, folder, alone):
    """An exact engine on few pages, and what a test does with it."""
    actor = remote_class(AsyncRolloutActor, max_concurrency=16, num_cpus=0.5)
    handle = actor.remote(str(folder), TIGHT, 1)

    def load(version: int, in_flight=None) -> list[Completion]:
        tensors = alone.weights.sets[version % 2]
        manifest = make_manifest(version, tensors)
        cut = ray.get(handle.load_weights.remote(manifest, tensors, in_flight), timeout=ASIDE)
        assert ray.get(handle.weights_digest.remote(), timeout=ASIDE) == manifest.digest
        return cut

    def busy() -> None:
        """Returns once it draws."""
        before = ray.get(handle.stats.remote())["drawn_tokens"]
        began = time.monotonic()
        while ray.get(handle.stats.remote())["drawn_tokens"] <= before:
            assert time.monotonic() - began < ASIDE

    load(2)
    return SimpleNamespace(handle=handle, load=load, busy=busy)


def compared(alone: Alone, groups, params: SamplingParams) -> int:
    assert all(len(group) == params.n for group in groups)
    return sum(assert_as_alone(alone, one, params) for group in groups for one in group)


def is_idle(ray, handle) -> bool:
    """Whether all it held is given back, within a while: an abort needs a step to end."""
    began = time.monotonic()
    while time.monotonic() - began < ASIDE:
        stats = ray.get(handle.stats.remote())
        if not (stats["running"] or stats["waiting"]):
            return stats["held_pages"] == 0
    return False


def test_calls_that_overlap_get_what_they_get_alone(ray, served, alone):
    calls = []
    for seed in range(3):
        params = replace(SHORT, seed=seed, top_p=1.0 if seed % 2 else 0.8)
        calls.append((served.handle.generate.remote(PROMPTS, params), params))
        served.busy()
    together = 0
    while len(ray.wait([call for call, _ in calls], num_returns=3, timeout=0)[0]) < 3:
        stats = ray.get(served.handle.stats.remote())
        together = max(together, stats["running"] + stats["waiting"])
    assert together > len(PROMPTS) * SHORT.n, "the calls did not overlap"
    assert sum(compared(alone, ray.get(call), params) for call, params in calls) > 800
    assert is_idle(ray, served.handle)


def test_the_comparison_sees_other_weights(ray, served, alone):
    """The control: tokens that claim the weights of another version."""
    (group,) = ray.get(served.handle.generate.remote([SHARED], SHORT))
    claimed = [replace(one, policy_versions=(3,) * len(one.token_ids)) for one in group]
    with pytest.raises(AssertionError):
        compared(alone, [claimed], SHORT)


def test_weights_change_under_requests_that_go_on(ray, served, alone):
    served.load(4)
    call = served.handle.generate.remote(PROMPTS[:3], LONG)
    served.busy()
    served.load(5)
    served.busy()
    served.load(6)
    groups = ray.get(call, timeout=ASIDE)
    assert {v for group in groups for one in group for v in one.policy_versions} == {4, 5, 6}
    assert any(len(set(one.policy_versions)) > 1 for group in groups for one in group)
    assert compared(alone, groups, LONG) == 3 * LONG.n * LONG.max_tokens


def test_aborted_requests_are_told_and_can_be_resumed(ray, served, alone):
    served.load(8)
    call = served.handle.generate.remote(PROMPTS[:2], LONG)
    served.busy()
    cut = served.load(9, "abort")
    groups = ray.get(call, timeout=ASIDE)
    assert {one.finish_reason for group in groups for one in group} <= {"abort", "length"}
    told = [one for group in groups for one in group if one.finish_reason == "abort"]
    key = lambda one: (one.request_id, one.sample_index)  # noqa: E731
    assert told and sorted(told, key=key) == sorted(cut, key=key)
    compared(alone, groups, LONG)
    resumed = ray.get([served.handle.resume.remote(one, LONG) for one in told], timeout=ASIDE)
    for one, before in zip(resumed, told, strict=True):
        assert one.token_ids[: len(before.token_ids)] == before.token_ids
        assert (one.finish_reason, one.policy_versions[-1]) == ("length", 9)
        assert assert_as_alone(alone, one, LONG) == LONG.max_tokens


def test_an_exact_engine_refuses_to_keep_old_cache_and_goes_on(ray, served, alone):
    call = served.handle.generate.remote(PROMPTS, SHORT)
    with pytest.raises(EngineError, match="keep"):
        served.load(11, "keep")
    assert compared(alone, ray.get(call, timeout=ASIDE), SHORT) > 200


def test_an_ordinary_engine_keeps_old_cache(ray, folder, alone):
    actor = remote_class(AsyncRolloutActor, num_cpus=0.5)
    handle = actor.remote(str(folder), EngineConfig(exact=False, in_flight="keep"), 1)
    pieces = handle.stream.remote(SHARED, replace(LONG, n=1))
    ray.get(next(pieces))
    tensors = alone.weights.sets[1]
    ray.get(handle.load_weights.remote(make_manifest(1, tensors), tensors))
    *_, last = (ray.get(piece) for piece in pieces)
    assert last.completion.finish_reason == "length"
    assert set(last.completion.policy_versions) == {0, 1}
    ray.kill(handle)


def test_a_stream_comes_while_it_is_drawn(ray, served, alone):
    pieces = served.handle.stream.remote(SHARED, LONG)
    first = ray.get(next(pieces))
    assert first.completion is None and len(first.token_ids) < LONG.max_tokens
    got = [first, *(ray.get(piece) for piece in pieces)]
    for index in range(LONG.n):
        own = [piece for piece in got if piece.sample_index == index]
        whole = own[-1].completion
        assert tuple(token for piece in own for token in piece.token_ids) == whole.token_ids
        assert tuple(x for piece in own for x in piece.logprobs) == whole.logprobs
        assert assert_as_alone(alone, whole, LONG) == LONG.max_tokens


def test_a_cancelled_call_is_aborted_and_others_go_on(ray, served, alone):
    stays = served.handle.generate.remote(PROMPTS, SHORT)
    goes = served.handle.generate.remote([SHARED] * 4, replace(LONG, n=8))
    served.busy()
    ray.cancel(goes)
    with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError)):
        ray.get(goes, timeout=ASIDE)
    assert compared(alone, ray.get(stays, timeout=ASIDE), SHORT) > 200
    assert is_idle(ray, served.handle)


def test_an_environment_travels_and_runs_in_the_actor(ray, served, folder):
    params = replace(SHORT, max_tokens=60, stop_token_ids=range(3, 40))

    def answer(completion: Completion) -> tuple[int, ...]:
        return (50, 51, 52) if len(completion.appended) < 2 else ()

    (group,) = ray.get(served.handle.generate.remote([SHARED], params, answer), timeout=ASIDE)
    assert [len(one.appended) for one in group] == [2, 2]


def test_a_traced_token_has_its_logprob_while_others_are_drawn(ray, served):
    (group,) = ray.get(served.handle.generate.remote([SHARED], replace(SHORT, n=1)))
    call = served.handle.generate.remote(PROMPTS, SHORT)
    one, position = group[0], len(SHARED) + 11
    traced = ray.get(served.handle.trace.remote(one.prompt_ids, one.token_ids, position))
    assert traced["logprob"].item() == one.logprobs[11]
    ray.get(call, timeout=ASIDE)


def test_sides_that_cannot_share_go_through_host_memory_with_one_warning(ray, folder):
    engine = remote_class(num_cpus=0.5).remote(str(folder), TIGHT, 1)
    trainer = TrainerGroup([trainer_class(num_cpus=0.5).remote(str(folder), None, 1)])
    sides = _RemoteSides(_Remote(engine), trainer, shares=True)
    assert sides.rollout.gpu() == sides.trainer.gpu() == ""
    with pytest.warns(UserWarning, match=r"^weights go through host memory: .* not on one GPU$"):
        sides.sync_weights()
    assert not sides.shares and sides.rollout.weights_digest() == sides.trainer.weights_digest()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sides.sync_weights()
