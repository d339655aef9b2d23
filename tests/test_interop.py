"""Behaviour of a trained model's folder: transformers decodes what the engine decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from toy_models import ENTRIES, VOCABULARY, toy_folder
from train_samples import drawn, unscored
from transformers import AutoModelForCausalLM

from rollout import Engine, EngineConfig, SamplingParams
from trainer import Trainer, TrainerConfig

PROMPTS = [[5, 9, 40], [71, 3, 3, 8, 100, 22], [2, 60]]
NEW = 24


def trained(folder: Path, place: Path) -> Trainer:
    trainer = Trainer(folder, TrainerConfig(learning_rate=1e-2))
    for step in range(3):
        trainer.step(drawn(trainer, unscored(5, seed=step)))
    trainer.save(place)
    return trainer


def engine_greedy(folder: Path) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW, temperature=0.0)
    groups = Engine(folder, EngineConfig()).generate(PROMPTS, params)
    return [list(group[0].token_ids) for group in groups]


def transformers_greedy(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    padding = list(range(ENTRIES, VOCABULARY))
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            suppress_tokens=padding,
        )
        out.append(made[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_trained_model_decodes_alike_in_transformers_and_comes_back(tmp_path, family):
    source, saved, again = tmp_path / "source", tmp_path / "saved", tmp_path / "again"
    trainer = trained(toy_folder(source, family), saved)
    ours = engine_greedy(saved)
    assert ours == transformers_greedy(saved)
    assert ours != engine_greedy(source)
    assert len({token for tokens in ours for token in tokens}) > 6
    AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).save_pretrained(again)
    (again / "tokenizer.json").write_text((saved / "tokenizer.json").read_text())
    assert json.loads((again / "config.json").read_text())["model_type"] == family
    assert Trainer(again).publish()[0].digest == trainer.publish()[0].digest
