"""What each request gives alone: one at a time, with the weights changed after the same tokens."""

from __future__ import annotations

from functools import cache
from unittest import mock

import torch
from reordered import REORDERED

from rollout import Completion, Engine, EngineConfig, SamplingParams
from shared_ops.model.weights import make_manifest


class Weights:
    """Two sets of weights; even versions have the first, odd ones the second."""

    def __init__(self, engine: Engine) -> None:
        first = {name: view.clone() for name, view in engine.weights.views().items()}
        self.sets = [first, {name: tensor * 1.25 for name, tensor in first.items()}]

    def load(self, engine: Engine, version: int, in_flight="recompute") -> list[Completion]:
        tensors = self.sets[version % 2]
        return engine.load_weights(make_manifest(version, tensors), tensors, in_flight)


def reordered_engine(folder, **settings) -> Engine:
    """Without contracts, on any device: torch's own ops may give a small model their bits."""
    config = EngineConfig(exact=False, cuda_graphs=False, **settings)
    with mock.patch("rollout.engine.sampler_ops", lambda exact, device: REORDERED):
        return Engine(folder, config)


class Alone:
    """One request at a time; runs are kept, as many schedules ask for the same ones."""

    def __init__(self, folder, **settings) -> None:
        limits = {"prefix_cache": False, "max_sequences": 1, "num_pages": 64, "cuda_graphs": False}
        self.engine = Engine(folder, EngineConfig(**limits, **settings))
        self.weights = Weights(self.engine)
        self.run = cache(self._run)

    def _run(self, prompt: tuple, params: SamplingParams, parities: tuple) -> Completion:
        """parities: of the version that draws each token; the last one also draws what follows."""
        engine = self.engine
        self.weights.load(engine, parities[0])
        name = engine.add_request(prompt, params)
        drawn = 0
        while True:
            if drawn and parities[min(drawn, len(parities) - 1)] != engine.version:
                self.weights.load(engine, parities[min(drawn, len(parities) - 1)])
            done = engine.step()
            if done:
                assert [one.request_id for one in done] == [name]
                return done[0]
            drawn += 1


def assert_as_alone(alone: Alone, one: Completion, params: SamplingParams) -> int:
    """torch.equal on tokens and float32 logprobs; a cut completion is a beginning. Their number."""
    count = len(one.token_ids)
    assert count == len(one.logprobs) == len(one.policy_versions)
    if not count:
        assert one.finish_reason == "abort"
        return 0
    changes = {"n": 1, "first_sample": one.sample_index}
    single = SamplingParams(**{**vars(params), **changes})
    parities = tuple(version % 2 for version in one.policy_versions)
    whole = alone.run(one.prompt_ids, single, parities)
    if one.finish_reason != "abort":
        assert (len(whole.token_ids), whole.finish_reason) == (count, one.finish_reason)
    assert torch.equal(torch.tensor(one.token_ids), torch.tensor(whole.token_ids[:count]))
    drawn, wanted = (torch.tensor(c.logprobs[:count], dtype=torch.float32) for c in (one, whole))
    assert drawn.isfinite().all()
    assert one.kept_thresholds == whole.kept_thresholds[:count]
    assert torch.equal(drawn.view(torch.int32), wanted.view(torch.int32))
    return count
