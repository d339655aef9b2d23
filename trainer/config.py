"""TrainerConfig: every setting of the trainer, checked when it is made.

Three combinations have names of their own in the literature; each is a function here that returns
a config and takes further changes as keywords:

| preset | advantage | aggregation | source |
|---|---|---|---|
| `grpo` | group | sequence | Shao et al. 2024, "DeepSeekMath" (clip 0.2 on both sides) |
| `dr_grpo` | centered | constant | Liu et al. 2025, "Understanding R1-Zero-Like Training" |
| `dapo` | group | token | Yu et al. 2025, "DAPO" (clip-higher, truncated completions masked) |

The defaults are those of `dapo` with truncated completions kept.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from shared_ops.model.config import Recompute
from shared_ops.model.lora_config import NO_LORA, LoraConfig

Mode = Literal["bitwise", "none", "tis", "mis"]
Level = Literal["token", "sequence", "geometric"]
LagCorrection = Literal["ppo", "decoupled", "tis", "mis"]
Place = Literal["device", "cpu", "disk"]
Loss = Literal["grpo", "gspo", "cispo"]
Aggregation = Literal["token", "sequence", "constant"]
Advantage = Literal["group", "centered", "batch", "rloo"]
Schedule = Literal["constant", "linear", "cosine"]
Sharding = Literal["none", "full"]
Dtype = Literal["float32", "bfloat16", "float16"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("bitwise", "none", "tis", "mis"),
    "lag_correction": ("ppo", "decoupled", "tis", "mis"),
    "keep_versions_on": ("device", "cpu", "disk"),
    "correction_level": ("token", "sequence", "geometric"),
    "loss": ("grpo", "gspo", "cispo"),
    "aggregation": ("token", "sequence", "constant"),
    "advantage": ("group", "centered", "batch", "rloo"),
    "recompute": ("none", "selective", "full"),
    "sharding": ("none", "full"),
    "schedule": ("constant", "linear", "cosine"),
    "dtype": ("float32", "bfloat16", "float16"),
}


class TrainerConfigError(ValueError):
    """A setting of the trainer that cannot work; the message names it and the mend."""


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of the trainer.

    Attributes:
        device: "cpu", "cuda" (this process's GPU) or "auto" (cuda if there is one).
        dtype: of the weights that are run and published; masters are float32.
        exact: False takes torch's ordinary ops, for negative controls only.
        mode: "bitwise" stops on any differing bit; the others are for comparison and only log
            (trainer/correction.py has the definitions).
        lag_correction: what corrects for samples of older weights in bitwise mode: "ppo" clips
            the ratio to the policy that drew them, "decoupled", "tis" and "mis" clip the ratio to
            the policy that the batch's first update found, and weigh by how far that one had moved.
        correction_level: "token", "sequence" or "geometric" weights of tis and mis.
        tis_cap: C in min(rho, C).
        mis_low, mis_high: mis keeps rho inside them and sets the weight to 0 outside
            (0.5 and 5 are IcePop's; TRL's default is sequence level at 0 and 3).
        loss: token loss (trainer/loss.py has the formulas).
        aggregation: how token losses are summed.
        advantage: what the recipe passes to `trainer.advantage.advantages`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. GSPO wants
            about 3e-4 and 4e-4.
        dual_clip: c > 1 bounds the loss of negative advantages at -c A; None leaves it out.
        cispo_cap: the largest weight of cispo.
        entropy_coefficient: the loss is lessened by it times the mean entropy of the drawn tokens'
            distributions (an entropy bonus); 0 computes no gradient for it.
        beta: weight of the k3 KL to the initial model; 0 loads no reference.
        max_completion_tokens: L_max of aggregation "constant", in tokens.
        mask_truncated: leave truncated completions out of the loss and its denominators.
        learning_rate: peak.
        schedule: after the warmup; "linear" and "cosine" fall to final_lr_ratio x learning_rate
            at total_steps.
        warmup_steps: steps of linear warmup; the first step is already above 0.
        total_steps: optimiser steps of the whole run, needed by "linear" and "cosine".
        final_lr_ratio: of the learning rate, at the end of "linear" and "cosine".
        beta1, beta2, epsilon, weight_decay: AdamW; decay spares vectors (norms and biases).
        max_grad_norm: gradients are scaled down to it; 0 leaves them as they are.
        micro_batch_tokens: budget of one forward and backward, in packed tokens.
        recompute: what a layer drops and computes again in its backward, with the same bits:
            "none" nothing; "selective" the outputs of norms, rotations and swiglu, which costs no
            time; "full" all but its input, which runs the layers' forward twice. False and True
            are older words for "none" and "full".
        sharding: "full" leaves every rank only its rows of weights, masters and moments (FSDP2) and
            gathers a layer when it runs: the same bits as "none", in which each rank holds all.
        keep_versions: published versions of the weights that are kept (in dtype), so that stale
            tokens can be scored under the version that drew them; 0 keeps none.
        keep_versions_on: "device", "cpu" (host memory) or "disk" (a temporary folder).
        lora: with a rank, low-rank adapters are trained and published instead of the weights.
    """

    device: str = "cpu"
    dtype: Dtype = "float32"
    exact: bool = True

    mode: Mode = "bitwise"
    lag_correction: LagCorrection = "ppo"
    correction_level: Level = "token"
    tis_cap: float = 2.0
    mis_low: float = 0.5
    mis_high: float = 5.0

    loss: Loss = "grpo"
    aggregation: Aggregation = "token"
    advantage: Advantage = "group"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    cispo_cap: float = 5.0
    entropy_coefficient: float = 0.0
    beta: float = 0.0
    max_completion_tokens: int | None = None
    mask_truncated: bool = False

    learning_rate: float = 1e-6
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final_lr_ratio: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 8192
    recompute: Recompute = "selective"
    sharding: Sharding = "none"
    keep_versions: int = 0
    keep_versions_on: Place = "cpu"

    lora: LoraConfig = NO_LORA

    def __post_init__(self) -> None:
        if isinstance(self.recompute, bool):
            object.__setattr__(self, "recompute", "full" if self.recompute else "none")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise TrainerConfigError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
                )
        _check_ranges(self)
        _check_pairs(self)
        _check_sharding(self)


def _check_ranges(config: TrainerConfig) -> None:
    zero_up = (
        "warmup_steps",
        "keep_versions",
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "beta",
    )
    for name in (*zero_up, "mis_low", "clip_high"):
        _require(config, name, getattr(config, name) >= 0, "0 or more")
    for name in ("micro_batch_tokens", "epsilon", "tis_cap", "cispo_cap"):
        _require(config, name, getattr(config, name) > 0, "above 0")
    for name in ("total_steps", "max_completion_tokens"):
        value = getattr(config, name)
        _require(config, name, value is None or value > 0, "None or above 0")
    for name in ("beta1", "beta2"):
        _require(config, name, 0 <= getattr(config, name) < 1, "in [0, 1)")
    for name in ("final_lr_ratio", "clip_low"):
        _require(config, name, 0 <= getattr(config, name) <= 1, "in [0, 1]")
    dual_clip = config.dual_clip
    _require(config, "dual_clip", dual_clip is None or dual_clip > 1, "None or above 1 (usually 3)")


def _require(config: TrainerConfig, name: str, holds: bool, mend: str) -> None:
    value = getattr(config, name)
    if not holds or (isinstance(value, float) and not math.isfinite(value)):
        raise TrainerConfigError(f"{name} is {value!r}; it must be {mend}")


def _check_pairs(config: TrainerConfig) -> None:
    if config.mis_low >= config.mis_high:
        raise TrainerConfigError(
            f"mis_low is {config.mis_low} and mis_high {config.mis_high}; mis_low must be smaller"
        )
    if config.mode != "bitwise" and config.lag_correction != "ppo":
        raise TrainerConfigError(
            f"lag_correction is {config.lag_correction!r} in mode {config.mode!r}, whose weight "
            "corrects mismatch; use mode 'bitwise', or lag_correction 'ppo'"
        )
    if config.aggregation == "constant" and config.max_completion_tokens is None:
        raise TrainerConfigError(
            "aggregation is 'constant' but max_completion_tokens is None; set it to max_tokens"
        )
    if config.schedule != "constant" and config.total_steps is None:
        raise TrainerConfigError(
            f"schedule is {config.schedule!r} but total_steps is None; set it to the run's steps"
        )
    if config.total_steps is not None and config.warmup_steps > config.total_steps:
        raise TrainerConfigError(
            f"warmup_steps is {config.warmup_steps}; it must be at most total_steps, "
            f"{config.total_steps}"
        )


def _check_sharding(config: TrainerConfig) -> None:
    if config.sharding == "none":
        return
    for name, used in (("keep_versions", config.keep_versions), ("lora.rank", config.lora.rank)):
        if used:
            raise TrainerConfigError(
                f"sharding is 'full' and {name} is {used}; set {name} to 0, or sharding to 'none'"
            )


def grpo(**changes: Any) -> TrainerConfig:
    """GRPO as first published: per-completion means, one clip width."""
    return TrainerConfig(**{"aggregation": "sequence", "clip_high": 0.2, **changes})


def dr_grpo(**changes: Any) -> TrainerConfig:
    """Dr. GRPO: no division by length or by the group's spread; needs max_completion_tokens."""
    preset = {"aggregation": "constant", "advantage": "centered", "clip_high": 0.2}
    return TrainerConfig(**{**preset, **changes})


def dapo(**changes: Any) -> TrainerConfig:
    """DAPO: token mean, clip-higher, truncated completions masked."""
    return TrainerConfig(**{"mask_truncated": True, **changes})
