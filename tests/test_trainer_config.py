"""Behaviour: settings that cannot work are refused in one line that names them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from trainer import TrainerConfig, TrainSample
from trainer.config import TrainerConfigError, dapo, dr_grpo, grpo

BAD = [
    ({"mode": "exactly"}, "mode"),
    ({"loss": "ppo"}, "loss"),
    ({"aggregation": "mean"}, "aggregation"),
    ({"advantage": "best"}, "advantage"),
    ({"schedule": "step"}, "schedule"),
    ({"dtype": "fp8"}, "dtype"),
    ({"correction_level": "word"}, "correction_level"),
    ({"learning_rate": -1.0}, "learning_rate"),
    ({"learning_rate": float("nan")}, "learning_rate"),
    ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
    ({"beta1": 1.0}, "beta1"),
    ({"clip_low": 1.5}, "clip_low"),
    ({"dual_clip": 0.5}, "dual_clip"),
    ({"tis_cap": 0.0}, "tis_cap"),
    ({"mis_low": 5.0}, "mis_low"),
    ({"aggregation": "constant"}, "max_completion_tokens"),
    ({"schedule": "cosine"}, "total_steps"),
    ({"total_steps": 5, "warmup_steps": 6}, "warmup_steps"),
]


@pytest.mark.parametrize(("settings", "named"), BAD)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(TrainerConfigError, match=named) as caught:
        TrainerConfig(**settings)
    assert "\n" not in str(caught.value)


def test_presets_are_the_combinations_of_their_papers():
    assert (grpo().advantage, grpo().aggregation, grpo().clip_high) == ("group", "sequence", 0.2)
    doctor = dr_grpo(max_completion_tokens=64)
    assert (doctor.advantage, doctor.aggregation) == ("centered", "constant")
    assert (dapo().aggregation, dapo().clip_high, dapo().mask_truncated) == ("token", 0.28, True)
    assert grpo(learning_rate=0.5, clip_high=0.3).clip_high == 0.3


def test_every_setting_is_explained():
    text = (Path(__file__).parents[1] / "docs" / "trainer.md").read_text()
    names = [field.name for field in fields(TrainerConfig)]
    assert len(names) > 25
    assert not [name for name in names if f"`{name}`" not in text]


def test_settings_and_samples_need_no_torch():
    code = "import sys; from trainer import TrainerConfig, TrainSample; TrainerConfig()"
    code += "; import trainer.advantage; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"completion_ids": ()}, "completion_ids is empty"),
        ({"prompt_ids": ()}, "prompt_ids is empty"),
        ({"behaviour_logprobs": (-1.0,)}, "behaviour_logprobs has 1 entries for 2"),
        ({"policy_versions": (0, 0, 0)}, "policy_versions has 3 entries for 2"),
        ({"old_logprobs": (-1.0,)}, "old_logprobs has 1 entries for 2"),
        ({"advantage": float("nan")}, "advantage is nan"),
        ({"temperature": -0.5}, "temperature is -0.5"),
    ],
)
def test_samples_that_cannot_be_meant_are_refused(change, named):
    good = {
        "prompt_ids": (5,),
        "completion_ids": (6, 7),
        "behaviour_logprobs": (-1.0, -2.0),
        "advantage": 0.5,
        "policy_versions": (0, 0),
        "request_id": "r7",
    }
    assert TrainSample(**good).length == 2
    with pytest.raises(ValueError, match=named) as caught:
        TrainSample(**good | change)
    assert "'r7'" in str(caught.value)
