"""Behaviour of checkpoints: training continues to the bit, and damage is seen and named."""

from __future__ import annotations

import hashlib
import json
import warnings

import pytest
import torch
from toy_models import toy_folder
from train_samples import drawn, unscored

from shared_ops.model.lora_config import LoraConfig
from shared_ops.model.weights import DIGEST_KIND
from trainer import CheckpointError, Trainer, TrainerConfig
from trainer.checkpoint import check_base, find_latest, keep_last


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("model") / "llama")


def trainer_of(folder, **settings) -> Trainer:
    common = {"learning_rate": 1e-2, "schedule": "cosine", "total_steps": 5, "warmup_steps": 2}
    return Trainer(folder, TrainerConfig(**common | settings))


def take_steps(trainer: Trainer, count: int) -> list[dict]:
    lines = []
    for _ in range(count):
        samples = drawn(trainer, unscored(5, seed=trainer.steps))
        lines.append(trainer.step(samples).metrics)
    return lines


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_equal_one_save_load_and_two(folder, tmp_path, dtype):
    whole = trainer_of(folder, dtype=dtype)
    lines = take_steps(whole, 3)
    first = trainer_of(folder, dtype=dtype)
    take_steps(first, 1)
    extra = {"row": 17, "rewards": [0.1, 1 / 3], "name": "é"}
    first.save(tmp_path / "step-1", extra)
    resumed = trainer_of(folder, dtype=dtype)
    assert resumed.load(tmp_path / "step-1") == extra
    assert (resumed.version, resumed.steps) == (1, 1)
    assert take_steps(resumed, 2) == lines[1:]
    assert resumed.publish()[0] == whole.publish()[0]
    for name, tensor in whole._state_tensors().items():
        assert torch.equal(tensor, resumed._state_tensors()[name]), name


def test_a_checkpoint_is_a_model_folder(folder, tmp_path):
    trainer = trainer_of(folder)
    take_steps(trainer, 2)
    trainer.save(tmp_path / "model")
    again = Trainer(tmp_path / "model")
    assert again.publish()[0].digest == trainer.publish()[0].digest
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    own = trainer.publish()[1]
    for name, tensor in own.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def flip_byte(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


FILES = ["model.safetensors", "training.safetensors", "state.json", "digests.json", "config.json"]


@pytest.mark.parametrize("damage", [flip_byte, cut_short, lambda path: path.unlink()])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_changes_nothing(folder, tmp_path, name, damage):
    trainer = trainer_of(folder)
    trainer.save(tmp_path / "step-7")
    damage(tmp_path / "step-7" / name)
    other = trainer_of(folder)
    take_steps(other, 1)
    before = other.publish()[0]
    with pytest.raises(CheckpointError, match="step-7") as caught:
        other.load(tmp_path / "step-7")
    told = str(caught.value)
    altered_list = name == "digests.json" and "is not what was written" in told
    assert (name in told or altered_list) and "\n" not in told
    assert (other.publish()[0], other.version) == (before, 1)


def test_the_latest_whole_checkpoint_is_found(folder, tmp_path):
    trainer = trainer_of(folder)
    assert find_latest(tmp_path) is None and find_latest(tmp_path / "nowhere") is None
    for step in (1, 2, 10):
        trainer.steps = step
        trainer.save(tmp_path / f"step-{step}")
    (tmp_path / ".step-11.partial-x").mkdir()
    (tmp_path / "notes").mkdir()
    assert find_latest(tmp_path) == tmp_path / "step-10"
    flip_byte(tmp_path / "step-10" / "training.safetensors")
    with pytest.warns(UserWarning, match="step-10"):
        assert find_latest(tmp_path) == tmp_path / "step-2"
    (tmp_path / "step-2" / "state.json").unlink()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert find_latest(tmp_path) == tmp_path / "step-1"


def test_the_last_and_the_protected_are_kept(folder, tmp_path):
    trainer = trainer_of(folder)
    for step in (8, 9, 10, 11):
        trainer.steps = step
        trainer.save(tmp_path / f"step-{step}")
    (tmp_path / ".step-12.partial-killed").mkdir()
    keep_last(tmp_path, 2, protected=[tmp_path / "step-8"])
    assert {path.name for path in tmp_path.iterdir()} == {"step-8", "step-10", "step-11"}
    with pytest.raises(ValueError, match="at least 1"):
        keep_last(tmp_path, 0)


def test_a_removal_that_is_killed_leaves_no_half_checkpoint(folder, tmp_path, monkeypatch):
    trainer = trainer_of(folder)
    for step in (1, 2):
        trainer.steps = step
        trainer.save(tmp_path / f"step-{step}")

    def killed(path, **_):
        (path / "digests.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            keep_last(tmp_path, 1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]
    keep_last(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_saving_again_replaces_and_leaves_nothing_beside(folder, tmp_path):
    trainer = trainer_of(folder)
    (tmp_path / ".step-1.partial-killed").mkdir()
    trainer.save(tmp_path / "step-1", {"turn": 1})
    take_steps(trainer, 1)
    trainer.save(tmp_path / "step-1", {"turn": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert trainer_of(folder).load(tmp_path / "step-1") == {"turn": 2}


def test_what_json_cannot_hold_is_refused_before_anything_is_written(folder, tmp_path):
    with pytest.raises(CheckpointError, match="extra cannot be saved"):
        trainer_of(folder).save(tmp_path / "step-1", {"tensor": torch.zeros(1)})
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_checkpoint(folder, tmp_path, monkeypatch):
    trainer = trainer_of(folder)
    trainer.save(tmp_path / "step-1", {"turn": 1})

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.checkpoint._flush", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(tmp_path / "step-1", {"turn": 2})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert trainer_of(folder).load(tmp_path / "step-1") == {"turn": 1}


def test_another_model_or_dtype_is_refused(folder, tmp_path):
    trainer_of(folder).save(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="trained in float32, this trainer runs bfloat16"):
        trainer_of(folder, dtype="bfloat16").load(tmp_path / "step-1")
    other = toy_folder(tmp_path / "qwen3", "qwen3")
    with pytest.raises(CheckpointError, match="is of another model"):
        trainer_of(other).load(tmp_path / "step-1")


def test_a_missing_checkpoint_and_an_unknown_format_are_named(folder, tmp_path):
    trainer = trainer_of(folder)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        trainer.load(tmp_path / "nowhere")
    trainer.save(tmp_path / "step-1")
    state, digests = tmp_path / "step-1" / "state.json", tmp_path / "step-1" / "digests.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99}))
    sums = json.loads(digests.read_text())
    sums["state.json"] = hashlib.sha256(state.read_bytes()).hexdigest()
    digests.write_text(json.dumps(sums))
    with pytest.raises(CheckpointError, match="has format 99, this program reads 1"):
        trainer.load(tmp_path / "step-1")


def test_a_base_named_by_an_older_kind_of_digest_is_told_apart(folder):
    trainer = trainer_of(folder, lora=LoraConfig(rank=2))
    own = trainer.publish()[0]
    state = {"base": own.base, "scale": own.scale}
    weights = trainer._held.weights
    check_base("step-1", state, weights)
    with pytest.raises(CheckpointError, match=r"step-1' names its base .* of an older kind; use"):
        check_base("step-1", state | {"base": own.base.removeprefix(DIGEST_KIND)}, weights)
