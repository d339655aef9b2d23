"""What a dense decoder is, read from a Hugging Face folder's config.json. No torch here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
Recompute = Literal["none", "selective", "full"]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class ConfigError(ValueError):
    """A model folder that cannot be used; the message names the file or setting and the mend."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its type and the numbers that type needs (absent ones are None)."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense decoder.

    Example: SmolLM2-135M is family "llama", 30 layers, hidden 576, intermediate 1536, 9 heads,
    3 KV heads of width 64, vocabulary 49152, tied.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Stored parameters, a tied head counted once."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = (qkv + self.num_heads * self.head_dim) * self.hidden_size
        small = 2 * self.hidden_size + qkv * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.intermediate_size + small
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read `folder`/config.json.

        Raises:
            ConfigError: the folder or file is missing or broken, or the architecture, activation,
                rope type or attention variant is not supported.
        """
        return _parse(read_json(folder, "config.json"), Path(folder))


def read_json(folder: str | Path, name: str) -> dict[str, Any]:
    """A JSON object from a model folder; ConfigError when it is not there or not JSON."""
    path = Path(folder) / name
    if not Path(folder).is_dir():
        raise ConfigError(
            f"model folder {str(folder)!r} does not exist or is no folder: "
            "pass a Hugging Face folder with config.json and *.safetensors (--model FOLDER)"
        )
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"model folder {str(folder)!r} has no {name}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} does not hold a JSON object")
    return value


def _refuse_variants(raw: dict[str, Any], where: Path) -> None:
    """Variants that would change the function computed must not be ignored silently."""
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") not in ("silu", "swish"),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "attention_bias": bool(raw.get("attention_bias")) and raw["model_type"] != "qwen2",
        "quantization_config": bool(raw.get("quantization_config")),
    }
    window = raw.get("sliding_window") if raw["model_type"] == "mistral" else None
    refused["sliding_window"] = bool(window) and window < raw["max_position_embeddings"]
    for name, bad in refused.items():
        if bad:
            raise ConfigError(
                f"{where}: config.json sets {name} to {raw[name]!r}, which is not supported: "
                "use a model without it"
            )


def _require_sizes(raw: dict[str, Any], where: Path) -> None:
    optional = [n for n in ("num_key_value_heads", "head_dim") if raw.get(n) is not None]
    for name in (*SIZES, *optional):
        if not isinstance(raw[name], int) or raw[name] < 1:
            raise ConfigError(
                f"{where}: config.json sets {name} to {raw[name]!r}: use a whole number above 0"
            )
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{where}: config.json sets num_attention_heads to {heads}, which is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )


def _rope(raw: dict[str, Any], where: Path) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    values = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_TYPES:
        lengthy = kind in ("dynamic", "longrope", "su")
        why = " (its angles depend on the sequence's length)" if lengthy else ""
        raise ConfigError(
            f"{where}: rope type {kind!r} is not supported{why}: supported are {ROPE_TYPES}"
        )
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{where}: partial_rotary_factor other than 1.0 is not supported")
    original = values.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    factor = values.get("factor") or (raw["max_position_embeddings"] / original)
    optional = {name: values[name] for name in ROPE_NUMBERS if values.get(name) is not None}
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    return RopeConfig(kind, theta, float(factor), int(original), **optional)


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json first: chat models end a turn with other ids than config.json's."""
    generation = folder / "generation_config.json"
    value = read_json(folder, generation.name).get("eos_token_id") if generation.exists() else None
    value = raw.get("eos_token_id") if value is None else value
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _parse(raw: dict[str, Any], folder: Path) -> ModelConfig:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{folder}: architecture {family!r} is not supported: supported are {sorted(FAMILIES)}"
        )
    try:
        _require_sizes(raw, folder)
        _refuse_variants(raw, folder)
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        return ModelConfig(
            family=family,
            num_layers=raw["num_hidden_layers"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            vocab_size=raw["vocab_size"],
            max_positions=raw["max_position_embeddings"],
            norm_eps=float(raw["rms_norm_eps"]),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            rope=_rope(raw, folder),
            eos_token_ids=_eos_token_ids(folder, raw),
        )
    except KeyError as error:
        raise ConfigError(f"{folder}: config.json lacks {error}") from None
