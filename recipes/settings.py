"""What a run is: one frozen record, and what must agree in it. recipes/presets.py has the presets.

No torch here: `--help` has to answer at once.
"""

import math
import os
from dataclasses import dataclass, field, replace
from typing import Literal

from rollout.config import EngineConfig
from rollout.request import LEAST_TEMPERATURE, RequestError, SamplingParams
from shared_ops.model.lora_config import NO_LORA, LoraConfig
from trainer.config import TrainerConfig

EMBEDDED = "embedded"

Mode = Literal["bitwise", "none", "tis", "mis"]


class SettingError(ValueError):
    """A setting that cannot work; the message names it and the mend."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out problems, greedy and sampled at the run's temperature from all tokens.

    Attributes:
        problems: how many of the test split; 0 leaves evaluation out.
        every: also after every so many steps; 0 is only before and after. The checkpoint with the
            best accuracy of samples is then kept beside the newest ones.
        samples: how many draws of each problem (k); above 1 the kinds are avg@k and pass@k.
    """

    problems: int = 256
    every: int = 0
    samples: int = 1


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (Yu et al. 2025, "DAPO"; named as in verl).

    Attributes:
        enable: leave groups whose rewards are all equal out of the batch, and ask for
            `prompts_per_step` more prompts until that many groups inform.
        max_num_gen_batches: most times that a step asks; then it trains on the groups that do
            inform (where none does, on the first that were drawn, without a gradient).
    """

    enable: bool = False
    max_num_gen_batches: int = 10


@dataclass(frozen=True)
class RunConfig:
    """One GRPO run on GSM8K-like problems.

    Attributes:
        preset: tiny, smollm2-135m, smollm2-135m-arithmetic, qwen2.5-0.5b or qwen3-0.6b; the other
            settings start from it.
        model: "embedded" (the project's own tiny one), a Hugging Face folder, a GGUF file, or a
            hub name.
        data: "embedded" (own word problems), "arithmetic" (sums of two small numbers), a folder
            with train.jsonl and test.jsonl, or a hub name.
        steps: batches of fresh completions.
        seed: of the data order, the draws and nothing else.
        out: folder of the run; None makes a new one under runs/.
        mode: "bitwise" stops on any differing bit; none, tis and mis sample with ordinary ops
            (docs/engine.md) and report the difference (none), or correct it (tis, mis), to compare.
        sampler_precision: "bfloat16", "float8_e4m3fn" or "float4_e2m1fn" rounds the weights on
            their way to the sampler, in modes none, tis and mis (recipes/precision.py); None
            leaves them.
        runtime: "ray" puts both sides into actors; "inline" runs them in this process, same bits.
        address: a Ray cluster to join, such as "auto"; None starts one for the run.
        resume: "off", "auto" (the last checkpoint of `out`, or of the newest run of this preset),
            or a run's folder.
        wandb: "disabled", "online" or "offline".
        tensorboard: also write TensorBoard's files, into the run's folder; needs its package.
        trackio: also write trackio's files, into the run's folder; needs its package.
        device: of both sides: "cpu", "cuda" or "auto" (cuda where there is one).
        dtype: of both sides; None is bfloat16 on a GPU and float32 on a CPU.
        dry_run: print the plan and stop.
        instruction: added to each question.
        prompts_per_step: groups in a batch.
        group_size: completions of a prompt (G).
        max_tokens: most tokens of a completion.
        temperature: of the draws, above 0.
        top_p, top_k, min_p: draw training completions from the likeliest tokens only; the kept
            sets travel to the trainer. Evaluation draws from all tokens.
        updates_per_batch: optimiser steps on one batch; all but the first see lag.
        max_lag: asynchronous: rollouts go on while the trainer works, and a token may be at most
            so many publications of the weights old when it is used. 0 waits like a synchronous run
            and gives its bits; None is synchronous.
        over_age: what becomes of a group with an older token: "refresh" asks it again, "drop" asks
            the next problem instead.
        lag_share: with max_lag, the share of stale tokens that is scored again under the weights
            that drew them, each step (the comparison modes score all).
        save_every: steps between checkpoints; the last step is always saved.
        keep_checkpoints: older ones are removed.
        threads: torch threads of each side; None is 1 for a model under 20 M parameters, else all
            cores.
        trainer_ranks: trainer actors, which share each batch and take one step (docs/trainer.md);
            with runtime "ray" only.
        reward_functions: dotted import paths of functions as recipes/rewards.py describes them.
        reward_weights: of their rewards in the sum, one each.
        expected_accuracy: sampled accuracy that the plan assumes before anything is measured.
        lora: of both sides; with a rank (or a folder) adapters are trained and the model is
            frozen.
    """

    preset: str = "tiny"
    model: str = EMBEDDED
    data: str = EMBEDDED
    steps: int = 20
    seed: int = 0
    out: str | None = None
    mode: Mode = "bitwise"
    sampler_precision: Literal["bfloat16", "float8_e4m3fn", "float4_e2m1fn"] | None = None
    runtime: Literal["ray", "inline"] = "ray"
    address: str | None = None
    resume: str = "off"
    wandb: Literal["disabled", "online", "offline"] = "disabled"
    tensorboard: bool = False
    trackio: bool = False
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    dry_run: bool = False

    instruction: str = ""
    prompts_per_step: int = 16
    group_size: int = 8
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    updates_per_batch: int = 1
    max_lag: int | None = None
    over_age: Literal["refresh", "drop"] = "refresh"
    lag_share: float = 0.25
    save_every: int = 5
    keep_checkpoints: int = 2
    threads: int | None = None
    trainer_ranks: int = 1
    reward_functions: tuple[str, ...] = ("recipes.gsm8k.correctness_reward",)
    reward_weights: tuple[float, ...] = (1.0,)
    expected_accuracy: float | None = None

    lora: LoraConfig = NO_LORA
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    rollout: EngineConfig = field(default_factory=EngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        least = {"steps": 1, "prompts_per_step": 1, "group_size": 2, "max_tokens": 1}
        least |= {"updates_per_batch": 1, "save_every": 1, "keep_checkpoints": 1}
        least["trainer_ranks"] = 1
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise SettingError(f"--{_flag(name)} is {getattr(self, name)}: use {bound} or more")
        _check_lag(self)
        _check_ranks(self)
        if self.threads is not None and self.threads < 1:
            raise SettingError(f"--threads is {self.threads}: use 1 or more, or leave it out")
        if self.evaluation.problems < 0 or self.evaluation.every < 0:
            raise SettingError("--evaluation.problems and --evaluation.every: use 0 or more")
        if self.evaluation.samples < 1:
            raise SettingError("--evaluation.samples: use 1 or more")
        if self.filter_groups.max_num_gen_batches < 1:
            raise SettingError("--filter-groups.max-num-gen-batches: use 1 or more")
        if len(self.reward_functions) != len(self.reward_weights) or not self.reward_functions:
            raise SettingError(
                f"--reward-weights: got {len(self.reward_weights)} for "
                f"{len(self.reward_functions)} --reward-functions: give one each"
            )
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise SettingError(
                f"--temperature is {self.temperature}: training needs draws, use a number of "
                f"{LEAST_TEMPERATURE} or more"
            )
        if not all(map(math.isfinite, self.reward_weights)):
            raise SettingError(f"--reward-weights: got {self.reward_weights}: use finite numbers")
        if self.expected_accuracy is not None and not 0 <= self.expected_accuracy <= 1:
            raise SettingError(
                f"--expected-accuracy is {self.expected_accuracy}: use a share from 0 to 1"
            )
        _check_filters(self)
        if self.updates_per_batch > self.prompts_per_step * self.group_size:
            raise SettingError("--updates-per-batch: use at most one for each completion")


def _check_filters(config: RunConfig) -> None:
    try:
        SamplingParams(1, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p)
    except RequestError as error:
        name, _, rest = str(error).partition(" ")
        raise SettingError(f"--{_flag(name)} {rest}") from None


def _check_lag(config: RunConfig) -> None:
    if config.max_lag is not None and config.max_lag < 0:
        raise SettingError(f"--max-lag is {config.max_lag}: use 0 or more, or leave it out")
    if not 0 <= config.lag_share <= 1:
        raise SettingError(f"--lag-share is {config.lag_share}: use a number from 0 to 1")
    if config.max_lag and config.rollout.in_flight == "abort":
        raise SettingError(
            "--rollout.in-flight abort: with --max-lag nobody resumes what was cut, so use "
            "recompute"
        )


def _check_ranks(config: RunConfig) -> None:
    ranks = config.trainer_ranks
    if ranks > 1 and config.runtime == "inline":
        raise SettingError(f"--trainer-ranks is {ranks}: use --runtime ray, or 1")
    update = config.prompts_per_step * config.group_size // config.updates_per_batch
    if ranks > update:
        raise SettingError(
            f"--trainer-ranks is {ranks} and one update has {update} completions: use at most one "
            "rank for each"
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def gpu_present() -> bool:
    """Whether an NVIDIA driver is loaded, found out without importing torch."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")


def resolved(config: RunConfig) -> RunConfig:
    """One value where two are bound to agree: device, dtype, mode and lora reach both sides.

    Raises:
        SettingError: a side was given another value than the run.
        LoraError: the folder of adapters cannot be used.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if gpu_present() else "cpu"
    dtype = config.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    shared = {"device": device, "dtype": dtype, "mode": config.mode, "lora": config.lora}
    for name, value in shared.items():
        _refuse_other(config, name, value)
    _check_sampler_precision(replace(config, dtype=dtype))
    lora = config.lora.settled()
    exact = config.mode == "bitwise" and config.rollout.exact
    total_steps = config.trainer.total_steps
    if config.trainer.schedule != "constant":
        total_steps = total_steps or config.steps * config.updates_per_batch
    kept = config.max_lag + 1 if config.max_lag else 0
    trainer = replace(
        config.trainer,
        device=device,
        dtype=dtype,
        mode=config.mode,
        total_steps=total_steps,
        keep_versions=max(config.trainer.keep_versions, kept),
        max_completion_tokens=config.trainer.max_completion_tokens or config.max_tokens,
        lora=lora,
    )
    rollout = replace(config.rollout, device=device, dtype=dtype, exact=exact, lora=lora)
    return replace(config, device=device, dtype=dtype, lora=lora, trainer=trainer, rollout=rollout)


def _refuse_other(config: RunConfig, name: str, value: str) -> None:
    """A side's own setting that neither is its default nor agrees with the run's."""
    for side, record in (("rollout", config.rollout), ("trainer", config.trainer)):
        given = getattr(record, name, value)
        default = getattr(type(record), name, value)
        if given not in (default, value):
            raise SettingError(
                f"--{side}.{name} is {given} and the run's {name} is {value}: "
                f"use --{name}, which reaches both sides"
            )


def _check_sampler_precision(config: RunConfig) -> None:
    precision = config.sampler_precision
    if precision is not None and config.mode == "bitwise":
        raise SettingError(
            f"--sampler-precision is {precision} and --mode bitwise stops on any differing bit: "
            "use --mode none, tis or mis, or leave it out"
        )
    if precision is not None and (config.lora.rank or config.lora.folder):
        raise SettingError(
            f"--sampler-precision is {precision} and rounds whole weights, but with --lora only "
            "adapters are published: leave one of them out"
        )
    if precision is not None and precision == config.dtype:
        raise SettingError(
            f"--sampler-precision is {precision} and so is the run's dtype: use --dtype float32, "
            "or leave it out"
        )
