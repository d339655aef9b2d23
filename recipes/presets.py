"""Where a run's settings start from: one record for each model with its task.

No torch here: `--help` has to answer at once.
"""

from dataclasses import replace
from typing import Any

from recipes.gsm8k import INSTRUCTION, NUMBER_INSTRUCTION
from recipes.settings import EvalConfig, RunConfig, SettingError, gpu_present
from rollout.config import EngineConfig
from trainer.config import TrainerConfig

ARITHMETIC = "arithmetic"
GSM8K = "openai/gsm8k"


def tiny() -> RunConfig:
    """The embedded model and problems: everything in minutes on a laptop."""
    return RunConfig(
        trainer=TrainerConfig(learning_rate=3e-4),
        rollout=EngineConfig(max_sequences=256, max_batch_tokens=4096),
        expected_accuracy=0.3,
    )


def _named(preset: str, model: str, expected_accuracy: float | None = None) -> RunConfig:
    """GSM8K with a named model; a CPU gets a batch that it can hold out against."""
    size: dict[str, Any] = {
        "prompts_per_step": 32,
        "group_size": 16,
        "max_tokens": 512,
        "steps": 100,
    }
    if not gpu_present():
        size: dict[str, Any] = {
            "prompts_per_step": 4,
            "group_size": 4,
            "max_tokens": 128,
            "steps": 10,
        }
    return RunConfig(
        preset=preset,
        model=model,
        expected_accuracy=expected_accuracy,
        data=GSM8K,
        instruction=INSTRUCTION,
        evaluation=EvalConfig(problems=1319 if gpu_present() else 16),
        trainer=TrainerConfig(
            learning_rate=1e-6,
            warmup_steps=5,
            micro_batch_tokens=8192 if gpu_present() else 1024,
        ),
        **size,
    )


def smollm2_135m() -> RunConfig:
    return _named("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", expected_accuracy=0.004)


def smollm2_135m_arithmetic() -> RunConfig:
    """A task that this model can learn in some fifty steps: GSM8K is beyond it."""
    preset = "smollm2-135m-arithmetic"
    base = _named(preset, "HuggingFaceTB/SmolLM2-135M-Instruct", expected_accuracy=0.25)
    return replace(
        base,
        data=ARITHMETIC,
        instruction=NUMBER_INSTRUCTION,
        reward_functions=("recipes.gsm8k.lenient_reward",),
        prompts_per_step=32 if gpu_present() else 8,
        group_size=8,
        max_tokens=32,
        temperature=0.7,
        steps=60 if gpu_present() else 10,
        evaluation=replace(base.evaluation, problems=128 if gpu_present() else 16),
        rollout=EngineConfig(max_sequences=256, max_batch_tokens=4096),
        trainer=replace(
            base.trainer,
            learning_rate=5e-6,
            micro_batch_tokens=16384 if gpu_present() else 1024,
        ),
    )


def qwen25_05b() -> RunConfig:
    return _named("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", expected_accuracy=0.3)


def qwen3_06b() -> RunConfig:
    return _named("qwen3-0.6b", "Qwen/Qwen3-0.6B", expected_accuracy=0.4)


PRESETS = {
    "tiny": tiny,
    "smollm2-135m": smollm2_135m,
    "smollm2-135m-arithmetic": smollm2_135m_arithmetic,
    "qwen2.5-0.5b": qwen25_05b,
    "qwen3-0.6b": qwen3_06b,
}


def preset_of(name: str | None, model: str | None) -> RunConfig:
    """Where settings start: the named preset; a named model; else by whether there is a GPU.

    Raises:
        SettingError: no such preset.
    """
    if name is not None and name not in PRESETS:
        raise SettingError(f"--preset {name}: use one of {', '.join(PRESETS)}")
    if name is None and model is not None:
        return _named("custom", model)
    return PRESETS[name or ("qwen3-0.6b" if gpu_present() else "tiny")]()
