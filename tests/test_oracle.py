"""transformers is the oracle: tiny random models of every family, written by it and read by us.

Accuracy: logits lie within twice transformers' own error against its float64 copy. Behaviour:
greedy continuations are equal.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from shared_ops.model.config import ConfigError, ModelConfig
from shared_ops.model.decoder import Decoder
from shared_ops.model.weights import load_folder, save_folder
from shared_ops.opset import EXACT

TOKENS, NEW_TOKENS = 150, 24
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}


def rope(kind: str, **numbers) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
MORE_YARN = {
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "mscale": 1.2,
    "mscale_all_dim": 0.7,
}
MODELS = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama without head_dim": ("Llama", {"head_dim": None}),
    "qwen2": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True, "num_attention_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "linear": ("Llama", rope("linear", factor=2.5)),
    "llama3": ("Llama", rope("llama3", factor=8.0, **LLAMA3)),
    "yarn": ("Qwen2", rope("yarn", **YARN)),
    "yarn attention factor": ("Qwen3", rope("yarn", factor=4.0, attention_factor=0.9)),
    "yarn all numbers": ("Qwen3", rope("yarn", **YARN, **MORE_YARN)),
}


def write_model(folder: Path, name: str) -> Path:
    """Norms and biases are random too, so that a missing one shows."""
    family, changes = MODELS[name]
    settings = {key: value for key, value in (SIZES | changes).items() if value is not None}
    if "sliding_window" in changes:
        settings["sliding_window"] = None
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float("norm" in parameter_name), 0.3)
    model.save_pretrained(folder)
    return folder


class Packed:
    def __init__(self, starts: list[int]):
        self.starts = starts

    def attend(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        return EXACT.packed_attention(q_THE, k_TKE, v_TKE, self.starts)


def decoder_of(folder: Path, dtype=torch.float32) -> Decoder:
    config = ModelConfig.from_folder(folder)
    return Decoder(config, load_folder(folder, config, dtype, "cpu"))


@torch.no_grad()
def our_logits(decoder: Decoder, ids_T: Tensor) -> Tensor:
    positions_T = torch.arange(len(ids_T))
    hidden_TD = decoder(ids_T, positions_T, Packed([0, len(ids_T)]))
    ones_T = torch.ones(len(ids_T))
    return EXACT.scaled_logits(hidden_TD, decoder.head_VD, ones_T, decoder.config.vocab_size)


def oracle(folder: Path, dtype) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def their_logits(model: transformers.PreTrainedModel, ids_T: Tensor) -> Tensor:
    return model(ids_T.unsqueeze(0)).logits[0]


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def ids_T() -> Tensor:
    return torch.randint(97, (TOKENS,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_are_within_twice_the_error_of_transformers(folder, ids_T, dtype):
    rounded = oracle(folder, dtype)
    exact = their_logits(rounded.double(), ids_T)
    theirs = their_logits(oracle(folder, dtype), ids_T).double() - exact
    ours = our_logits(decoder_of(folder, dtype), ids_T).double() - exact
    assert exact.dtype == torch.float64 and exact.std() > 0.5
    assert ours.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt()
    assert ours.abs().max() <= 2 * theirs.abs().max()


def test_greedy_continuation_is_that_of_transformers(folder, ids_T):
    decoder, model = decoder_of(folder), oracle(folder, torch.float32)
    ours = theirs = ids_T[:9]
    for _ in range(NEW_TOKENS):
        ours = torch.cat((ours, our_logits(decoder, ours)[-1:].argmax(-1)))
        theirs = torch.cat((theirs, their_logits(model, theirs)[-1:].argmax(-1)))
    assert ours.tolist() == theirs.tolist()
    assert len(set(ours[9:].tolist())) > 2


def test_a_saved_folder_gives_transformers_the_same_logits(folder, ids_T, tmp_path):
    decoder = decoder_of(folder)
    for leaf in decoder.weights.leaves():
        leaf.mul_(1.01)
    save_folder(tmp_path / "saved", decoder.weights, folder)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert {p.dtype for p in saved.parameters()} == {torch.float32}
    exact = their_logits(oracle(tmp_path / "saved", torch.float64), ids_T)
    theirs, ours = their_logits(saved, ids_T).double(), our_logits(decoder, ids_T).double()
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()
    again = decoder_of(tmp_path / "saved")
    assert torch.equal(our_logits(again, ids_T), our_logits(decoder, ids_T))


def rewrite_config(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_rope_settings_of_older_folders_are_read_alike(tmp_path):
    folder = write_model(tmp_path, "llama3")
    now = ModelConfig.from_folder(folder)
    scaling = {"type": "llama3", "factor": 8.0, **LLAMA3}
    old = rewrite_config(folder, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    assert ModelConfig.from_folder(old) == now
    assert now.rope.kind == "llama3" and now.rope.factor == 8.0


def test_num_parameters_counts_what_is_stored(folder):
    config = ModelConfig.from_folder(folder)
    weights = load_folder(folder, config, torch.float32, "cpu")
    assert config.num_parameters == sum(leaf.numel() for leaf in weights.leaves())


REFUSED = [
    ({"model_type": "gpt2"}, "architecture 'gpt2'"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope type 'su'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_act": "gelu"}, "hidden_act to 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"attention_bias": True}, "attention_bias"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"model_type": "mistral", "sliding_window": 128}, "sliding_window to 128"),
    ({"num_key_value_heads": 4}, "num_attention_heads to 6"),
    ({"num_hidden_layers": 0}, "num_hidden_layers to 0"),
    ({"hidden_size": "48"}, "hidden_size to '48'"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_would_compute_another_function_is_refused(tmp_path, changes, named):
    folder = rewrite_config(write_model(tmp_path, "llama"), **changes)
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_folder(folder)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_wide_sliding_window_is_no_window(tmp_path):
    changes = {"model_type": "mistral", "sliding_window": 256}
    ModelConfig.from_folder(rewrite_config(write_model(tmp_path, "llama"), **changes))


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model_type": "llama"}'])
def test_a_missing_or_broken_config_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json") as refusal:
        ModelConfig.from_folder(tmp_path)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match="--model FOLDER"):
        ModelConfig.from_folder(tmp_path / "nowhere")
