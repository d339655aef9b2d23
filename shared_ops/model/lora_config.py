"""Which low-rank adapters a run has, and the settings file of peft's folder format. No torch here.

peft's format: adapter_config.json and adapter_model.safetensors, whose tensors are named
`base_model.model.` + the module's path in the base model + `.lora_A.weight` or `.lora_B.weight`.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared_ops.model.config import ModelConfig

# Adapters of one row share an input: the fused product that they stand beside -> module paths.
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
TARGETS = tuple(path.rpartition(".")[2] for paths in GROUPS.values() for path in paths)
SETTINGS_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Fields of adapter_config.json that are read, or that change nothing of what is computed. Any
# other one must say "no" in its own way: null, false, empty or "none".
READ = {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "lora_dropout"}
IDLE = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
# Ways of starting that leave the base weights alone; others (pissa, olora, loftq, ...) change them.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


class LoraError(ValueError):
    """An adapter setting or folder that cannot be used; the message names it and the mend."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, "LoRA"): y = W x + scale B A x, W frozen.

    Attributes:
        rank: of each adapter; 0 has none and trains the weights themselves.
        alpha: scale is alpha / rank.
        target_modules: which of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.
        rslora: scale is alpha / sqrt(rank) instead (Kalajdzievski 2023, "rsLoRA").
        seed: of a fresh A; a fresh B is 0.
        folder: start from this peft folder; rank, alpha, target_modules and rslora are then its
            own.
    """

    rank: int = 0
    alpha: float = 16.0
    target_modules: tuple[str, ...] = TARGETS
    rslora: bool = False
    seed: int = 0
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise LoraError(f"lora.rank is {self.rank}: use 1 or more, or 0 for none")
        if not 0 < self.alpha < float("inf"):
            raise LoraError(f"lora.alpha is {self.alpha}: use a number above 0, such as 2 x rank")
        unknown = [name for name in self.target_modules if name not in TARGETS]
        if unknown or not self.target_modules:
            raise LoraError(
                f"lora.target_modules is {list(self.target_modules)}: use some of "
                + ", ".join(TARGETS)
            )
        in_order = tuple(name for name in TARGETS if name in self.target_modules)
        object.__setattr__(self, "target_modules", in_order)
        object.__setattr__(self, "alpha", float(self.alpha))

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def settled(self) -> "LoraConfig":
        """With `folder` given, the folder's own settings instead of these.

        Raises:
            LoraError: no such folder, it asks for something else than plain LoRA, or its rank is
                not the one given.
        """
        if self.folder is None:
            return self
        own = read_settings(Path(self.folder).expanduser())
        if self.rank not in (0, own.rank):
            raise LoraError(
                f"lora.rank is {self.rank} and the adapters in {self.folder!r} have rank "
                f"{own.rank}: leave lora.rank out"
            )
        place = str(Path(self.folder).expanduser().resolve())
        return replace(own, seed=self.seed, folder=place)

    def num_parameters(self, model: ModelConfig) -> int:
        """Of all adapters of a model."""
        shapes = target_shapes(model)
        layer = sum(sum(shapes[name]) for name in self.target_modules)
        return model.num_layers * self.rank * layer


NO_LORA = LoraConfig()


def target_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Target module -> (outputs, inputs) of its frozen weight."""
    width, wide = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width)}
    shapes |= {"o_proj": (width, queries), "down_proj": (width, wide)}
    return shapes | {"gate_proj": (wide, width), "up_proj": (wide, width)}


def read_settings(folder: str | Path) -> LoraConfig:
    """The settings of a peft folder.

    Raises:
        LoraError: no such file, or a field that plain LoRA without dropout does not have.
    """
    path = Path(folder) / SETTINGS_FILE
    try:
        raw = json.loads(path.read_text())
        if raw["r"] < 1:
            raise LoraError(f"r is {raw['r']}: it must be 1 or more")
        values = LoraConfig(
            rank=raw["r"],
            alpha=float(raw["lora_alpha"]),
            target_modules=_targets(raw["target_modules"]),
            rslora=raw.get("use_rslora", False),
            folder=str(folder),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise LoraError(f"{str(path)!r} cannot be used: {reason}") from None
    _require_plain(path, raw)
    return values


def _targets(names: Any) -> tuple[str, ...]:
    """In our order. peft lists names or whole paths; which layers is seen from the tensors."""
    if names == "all-linear":
        return TARGETS
    if isinstance(names, str):
        raise LoraError(f"target_modules is the pattern {names!r}: list the modules by name")
    short = {name.rpartition(".")[2] for name in names}
    unknown = sorted(short - set(TARGETS))
    if unknown:
        raise LoraError(f"target_modules has {unknown[0]!r}: only {', '.join(TARGETS)} can be")
    return tuple(name for name in TARGETS if name in short)


def _require_plain(path: Path, raw: dict[str, Any]) -> None:
    for name, value in raw.items():
        is_start = name == "init_lora_weights"
        if (name in READ | IDLE and not is_start) or (is_start and value in PLAIN_STARTS):
            continue
        if value not in (None, False, "none", "", [], {}):
            raise LoraError(
                f"{str(path)!r} has {name} {json.dumps(value)}: only plain LoRA is supported, "
                "without DoRA, biases, modules_to_save or settings of single layers"
            )
    if raw.get("peft_type", "LORA") != "LORA":
        raise LoraError(f"{str(path)!r} has peft_type {raw['peft_type']!r}: only LORA is supported")
    if raw.get("lora_dropout"):
        raise LoraError(
            f"{str(path)!r} has lora_dropout {raw['lora_dropout']}: with dropout no two forwards "
            "agree, so train it with 0"
        )


def write_settings(folder: Path, lora: LoraConfig, base: str) -> None:
    """adapter_config.json; base: name or folder of the weights that the adapters belong to."""
    settings = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(lora.target_modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
