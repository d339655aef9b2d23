"""Behaviour of a data-parallel group: two processes take the step that one would take."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from train_samples import drawn, nudged, unscored

from trainer import ParityError, Trainer, TrainerConfig

SETTINGS = {"learning_rate": 1e-2, "beta": 0.1, "aggregation": "sequence"}


def batch(trainer: Trainer) -> list:
    return drawn(trainer, unscored(7, seed=trainer.steps))


def take_steps(trainer: Trainer, rank: int, count: int) -> dict:
    """Two steps on this rank's share, then one with a differing token on the last rank."""
    lines = []
    for _ in range(2):
        whole = batch(trainer)
        share = whole[:3] if rank == 0 else whole[3:]
        lines.append(trainer.step(share if count > 1 else whole).metrics)
    whole = batch(trainer)
    whole[5] = nudged(whole[5], 0, -1.0)
    share = whole[:3] if rank == 0 else whole[3:]
    try:
        trainer.step(share if count > 1 else whole)
    except ParityError as error:
        first = error.first.request_id if error.first else None
        return {
            "lines": lines,
            "digest": trainer.publish()[0].digest,
            "error": [error.report.tokens_differing, error.report.tokens_compared],
            "first": first,
        }
    raise AssertionError("the differing token was not seen")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_group(folder: Path, count: int) -> list[dict]:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env=os.environ
            | group
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_two_ranks_take_the_step_of_one(tmp_path):
    from toy_models import toy_folder  # not at the top: the ranks do without transformers

    folder = toy_folder(tmp_path / "llama")
    one = take_steps(Trainer(folder, TrainerConfig(**SETTINGS)), 0, 1)
    first, second = run_group(folder, 2)
    assert first["lines"] == second["lines"] and first["digest"] == second["digest"]
    for mine, whole in zip(first["lines"], one["lines"], strict=True):
        assert mine == pytest.approx(whole, rel=1e-4, abs=1e-7)
        for name in ("parity/tokens_compared", "num_tokens", "parity/tokens_differing"):
            assert mine[name] == whole[name]
    assert first["error"] == second["error"] == one["error"]
    assert [first["first"], second["first"], one["first"]] == [None, "request-5", "request-5"]


if __name__ == "__main__":
    config = TrainerConfig(**SETTINGS)
    group_size, own_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    own = Trainer(sys.argv[1], config)
    print(json.dumps(take_steps(own, own_rank, group_size)))
    own.ranks.wait()
