"""Forward and backward of a GRPO-shaped batch: tokens per second that are not padding, and memory.

Lengths uniform in 256..1024, the log probability of every token, bfloat16, random weights, no
optimiser step. Synchronised clock, median, warm-up left out. Gradients of two runs are compared.
The anchors hold weights, gradients and activations; the peak is given as they count it, and with
the float32 masters and moments that a training run also holds. Those of 8 B parameters (92 GiB)
leave no room beside the rest: --no-optimizer.

Example: python -m benchmarks.bench_trainer --output benchmarks/results/trainer_h200.json
         python -m benchmarks.bench_trainer --model Qwen3-8B --no-optimizer --recompute selective
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.bench_ops import environment
from benchmarks.random_models import LAYERS, make_folder, replace_files
from shared_ops.model.config import Recompute
from trainer import Trainer, TrainerConfig, TrainSample
from trainer.optimizer import gradient_norm
from trainer.score import Scorer

GIB = 2**30
SEQUENCES = {"Qwen3-0.6B": 16, "Qwen3-8B": 8}
# transformers 5.17 on an H200: bfloat16, SDPA, right-padded; then with gradient checkpointing.
ANCHORS = {
    "Qwen3-0.6B": {
        "transformers": "21,900 tok/s, 57 GiB",
        "transformers_checkpointing": "18,000 tok/s, 24.5 GiB",
        "floor": 215_000,
        "target": 65_000,
        "target_gib": 16,
        "stretch": 100_000,
    },
    "Qwen3-8B": {
        "transformers": "6,200 tok/s, 89 GiB",
        "transformers_checkpointing": "5,000 tok/s, 34 GiB",
        "floor": 16_000,
        "target": 10_000,
        "target_gib": 60,
        "stretch": 12_500,
    },
}


def batch_of(name: str, vocabulary: int) -> list[TrainSample]:
    source = random.Random(0)
    samples = []
    for index in range(SEQUENCES[name]):
        length = source.randint(256, 1024)
        tokens = [source.randrange(vocabulary) for _ in range(length)]
        samples.append(
            TrainSample(
                tokens[:1], tokens[1:], [-12.0] * (length - 1), 1.0 - 2 * (index % 2),
                [0] * (length - 1),
            )
        )  # fmt: skip
    return samples


def make_trainer(name: str, keeps_state: bool) -> Trainer:
    """Without state: neither float32 masters nor moments, as the anchors were measured."""
    config = TrainerConfig(device="cuda", dtype="bfloat16", mode="none")
    with tempfile.TemporaryDirectory() as base, replace_files():
        trainer = Trainer(make_folder(name, Path(base)), config)
    if not keeps_state:
        trainer.optimizer.masters = trainer.optimizer.first = trainer.optimizer.second = []
        trainer._held.masters = trainer._held.weights
    torch.cuda.empty_cache()
    return trainer


def size_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it returned."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def run(trainer: Trainer, name: str, recompute: Recompute, budget: int, repeats: int) -> dict:
    trainer.config = replace(trainer.config, micro_batch_tokens=budget)
    cast(Scorer, trainer._held.scorer).model.recompute = recompute
    samples = batch_of(name, trainer.model_config.vocab_size)
    tokens = sum(sample.length for sample in samples)
    _, first = trainer._accumulate(samples)
    torch.cuda.reset_peak_memory_stats()
    seconds, differing = [], 0
    for _ in range(repeats):
        each, (_, gradients) = timed(lambda: trainer._accumulate(samples))
        seconds.append(each)
        differing += sum(int((a != b).sum()) for a, b in zip(first, gradients, strict=True))
        del gradients
    # The first run's gradients are held beside the later ones for the comparison only.
    peak = torch.cuda.max_memory_allocated() - size_of(first)
    state = size_of(
        [*trainer.optimizer.masters, *trainer.optimizer.first, *trainer.optimizer.second]
    )
    return {
        "model": name,
        "batch": f"{len(samples)} x <= 1024, {tokens:,} tokens",
        "recompute": recompute,
        "micro_batch_tokens": budget,
        "tokens_per_s": round(tokens / statistics.median(seconds)),
        "runs": [round(tokens / each) for each in seconds],
        "peak_gib_weights_gradients_activations": round((peak - state) / GIB, 1),
        "peak_gib_with_masters_and_moments": round(peak / GIB, 1) if state else None,
        "gradient_values_differing": differing,
        "optimizer_step_ms": step_ms(trainer, first, repeats) if state else None,
        **ANCHORS[name],
    }


def step_ms(trainer: Trainer, gradients: list[torch.Tensor], repeats: int) -> dict[str, float]:
    """Median of the norm, and of AdamW with the refresh of the working weights."""
    norm, update = [], []
    for _ in range(repeats + 1):
        norm.append(timed(lambda: gradient_norm(gradients))[0])
        copies = [gradient.clone() for gradient in gradients]
        update.append(timed(partial(trainer._update, copies))[0])
    medians = (1e3 * statistics.median(each[1:]) for each in (norm, update))
    return dict(zip(("norm", "whole_update"), (round(each, 2) for each in medians), strict=True))


def profile(trainer: Trainer, name: str) -> None:
    """Where the device's time goes, in the last mode that ran."""
    samples = batch_of(name, trainer.model_config.vocab_size)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        trainer._accumulate(samples)
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="self_device_time_total", row_limit=30))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_trainer", description=__doc__)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="default: git's HEAD")
    parser.add_argument("--model", choices=list(LAYERS), default="Qwen3-0.6B")
    parser.add_argument("--micro-batch-tokens", default="16384", help="several with commas")
    parser.add_argument("--recompute", default="none,selective,full", help="several with commas")
    parser.add_argument("--no-optimizer", action="store_true", help="no masters and no moments")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one more run")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device here: run this on a machine with one", file=sys.stderr)
        return 1
    rows, trainer = [], make_trainer(options.model, not options.no_optimizer)
    budgets = map(int, options.micro_batch_tokens.split(","))
    for recompute, budget in itertools.product(options.recompute.split(","), budgets):
        rows.append(run(trainer, options.model, recompute, budget, options.repeats))
        torch.cuda.empty_cache()
        print(json.dumps(rows[-1]), flush=True)
    if options.profile:
        profile(trainer, options.model)
    if options.output:
        result = {**environment(options.commit), "unit": "tokens/s", "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
