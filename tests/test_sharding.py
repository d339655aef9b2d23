"""Sharded training: three processes that each hold a third, and the bits of those that hold all.

Three, because a sum of two does not show its order.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_groups import own_place, run_group
from train_samples import drawn, nudged, unscored

from recipes.settings import RunConfig, SettingError
from trainer import LoraConfig, ParityError, Trainer, TrainerConfig
from trainer.config import TrainerConfigError
from trainer.packing import pack, split_samples

RANKS = 3
CASES = [("llama", "float32", 0.1), ("qwen3", "bfloat16", 0.0)]
WAYS = {
    "whole": {},
    "sharded": {"sharding": "full"},
    "recomputed": {"sharding": "full", "recompute": "full"},
    "ops one by one": {"recompute": "none"},
}
BOUNDS = (0, 6, 8, 9)  # rank r is given samples BOUNDS[r] to BOUNDS[r + 1]


def config_of(dtype: str, beta: float, **settings) -> TrainerConfig:
    common = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
    return TrainerConfig(dtype=dtype, beta=beta, micro_batch_tokens=45, **common, **settings)


def batch_of(trainer: Trainer) -> list:
    """Nine samples; of every second step some have no gradient, all those of the last rank too."""
    samples = drawn(trainer, unscored(9, seed=trainer.steps, longest=14))
    if trainer.steps % 2 == 0:
        return samples
    inert = (1, 6, 8)
    return [replace(s, advantage=0.0) if i in inert else s for i, s in enumerate(samples)]


def share(samples: list, rank: int) -> list:
    return samples[BOUNDS[rank] : BOUNDS[rank + 1]]


def sha(tensors) -> str:
    """Of the values' bytes; adding 0 makes a zero's sign plus."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update((tensor.detach().float() + 0.0).contiguous().numpy().tobytes())
    return digest.hexdigest()


def run(trainer: Trainer, rank: int, out: Path) -> dict:
    """First gradients; a step, two that are refused, one more; scores; a checkpoint."""
    gradients = trainer._accumulate(share(batch_of(trainer), rank))[1]
    told = {"gradients": sha(trainer._held.gathered(gradients)), "lines": []}
    told["held"] = sum(tensor.numel() for tensor in trainer._state_tensors().values())
    told["lines"].append(trainer.step(share(batch_of(trainer), rank)).metrics)
    wrong = batch_of(trainer)
    wrong[8] = nudged(wrong[8], 0, -1.0)
    told["refused"] = []
    for call in (trainer.with_old_logprobs, trainer.step):
        with pytest.raises(ParityError) as caught:
            call(share(wrong, rank))
        told["refused"].append(caught.value.report.tokens_differing)
    own = share(batch_of(trainer), rank)
    with pytest.raises(ValueError, match="samples is empty" if rank == 1 else "rank 1 was given"):
        trainer.step([] if rank == 1 else own)
    told["lines"].append(trainer.step(own).metrics)
    samples = unscored(5, seed=77)
    told["scores"] = sha(trainer.logprobs(samples))
    position = len(samples[0].prompt_ids)
    told["traced"] = trainer.trace(samples[0], position)["logprob"].item()
    told["scored"] = trainer.logprobs(samples[:1])[0][0].item()
    told["digest"] = trainer.publish()[0].digest
    trainer.save(out / f"rank-{rank}", {"rank": rank})
    trainer.ranks.wait()
    return told


def files(folder: Path) -> dict:
    digests = json.loads((folder / "digests.json").read_text())
    return {name: digest for name, digest in digests.items() if name != "state.json"}


def read_back(folder: Path, alone: Path, out: Path, config: TrainerConfig, rank: int) -> str:
    """A checkpoint of one process, loaded and written again by this group."""
    trainer = Trainer(folder, config)
    trainer.load(alone)
    trainer.save(out / "back" if rank == 0 else out / "never")
    return trainer.publish()[0].digest


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Model folders, what the ranks told of each case and way, and where they wrote."""
    from toy_models import toy_folder  # not at the top: the ranks do without transformers

    base = tmp_path_factory.mktemp("sharding")
    for family, dtype, beta in CASES:
        folder = toy_folder(base / family, family)
        alone = Trainer(folder, config_of(dtype, beta))
        alone.step(batch_of(alone))
        alone.save(base / f"alone-{family}")
    return base, run_group(__file__, RANKS, base)


@pytest.mark.parametrize(("family", "dtype", "beta"), CASES)
def test_sharded_ranks_have_the_bits_of_whole_ones(group, family, dtype, beta):
    base, told = group
    ways = {way: told[0][family][way] for way in WAYS}
    for rank in range(1, RANKS):
        for way, mine in ways.items():
            other = told[rank][family][way]
            assert {**other, "held": 0} == {**mine, "held": 0}
    whole = ways.pop("whole")
    assert len({line["grad_norm"] for line in whole["lines"]}) == 2 and whole["refused"] == [1, 1]
    for way, mine in ways.items():
        assert {**mine, "held": 0} == {**whole, "held": 0}, way
        assert files(base / family / way / "rank-0") == files(base / family / "whole" / "rank-0")
        assert not (base / family / way / "rank-1").exists()
    assert whole["traced"] == whole["scored"]


@pytest.mark.parametrize(("family", "dtype", "beta"), CASES)
def test_each_rank_holds_its_part_only(group, family, dtype, beta):
    _, told = group
    whole = told[0][family]["whole"]["held"]
    parts = [told[rank][family]["sharded"]["held"] for rank in range(RANKS)]
    assert sum(parts) == whole and max(parts) < 0.4 * whole


@pytest.mark.parametrize(("family", "dtype", "beta"), CASES)
def test_checkpoints_go_from_one_process_to_three_and_back(group, family, dtype, beta):
    base, told = group
    trainer = Trainer(base / family, config_of(dtype, beta))
    assert trainer.load(base / family / "sharded" / "rank-0") == {"rank": 0}
    assert trainer.publish()[0].digest == told[0][family]["sharded"]["digest"]
    assert trainer.steps == 2
    trainer.load(base / f"alone-{family}")
    assert {rank[family]["back"] for rank in told} == {trainer.publish()[0].digest}
    assert files(base / family / "back") == files(base / f"alone-{family}")
    assert not (base / family / "never").exists()


def by_hand(trainer: Trainer, rounds: list[list[list[torch.Tensor]]]) -> str:
    """Sums of sums, left to right: rounds[i][j] are the j-th gradients of the i-th partial sum."""
    total = [torch.zeros_like(master) for master in trainer._held.masters.leaves()]
    for parts in rounds:
        first, *others = parts
        inner = [tensor.float() for tensor in first]
        for other in others:
            inner = [tensor + part.float() for tensor, part in zip(inner, other, strict=True)]
        total = [tensor + part for tensor, part in zip(total, inner, strict=True)]
    return sha(total)


@pytest.mark.parametrize(("family", "dtype", "beta"), CASES)
def test_gradients_add_up_by_rounds_in_rank_order_and_in_no_other(group, family, dtype, beta):
    """With controls: other orders, and one micro-batch counted twice, give other bits."""
    base, told = group
    trainer = Trainer(base / family, config_of(dtype, beta))
    samples = batch_of(trainer)
    denominators = trainer._denominators(samples)
    of_ranks = []
    for rank in range(RANKS):
        indices = range(BOUNDS[rank], BOUNDS[rank + 1])
        groups = split_samples([samples[i].length for i in indices], 45)
        chosen = [tuple(indices[place] for place in group) for group in groups]
        batches = [pack(samples, group, trainer.ranks.device) for group in chosen]
        losses = [trainer._forward(batch, samples, denominators)[0] for batch in batches]
        leaves = trainer._held.weights.leaves()
        of_ranks.append([torch.autograd.grad(loss, leaves) for loss in losses])
    counts = [len(parts) for parts in of_ranks]
    assert len(set(counts)) > 1 and max(counts) > 2
    rounds = [[own[i] for own in of_ranks if i < len(own)] for i in range(max(counts))]
    seen = {told[rank][family][way]["gradients"] for rank in range(RANKS) for way in WAYS}
    assert seen == {by_hand(trainer, rounds)}
    if dtype == "float32":  # float32 sums of a few bfloat16 values are exact in any order
        assert by_hand(trainer, [parts[::-1] for parts in rounds]) not in seen
        assert by_hand(trainer, of_ranks) not in seen
    assert by_hand(trainer, [[*rounds[0], rounds[0][-1]], *rounds[1:]]) not in seen


def test_one_process_holds_all(tmp_path):
    from toy_models import toy_folder

    folder = toy_folder(tmp_path / "llama")
    digests = []
    for sharding in ("none", "full"):
        trainer = Trainer(folder, config_of("float32", 0.0, sharding=sharding))
        trainer.step(batch_of(trainer))
        digests.append(trainer.publish()[0].digest)
    assert digests[0] == digests[1]


def test_what_cannot_be_sharded_is_named():
    with pytest.raises(TrainerConfigError, match="keep_versions is 2; set keep_versions to 0"):
        TrainerConfig(sharding="full", keep_versions=2)
    with pytest.raises(TrainerConfigError, match=r"lora.rank is 4; set lora.rank to 0"):
        TrainerConfig(sharding="full", lora=LoraConfig(rank=4))
    with pytest.raises(SettingError, match="--trainer-ranks is 2: use --runtime ray, or 1"):
        RunConfig(trainer_ranks=2, runtime="inline")
    with pytest.raises(SettingError, match="--trainer-ranks is 3 and one update has 2"):
        RunConfig(trainer_ranks=3, prompts_per_step=1, group_size=2)


if __name__ == "__main__":
    base, (rank, _) = Path(sys.argv[1]), own_place()
    told: dict = {}
    for family, dtype, beta in CASES:
        told[family] = {}
        for way, settings in WAYS.items():
            out = base / family / way
            own = Trainer(base / family, config_of(dtype, beta, **settings))
            told[family][way] = run(own, rank, out)
        settings = config_of(dtype, beta, **WAYS["sharded"])
        alone = base / f"alone-{family}"
        told[family]["back"] = read_back(base / family, alone, base / family, settings, rank)
    print(json.dumps(told))
    own.ranks.wait()
