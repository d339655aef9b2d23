"""Model folders for tests: tiny, random, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

VOCABULARY = 120
ENTRIES = 113  # tokenizer entries; the rows after them are padding
EOS = 2

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def toy_folder(path: Path, family: str = "llama", **changes) -> Path:
    """A two-layer model whose weights are large enough that its choices depend on the context."""
    config_class, model_class = CLASSES[family]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": family == "llama",
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    torch.manual_seed(7)
    model = model_class(config_class(**settings | changes))
    model.save_pretrained(path)
    vocabulary = {f"word{index}": index for index in range(ENTRIES - 1)}
    added = [{"id": ENTRIES - 1, "content": "<end>", "special": True}]
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path
