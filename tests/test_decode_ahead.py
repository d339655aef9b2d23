"""Decode steps launched ahead of their commit, with token feedback: bits of every token.

The engine's launcher runs here without a captured graph, on the CPU, so that its inputs, the
feedback of tokens, padding rows and the planner's lag are checked without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from engine_runs import LIMITS, served
from toy_models import toy_folder

from rollout import Engine, EngineConfig, SamplingParams
from rollout.ahead import is_plain
from rollout.graphs import DecodeGraphs, bytes_of, carve, padded
from shared_ops.model.weights import load_folder, make_manifest


class EagerGraphs(DecodeGraphs):
    """Runs a step where a GPU would replay one."""

    replays = 0

    def _prepare(self, key) -> None:
        """Nothing to capture."""

    def _replay(self, key) -> None:
        rows, bound = key
        inputs, _ = carve(self._inputs, rows, self._pages(bound))
        self._step(inputs, inputs.contexts_B.tolist())
        self.replays += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("ahead") / "model", "qwen3")


def engine_of(folder, ahead: bool, **limits) -> Engine:
    engine = Engine(folder, EngineConfig(**limits))
    if ahead:
        num_pages = engine.scheduler.pool.num_pages
        engine.kv = engine._new_kv(num_pages + 1)
        engine.graphs = EagerGraphs(
            engine.config, engine.model, engine.kv, engine.vocab_limit, spare_page=num_pages
        )
    return engine


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_steps_launched_ahead_give_the_bits_of_steps_in_turn(folder, limits) -> None:
    wanted = served(engine_of(folder, ahead=False, **limits))
    engine = engine_of(folder, ahead=True, **limits)
    assert served(engine) == wanted
    assert isinstance(engine.graphs, EagerGraphs) and engine.graphs.replays > 20
    assert sum(len(tokens) for tokens, _ in wanted.values()) > 100
    if "num_pages" in limits:
        assert engine.stats()["preempted"] > 0


def test_padding_rows_touch_the_spare_page_only(folder) -> None:
    engine = engine_of(folder, ahead=True, page_size=4, num_pages=64)
    for layer in engine.kv.layers:
        layer.fill_(7.0)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]
    engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    used = 3 * 3
    touched = [(layer != 7.0).any(0).flatten(1).any(1) for layer in engine.kv.layers]
    assert all(pages[64] and int(pages[:64].sum()) <= used for pages in touched)


def test_a_weight_update_lands_the_step_under_way_first(folder) -> None:
    source = load_folder(folder, Engine(folder).model_config, torch.float32, "cpu").views()
    other = {name: value * 1.1 for name, value in source.items()}
    given = {}
    for ahead in (False, True):
        engine = engine_of(folder, ahead)
        engine.add_request([5, 6, 7, 8], SamplingParams(max_tokens=20, ignore_eos=True))
        done = []
        while len(engine.scheduler.running) == 0 or len(engine.scheduler.running[0].logprobs) < 9:
            done += engine.step()
        sample = engine.scheduler.running[0]
        drawn = len(sample.logprobs)
        engine.load_weights(make_manifest(3, other), other)
        landed = len(sample.logprobs)
        assert landed == drawn + ahead and engine._flight is None
        while engine.has_work:
            done += engine.step()
        given[ahead] = (done[0], landed)
    versions = given[True][0].policy_versions
    assert versions == (0,) * given[True][1] + (3,) * (20 - given[True][1])
    same = given[False][1]
    assert given[True][0].token_ids[:same] == given[False][0].token_ids[:same]


def test_an_aborted_request_leaves_the_step_under_way(folder) -> None:
    engine = engine_of(folder, ahead=True)
    stays, goes = (
        engine.add_request([5, 6, last], SamplingParams(max_tokens=12, ignore_eos=True))
        for last in (7, 8)
    )
    for _ in range(4):
        engine.step()
    assert engine._flight is not None
    (aborted,) = engine.abort(goes)
    assert aborted.finish_reason == "abort"
    done = []
    while engine.has_work:
        done += engine.step()
        engine.scheduler.check()
    alone = Engine(folder).generate([[5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert [one.request_id for one in done] == [stays]
    assert (done[0].token_ids, done[0].logprobs) == (alone[0][0].token_ids, alone[0][0].logprobs)


def test_what_an_environment_appends_is_seen_by_the_step_after_next(folder) -> None:
    params = SamplingParams(max_tokens=40, n=4, stop_token_ids=range(40), ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9]]
    given = [
        engine_of(folder, ahead, page_size=4, num_pages=80).generate(
            prompts, params, environment=lambda one: (50, 51) if len(one.appended) < 3 else ()
        )
        for ahead in (False, True)
    ]
    assert given[0] == given[1]
    assert sum(len(one.appended) for group in given[1] for one in group) >= 16


def test_a_failed_request_leaves_the_step_under_way(folder) -> None:
    engine = engine_of(folder, ahead=True)
    engine.weights.views()["model.embed_tokens.weight"][7] = float("nan")
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    good, bad = engine.generate([[5, 6, 8], [5, 6, 7]], params, on_error="return")
    assert (good[0].finish_reason, bad[0].finish_reason) == ("length", "error")
    engine.scheduler.check()


def test_filters_are_not_plain() -> None:
    assert is_plain(SamplingParams(max_tokens=5, temperature=0.3, n=2, stop_token_ids=(4,)))
    assert not is_plain(SamplingParams(max_tokens=5, top_k=3))
    assert not is_plain(SamplingParams(max_tokens=5, top_p=0.9))


def test_padded_sizes_and_bytes() -> None:
    sizes = [padded(rows) for rows in range(1, 1025)]
    assert sizes == sorted(sizes) and all(s >= rows for rows, s in enumerate(sizes, 1))
    assert sorted(set(sizes))[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    for rows, pages in ((1, 1), (3, 7), (256, 64)):
        size = bytes_of(rows, pages)
        views, used = carve(torch.zeros(size, dtype=torch.uint8), rows, pages)
        assert used <= size and views.table_BP.shape == (rows, pages)
