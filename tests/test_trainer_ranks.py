"""Behaviour of a data-parallel group: two processes take the step that one would take."""

from __future__ import annotations

import json
import sys

import pytest
from rank_groups import own_place, run_group
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


def test_two_ranks_take_the_step_of_one(tmp_path):
    from toy_models import toy_folder  # not at the top: the ranks do without transformers

    folder = toy_folder(tmp_path / "llama")
    one = take_steps(Trainer(folder, TrainerConfig(**SETTINGS)), 0, 1)
    first, second = run_group(__file__, 2, folder)
    assert first["lines"] == second["lines"] and first["digest"] == second["digest"]
    for mine, whole in zip(first["lines"], one["lines"], strict=True):
        assert mine == pytest.approx(whole, rel=1e-4, abs=1e-7)
        for name in ("parity/tokens_compared", "num_tokens", "parity/tokens_differing"):
            assert mine[name] == whole[name]
    assert first["error"] == second["error"] == one["error"]
    assert [first["first"], second["first"], one["first"]] == [None, "request-5", "request-5"]


if __name__ == "__main__":
    config = TrainerConfig(**SETTINGS)
    own_rank, group_size = own_place()
    own = Trainer(sys.argv[1], config)
    print(json.dumps(take_steps(own, own_rank, group_size)))
    own.ranks.wait()
