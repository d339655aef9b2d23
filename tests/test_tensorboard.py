"""Behaviour of the TensorBoard log; the first test needs its package."""

import sys

import pytest
from test_runlog import record

from recipes.runlog import RunLog
from recipes.tensorboard_log import TensorboardError


def test_tensorboard_gets_every_number_and_hides_what_a_resumed_run_repeats(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, 4, tensorboard=True) as log:
        for step in (1, 2, 3):
            record(log, step, reward=float(step))
    with RunLog(tmp_path, 4, tensorboard=True, resume_step=1) as log:
        for step in (2, 3):
            record(log, step, reward=10.0 * step)
        log.evaluation(3, {"eval/sampled_strict": 0.5})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("reward")] == [(1, 1), (2, 20), (3, 30)]
    assert [one.value for one in found.Scalars("parity/tokens_differing")] == [0.0] * 3
    assert [one.value for one in found.Scalars("eval/sampled_strict")] == [0.5]


def test_a_missing_tensorboard_names_the_flag(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TensorboardError, match=r"--tensorboard: .*pip install tensorboard"):
        RunLog(tmp_path, 1, tensorboard=True)
