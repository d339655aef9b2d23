"""Behaviour: torch's global settings are refused in one line, in the engine and in the trainer."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from bits import threads
from toy_models import toy_folder

from rollout import Engine, EngineConfig, SamplingParams
from shared_ops.numerics import NumericsError, require_plain_numerics
from trainer import Trainer, TrainerConfig, TrainSample

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=12, n=3, seed=5)


@contextmanager
def _default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def _flushed():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


@contextmanager
def _precision():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextmanager
def _onednn_in_bf16():
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


SETTINGS = {
    "another default dtype": (_default_dtype, "default dtype is torch.float64: set it back with"),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "autocast is on for cpu: call the engine and the trainer outside",
    ),
    "flush to zero": (_flushed, "flushed to zero in this thread: call torch.set_flush_denormal"),
    "matmul precision": (
        _precision,
        "products of float32 are computed in bf16 here: set it back with",
    ),
    "oneDNN in bf16": (
        _onednn_in_bf16,
        "products of float32 are computed in bf16 here: .* if that was used",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("toy") / "model")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_switched_on_in_mid_run_is_refused_and_undone(name, folder):
    setting, message = SETTINGS[name]
    engine, trainer = Engine(folder, EngineConfig()), Trainer(folder, TrainerConfig())
    ((completion, *_),) = engine.generate([[1, 2, 3]], PARAMS)
    samples = [TrainSample.of(completion, advantage=1.0)]
    with setting():
        for call in (
            lambda: engine.generate([[1, 2, 3]], PARAMS),
            lambda: trainer.logprobs(samples),
            lambda: trainer.step(samples),
            lambda: Engine(folder, EngineConfig()),
            lambda: Trainer(folder, TrainerConfig()),
        ):
            with pytest.raises(NumericsError, match=message):
                call()
    ((again, *_),) = engine.generate([[1, 2, 3]], PARAMS)
    assert again.logprobs == completion.logprobs
    assert trainer.step(samples).tokens_differing == 0


def test_nothing_is_refused_as_things_are():
    require_plain_numerics(CPU)


def test_the_number_of_threads_may_change_in_mid_run(folder):
    engine, trainer = Engine(folder, EngineConfig()), Trainer(folder, TrainerConfig())
    drawn = []
    for count in (1, 3, 2, 8):
        with threads(count):
            ((*completions,),) = engine.generate([[4, 5, 6, 7]], PARAMS)
            drawn.append([(one.token_ids, one.logprobs) for one in completions])
        with threads(9 - count):
            samples = [TrainSample.of(one, advantage=1.0) for one in completions]
            for scored, one in zip(trainer.logprobs(samples), completions, strict=True):
                assert scored.tolist() == list(one.logprobs)
    assert len(drawn[0]) == 3 and drawn[1:] == drawn[:1] * 3
