"""What a run is going to do, said before it does it."""

import os
from dataclasses import replace
from pathlib import Path

from recipes.accuracy import informative_share
from recipes.precision import plan_line
from recipes.settings import RunConfig
from recipes.task import Task
from shared_ops.model.config import ModelConfig, Recompute

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan_lines(config: RunConfig, task: Task, folder: Path, out: Path) -> list[str]:
    """The plan as lines of text: sizes, memory, and how many groups can carry signal."""
    model = ModelConfig.from_folder(folder)
    completions = config.prompts_per_step * config.group_size
    steps, updates = config.steps, config.steps * config.updates_per_batch
    return [
        f"model      {config.model}: {model.family}, {model.num_parameters / 1e6:.1f} M parameters,"
        f" {config.dtype} on {config.device}",
        *_adapters(config, model),
        f"data       {config.data}: {len(task.train):,} problems to train on,"
        f" {len(task.test_prompts):,} held out",
        f"rollout    {steps:,} steps x {config.prompts_per_step} prompts x {config.group_size}"
        f" completions = {steps * completions:,} completions,"
        f" at most {steps * completions * config.max_tokens:,} new tokens",
        f"training   {updates:,} optimiser steps, {config.trainer.loss} loss,"
        f" {config.trainer.aggregation} mean, learning rate {config.trainer.learning_rate:g}",
        f"parity     mode {config.mode}: " + PROMISES[config.mode],
        *_lag_lines(config),
        plan_line(config),
        f"memory     about {memory_estimate(config, model, task) / 2**30:.2f} GiB for both sides"
        f"{_host_memory(config.device)}",
        f"signal     {_signal(config)}",
        f"runtime    {config.runtime}, trainer ranks: {config.trainer_ranks}, output in {out}",
    ]


def _lag_lines(config: RunConfig) -> list[str]:
    if config.max_lag is None:
        return []
    share = config.lag_share if config.mode == "bitwise" else 1.0
    return [
        f"lag        rollouts go on while the trainer works: tokens at most {config.max_lag}"
        f" publications old, {share:.0%} of the stale ones scored again under their own weights"
    ]


PROMISES = {
    "bitwise": "the run stops if one bit of one log-probability differs",
    "none": "the sampler runs ordinary ops; the difference is logged and not corrected",
    "tis": "the sampler runs ordinary ops; truncated importance weights correct the difference",
    "mis": "the sampler runs ordinary ops; tokens with a large ratio are masked",
}


def memory_estimate(config: RunConfig, model: ModelConfig, task: Task) -> float:
    """Bytes of weights (kept versions too), masters, gradients, Adam, KV pages, and one
    micro-batch's activations, over all trainer ranks."""
    size, parameters = BYTES[config.dtype or "float32"], model.num_parameters
    adapters = config.lora.num_parameters(model)
    trained = adapters or parameters
    trainer = trained * (4 * 4 + (0 if size == 4 else size))
    if adapters:
        trainer += parameters * size
        parameters += adapters
    token_kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size
    kept = kept_values(model, config.trainer.recompute)
    activations = config.trainer.micro_batch_tokens * kept * size
    logits = 3 * 4 * max(1 << 24, model.vocab_size * 16)
    kv = kv_pages(config, model, task) * config.rollout.page_size * token_kv
    versions = config.trainer.keep_versions
    kept_weights = trained * size * (versions + (versions > 0))
    ranks = config.trainer_ranks
    held = (trainer + kept_weights) * (1 if config.trainer.sharding == "full" else ranks)
    return parameters * size + held + kv + ranks * (activations + logits)


def kept_values(model: ModelConfig, recompute: Recompute) -> int:
    """Values of one token that all layers keep for the backward, and of one layer at work."""
    rotated = (model.num_heads + model.num_kv_heads) * model.head_dim
    fused = rotated + model.num_kv_heads * model.head_dim
    attended = model.num_heads * model.head_dim
    lean = 2 * model.hidden_size + fused + attended + 2 * model.intermediate_size
    normed = 2 * model.hidden_size + rotated + model.intermediate_size
    each = {"none": lean + normed, "selective": lean, "full": model.hidden_size}[recompute]
    return model.num_layers * each + (lean + normed if recompute != "none" else 0)


def _adapters(config: RunConfig, model: ModelConfig) -> list[str]:
    lora = config.lora
    if not lora.rank:
        return []
    return [
        f"adapters   rank {lora.rank}, scale {lora.scale:g}, {lora.num_parameters(model):,} trained"
        f" parameters on {', '.join(lora.target_modules)}; the model is frozen"
    ]


def kv_pages(config: RunConfig, model: ModelConfig, task: Task) -> int:
    """KV pages for a batch, or as many as one sequence can ever need; scarcity only preempts.

    Later prompts may be longer than those seen so far: room for twice the longest.
    """
    if config.rollout.num_pages is not None:
        return config.rollout.num_pages
    size = config.rollout.page_size
    longest = max(map(len, [*task.batch(config, 0)[1], *task.test_prompts]))
    evaluated = len(task.test_prompts) * config.evaluation.samples
    rounds = 1 + (config.max_lag or 0)
    at_once = max(rounds * config.prompts_per_step * config.group_size, evaluated)
    tokens = min(model.max_positions, 2 * longest + config.max_tokens)
    pages = min(config.rollout.max_sequences, at_once) * (tokens // size + 1)
    return max(pages, model.max_positions // size + 1)


def with_kv_pages(config: RunConfig, task: Task, folder: Path) -> RunConfig:
    """The same run with its engine's KV pages counted."""
    pages = kv_pages(config, ModelConfig.from_folder(folder), task)
    return replace(config, rollout=replace(config.rollout, num_pages=pages))


def _host_memory(device: str) -> str:
    if device != "cpu" or not hasattr(os, "sysconf"):
        return ""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f" (this machine has {total / 2**30:.0f} GiB)"


def _signal(config: RunConfig) -> str:
    accuracy = config.expected_accuracy
    if accuracy is None:
        return (
            "a group teaches only if its completions differ in reward: expected share"
            " 1 - p^G - (1 - p)^G, known once accuracy p is measured"
        )
    return signal_line(accuracy, config, "assumed")


def signal_line(accuracy: float, config: RunConfig, how: str) -> str:
    """The expected number of groups with both right and wrong completions."""
    share = informative_share(accuracy, config.group_size)
    return (
        f"at {accuracy:.1%} sampled accuracy ({how}) at most {share:.0%} of groups,"
        f" {share * config.prompts_per_step:.1f} of {config.prompts_per_step} a step, are expected"
        " to carry signal"
    )
