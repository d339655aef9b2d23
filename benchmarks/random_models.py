"""Models of published shapes, and smaller ones, with random weights made where they run: speed does
not depend on them. random-42M is for a CPU; random-71M has four layers of Qwen3-0.6B's shapes and a
short vocabulary, so that a GPU has work to do and little of it.

The folder holds a config.json and no weights; `replace_files` lets the engine and the trainer
make theirs from a seed where they would read a file.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from benchmarks.bench_ops import MODELS, Model
from shared_ops.model.config import ModelConfig
from shared_ops.model.weights import Weights

SMALL = Model("random-42M", 512, 1536, 8, 4, 64, 8192)
SHALLOW = Model("random-71M", 1024, 3072, 16, 8, 128, 8192)
LAYERS = {"Qwen3-0.6B": 28, "Qwen3-8B": 36, "random-42M": 12, "random-71M": 4}
UNTIED = ("Qwen3-8B",)
SCALE = 0.02


def model_of(name: str) -> Model:
    return next(model for model in (*MODELS, SMALL, SHALLOW) if model.name == name)


def make_folder(name: str, base: Path) -> Path:
    """A folder with the model's config.json; it has no tokenizer and no end of sequence."""
    model, folder = model_of(name), base / name
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS[name],
        "hidden_size": model.width,
        "intermediate_size": model.inner,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": name not in UNTIED,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    return folder


@torch.no_grad()
def random_weights(
    folder: object,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
) -> Weights:
    """Like `load_folder`: equal for equal shapes, whatever the dtype they are rounded to."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = Weights(config, dtype, device)
    for leaf in weights.leaves():
        if leaf.dim() == 1:
            leaf.fill_(1.0)
        else:
            noise = torch.randn(leaf.shape, generator=generator, device=device)
            leaf.copy_(noise.to(torch.bfloat16) * SCALE)
    return weights


@contextlib.contextmanager
def replace_files() -> Iterator[None]:
    with (
        mock.patch("rollout.engine.load_folder", random_weights),
        mock.patch("trainer.held.load_folder", random_weights),
    ):
        yield
