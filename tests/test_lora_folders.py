"""peft's folder format: what peft writes loads here, what is saved here loads in peft."""

from __future__ import annotations

import json
import math
import re

import peft
import pytest
import torch
import transformers
from lora_runs import LORA, engine_of, take_steps, trainer_of
from safetensors.torch import load_file, save_file
from toy_models import toy_folder
from train_samples import unscored

from rollout import LoraConfig, SamplingParams
from shared_ops.model.config import ModelConfig
from shared_ops.model.lora_config import TARGETS, LoraError, read_settings
from trainer import Trainer, TrainSample

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {family: toy_folder(base / family, family) for family in FAMILIES}


def peft_model(folder, adapters, dtype: torch.dtype) -> peft.PeftModel:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return peft.PeftModel.from_pretrained(base, adapters).to(dtype).eval()


@torch.no_grad()
def peft_logprobs(model: peft.PeftModel, sample: TrainSample) -> torch.Tensor:
    tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logits = model(tokens).logits[0, len(sample.prompt_ids) - 1 : -1]
    logits[:, 113:] = -math.inf
    drawn = tokens[0, len(sample.prompt_ids) :, None]
    return logits.log_softmax(-1).gather(1, drawn).squeeze(1).double()


def assert_same_function(trainer: Trainer, folder, adapters) -> None:
    """Error against peft in float64 at most twice peft's own in float32; far from the base."""
    exact, single = (peft_model(folder, adapters, each) for each in (torch.float64, torch.float32))
    ours, theirs, shift = [], [], []
    samples = unscored(8, seed=3)
    for sample, scored in zip(samples, trainer.logprobs(samples), strict=True):
        truth = peft_logprobs(exact, sample)
        ours.append(scored.double() - truth)
        theirs.append(peft_logprobs(single, sample) - truth)
        with exact.disable_adapter():
            shift.append(peft_logprobs(exact, sample) - truth)
    mine, peers = (torch.cat(errors).square().mean().sqrt() for errors in (ours, theirs))
    assert mine <= 2 * peers and torch.cat(shift).abs().mean() > 1e-2


def written_by_peft(folder, path, **settings):
    """A peft folder whose B is not 0."""
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False} | settings)
    peft.get_peft_model(base, config).save_pretrained(path)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_here_is_the_same_function_in_peft(folders, tmp_path, family):
    trainer = trainer_of(folders[family])
    take_steps(trainer, 2)
    trainer.save(tmp_path / "saved")
    assert_same_function(trainer, folders[family], tmp_path / "saved")


SETTINGS = {
    "queries and values": {"target_modules": ["q_proj", "v_proj"]},
    "every linear": {"target_modules": "all-linear", "r": 3},
    "rslora": {"target_modules": ["down_proj", "k_proj", "o_proj"], "use_rslora": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_peft_wrote_is_the_same_function_here(folders, tmp_path, name):
    family = dict(zip(SETTINGS, FAMILIES, strict=True))[name]
    path = written_by_peft(folders[family], tmp_path / "adapters", **SETTINGS[name])
    lora = LoraConfig(folder=str(path))
    trainer = trainer_of(folders[family], lora)
    assert_same_function(trainer, folders[family], path)
    engine = engine_of(folders[family], lora)
    params = SamplingParams(max_tokens=8, n=2)
    for one in engine.generate([[1, 5, 9, 4]], params)[0]:
        sample = TrainSample(one.prompt_ids, one.token_ids, one.logprobs, 1.0, one.policy_versions)
        assert trainer.logprobs([sample])[0].tolist() == list(one.logprobs)


def test_a_round_trip_keeps_every_bit_and_setting(folders, tmp_path):
    lora = LoraConfig(rank=3, alpha=7.5, target_modules=("up_proj", "q_proj"), rslora=True)
    trainer = trainer_of(folders["qwen3"], lora)
    take_steps(trainer, 1)
    trainer.save(tmp_path / "saved")
    saved = read_settings(tmp_path / "saved")
    assert (saved.rank, saved.alpha, saved.rslora) == (3, 7.5, True)
    assert saved.target_modules == ("q_proj", "up_proj")
    again = trainer_of(folders["qwen3"], LoraConfig(folder=str(tmp_path / "saved"), seed=9))
    assert again.publish()[0].digest == trainer.publish()[0].digest


def test_a_fresh_start_is_as_pefts(folders):
    trainer = trainer_of(folders["llama"], LoraConfig(rank=16))
    base = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    config = peft.LoraConfig(r=16, target_modules=list(TARGETS))
    theirs = peft.get_peft_model_state_dict(peft.get_peft_model(base, config))
    mine = trainer.publish()[1]
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.shape == theirs[name].shape
        if "lora_B" in name:
            assert not tensor.any() and not theirs[name].any()
            continue
        bound = tensor.shape[1] ** -0.5
        for each in (tensor, theirs[name]):
            assert 0.9 * bound < each.abs().max() <= bound
            assert each.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_a_fresh_start_is_a_function_of_seed_and_name(folders):
    def started(**settings) -> dict[str, torch.Tensor]:
        return trainer_of(folders["llama"], LoraConfig(rank=4, **settings)).publish()[1]

    first, second = started(), started(target_modules=("k_proj", "down_proj"))
    for name, tensor in second.items():
        assert torch.equal(tensor, first[name])
    other = started(seed=1)
    names = [name for name in first if "lora_A" in name]
    assert names and not any(torch.equal(first[name], other[name]) for name in names)
    assert len({first[name].sum().item() for name in names}) == len(names)


def test_adapter_parameters_are_counted(folders):
    model = ModelConfig.from_folder(folders["llama"])
    for targets in (TARGETS, ("v_proj", "down_proj")):
        lora = LoraConfig(rank=3, target_modules=targets)
        leaves = trainer_of(folders["llama"], lora)._held.masters.leaves()
        assert lora.num_parameters(model) == sum(leaf.numel() for leaf in leaves)


REFUSED_FIELDS = {
    "use_dora": (True, "has use_dora true: only plain LoRA"),
    "modules_to_save": (["lm_head"], "has modules_to_save"),
    "bias": ("lora_only", 'has bias "lora_only"'),
    "rank_pattern": ({"q_proj": 8}, "has rank_pattern"),
    "layers_to_transform": ([0], "has layers_to_transform"),
    "init_lora_weights": ("pissa", 'has init_lora_weights "pissa"'),
    "a_field_of_tomorrow": (3, "has a_field_of_tomorrow 3"),
    "lora_dropout": (0.05, "has lora_dropout 0.05"),
    "peft_type": ("IA3", "has peft_type 'IA3'"),
    "target_modules": (["q_proj", "lm_head"], "target_modules has 'lm_head'"),
    "r": (0, "r is 0"),
}


@pytest.fixture
def saved(folders, tmp_path):
    trainer_of(folders["llama"]).save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_fields_that_are_not_plain_lora_are_named(saved, name):
    value, message = REFUSED_FIELDS[name]
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(LoraError, match=re.escape(message)) as caught:
        LoraConfig(folder=str(saved)).settled()
    assert "\n" not in str(caught.value) and "adapter_config.json" in str(caught.value)


def test_a_pattern_of_targets_is_refused(saved):
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": ".*_proj"}))
    with pytest.raises(LoraError, match=r"the pattern '\.\*_proj': list the modules by name"):
        read_settings(saved)


def drop_one(tensors: dict) -> dict:
    return {name: tensors[name] for name in list(tensors)[1:]}


def grow_one(tensors: dict) -> dict:
    name = next(iter(tensors))
    return tensors | {name: torch.zeros(5, 5)}


@pytest.mark.parametrize(
    ("change", "message"), [(drop_one, "missing"), (grow_one, "has shape (5, 5)")]
)
def test_tensors_that_do_not_fit_are_named(folders, saved, change, message):
    path = saved / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    for start in (trainer_of, engine_of):
        with pytest.raises(LoraError, match=re.escape(message)) as caught:
            start(folders["llama"], LoraConfig(folder=str(saved)))
        assert "\n" not in str(caught.value)


def test_missing_files_are_named(folders, saved, tmp_path):
    with pytest.raises(LoraError, match=r"nowhere.adapter_config.json"):
        LoraConfig(folder=str(tmp_path / "nowhere")).settled()
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(LoraError, match=r"adapter_model.safetensors"):
        trainer_of(folders["llama"], LoraConfig(folder=str(saved)))


REFUSED_SETTINGS = {
    "rank": (-1, "lora.rank is -1"),
    "alpha": (0.0, "lora.alpha is 0.0"),
    "target_modules": (("q_proj", "lm_head"), "lora.target_modules"),
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_settings_that_cannot_work_are_named(name):
    value, message = REFUSED_SETTINGS[name]
    with pytest.raises(LoraError, match=re.escape(message)):
        LoraConfig(**{name: value})


def test_a_rank_that_is_not_the_folders_is_refused(saved):
    with pytest.raises(LoraError, match=r"lora.rank is 8 and the adapters in .* have rank 4"):
        LoraConfig(rank=8, folder=str(saved)).settled()
    assert LoraConfig(rank=4, folder=str(saved)).settled().alpha == LORA.alpha
