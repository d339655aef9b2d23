"""Forward and backward of a GRPO-shaped batch: tokens per second that are not padding, and memory.

Lengths uniform in 256..1024, the log probability of every token, bfloat16, random weights, no
optimiser step. Synchronised clock, median, warm-up left out. Gradients of two runs are compared.

Example: python -m benchmarks.bench_trainer --output benchmarks/results/trainer_h200.json
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.bench_ops import environment
from benchmarks.random_models import LAYERS, make_folder, replace_files
from trainer import Trainer, TrainerConfig, TrainSample

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


def run(name: str, micro_batch_tokens: int, repeats: int) -> dict:
    config = TrainerConfig(
        device="cuda", dtype="bfloat16", mode="none", micro_batch_tokens=micro_batch_tokens
    )
    with tempfile.TemporaryDirectory() as base, replace_files():
        trainer = Trainer(make_folder(name, Path(base)), config)
    samples = batch_of(name, trainer.model_config.vocab_size)
    tokens = sum(sample.length for sample in samples)
    _, first = trainer._accumulate(samples)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() - sum(x.numel() * x.element_size() for x in first)
    seconds, differing = [], 0
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        _, gradients = trainer._accumulate(samples)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        differing += sum(int((a != b).sum()) for a, b in zip(first, gradients, strict=True))
        del gradients
    doubled = sum(x.numel() * x.element_size() for x in first)
    return {
        "model": name,
        "batch": f"{len(samples)} x <= 1024, {tokens:,} tokens",
        "micro_batch_tokens": micro_batch_tokens,
        "tokens_per_s": round(tokens / statistics.median(seconds)),
        "runs": [round(tokens / each) for each in seconds],
        # The first run's gradients are held beside the later ones for the comparison only.
        "peak_gib": round((torch.cuda.max_memory_allocated() - doubled) / GIB, 1),
        "of_it_weights_masters_moments_gib": round(held / GIB, 1),
        "gradient_values_differing": differing,
        **ANCHORS[name],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_trainer", description=__doc__)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="default: git's HEAD")
    parser.add_argument("--model", choices=list(LAYERS), default="Qwen3-0.6B")
    parser.add_argument("--micro-batch-tokens", default="4096,16384")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device here: run this on a machine with one", file=sys.stderr)
        return 1
    rows = []
    for budget in map(int, options.micro_batch_tokens.split(",")):
        rows.append(run(options.model, budget, options.repeats))
        torch.cuda.empty_cache()
        print(json.dumps(rows[-1]), flush=True)
    if options.output:
        result = {**environment(options.commit), "unit": "tokens/s", "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
