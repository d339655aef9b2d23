"""Bits of kept sets and biases on a GPU: the engine's logprobs against the trainer's, gradients."""

from __future__ import annotations

import pytest
import torch
from bits import differing
from gpu import HALVES, needs_gpu
from test_engine_sampling import PROMPTS, SETTINGS, as_sample
from toy_models import toy_folder

from rollout import Engine, EngineConfig
from trainer import Trainer, TrainerConfig

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("gpu_sampling") / "model")


@HALVES
@pytest.mark.parametrize("setting", SETTINGS)
def test_trainer_has_the_bits_that_were_drawn_with(folder, setting, dtype):
    name, params = str(dtype).removeprefix("torch."), SETTINGS[setting]
    engine = Engine(folder, EngineConfig(device="cuda", dtype=name, page_size=4))
    trainer = Trainer(folder, TrainerConfig(device="cuda", dtype=name))
    ones = [one for group in engine.generate(PROMPTS, params) for one in group]
    drawn_N = torch.tensor([x for one in ones for x in one.logprobs])
    samples = [as_sample(one, params.temperature) for one in ones]
    assert len(drawn_N) > 100
    assert differing(torch.cat(trainer.logprobs(samples)), drawn_N) == 0
    alone = Engine(folder, EngineConfig(device="cuda", dtype=name, max_sequences=1))
    again = [one for prompt in PROMPTS for one in alone.generate([prompt], params)[0]]
    assert [one.kept_thresholds for one in again] == [one.kept_thresholds for one in ones]
    assert differing(torch.tensor([x for one in again for x in one.logprobs]), drawn_N) == 0
    if params.temperature:
        stats = trainer.step(samples)
        assert stats.tokens_differing == 0 and stats.grad_norm > 0
