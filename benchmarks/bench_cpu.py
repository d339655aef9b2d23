"""Rollout and training step on one CPU thread, beside what others take for the same work.

    python -m benchmarks.bench_cpu [--model FOLDER] [--prompts 16] [--completions 8] [--tokens 64]

Each side runs once unmeasured, then all take turns; medians of wall and processor time are printed,
and written with --output FILE. Weights are float32.

Rollout: random prompts of 20 to 39 tokens, every completion of exactly --tokens. transformers'
`generate` pads the prompts to one length, computes each as often as it is completed, and returns no
log-probabilities. Step: one optimiser step on those completions. With TRL (`pip install --no-deps
trl==1.16.0`) it is GRPOTrainer's `training_step`, given the completions instead of drawing them,
then clipping and its optimiser's step, without the gradient checkpointing that it has by default;
without TRL a plain forward and backward of transformers' model with the same loss. Ours also
compares every log-probability with the sampler's, and makes the metrics.
"""

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.models import EMBEDDED_MODEL
from rollout import Engine, EngineConfig, SamplingParams
from shared_ops.attest_cache import processor_name
from trainer import Trainer, TrainerConfig, TrainSample

PROJECT = Path(__file__).resolve().parent.parent
RUNS = 5
# The weights stay what they are, so that every turn does the same.
LEARNING_RATE = 0.0
Sides = dict[str, Callable[[int], Any]]


class Load(NamedTuple):
    """Prompts, each completed `completions` times with `tokens` tokens."""

    prompts: list[list[int]]
    completions: int
    tokens: int

    def params(self, seed: int) -> SamplingParams:
        return SamplingParams(self.tokens, n=self.completions, seed=seed, ignore_eos=True)


class Padded(NamedTuple):
    """Prompts as transformers takes them: padded at their beginning, one row a completion."""

    ids_BP: Tensor
    mask_BP: Tensor


def random_load(count: int, completions: int, tokens: int, vocabulary: int) -> Load:
    draw = random.Random(0)
    lengths = [draw.randrange(20, 40) for _ in range(count)]
    prompts = [[draw.randrange(5, vocabulary) for _ in range(length)] for length in lengths]
    return Load(prompts, completions, tokens)


def padded(load: Load) -> Padded:
    longest = max(map(len, load.prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in load.prompts]
    masks = [[0] * (longest - len(p)) + [1] * len(p) for p in load.prompts]
    both = (torch.tensor(x).repeat_interleave(load.completions, 0) for x in (rows, masks))
    return Padded(*both)


def rollout_sides(folder: Path, load: Load, engine: Engine) -> Sides:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ordinary = Engine(folder, EngineConfig(exact=False, max_sequences=engine.config.max_sequences))
    prompts, count = padded(load), load.tokens

    def theirs(seed: int) -> None:
        torch.manual_seed(seed)
        lengths = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
        draws = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        model.generate(prompts.ids_BP, attention_mask=prompts.mask_BP, **lengths, **draws)

    return {
        "exact": lambda seed: engine.generate(load.prompts, load.params(seed)),
        "same engine, torch's ops": lambda seed: ordinary.generate(load.prompts, load.params(seed)),
        "transformers": theirs,
    }


def step_sides(folder: Path, load: Load, engine: Engine) -> Sides:
    drawn = [one for group in engine.generate(load.prompts, load.params(1)) for one in group]
    advantages = [1.0 if index % 2 else -1.0 for index in range(len(drawn))]
    trainer = Trainer(folder, TrainerConfig(learning_rate=LEARNING_RATE))
    samples = [TrainSample.of(*pair) for pair in zip(drawn, advantages, strict=True)]

    def ours(seed: int) -> None:
        versions = (trainer.version,) * load.tokens
        fresh = [replace(sample, policy_versions=versions) for sample in samples]
        assert trainer.step(fresh).tokens_compared == len(drawn) * load.tokens

    ids_BC = torch.tensor([completion.token_ids for completion in drawn])
    given = folder, padded(load), ids_BC, torch.tensor(advantages)
    if not _is_there("trl"):
        return {"exact": ours, "transformers, same loss": plain_step(*given)}
    return {"exact": ours, "TRL": trl_step(*given)}


def trl_step(
    folder: Path, prompts: Padded, ids_BC: Tensor, advantage_B: Tensor
) -> Callable[[int], None]:
    """GRPOTrainer given its completions."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    mask_BC = torch.ones_like(ids_BC)
    given = {
        "prompt_ids": prompts.ids_BP,
        "prompt_mask": prompts.mask_BP,
        "completion_ids": ids_BC,
        "completion_mask": mask_BC,
        "advantages": advantage_B,
        "num_items_in_batch": mask_BC.sum(),
    }

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return dict(given)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(ids_BC),
        num_generations=2,
        learning_rate=LEARNING_RATE,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(ids_BC)}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1

    def step(seed: int) -> None:
        trainer.training_step(trainer.model, [], None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_step(
    folder: Path, prompts: Padded, ids_BC: Tensor, advantage_B: Tensor
) -> Callable[[int], None]:
    """transformers' model with the loss of a fresh batch, where the ratio is 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ids_BT = torch.cat((prompts.ids_BP, ids_BC), 1)
    mask_BT = torch.cat((prompts.mask_BP, torch.ones_like(ids_BC)), 1)
    kept = ids_BC.shape[1] + 1

    def step(seed: int) -> None:
        logits_BCV = model(ids_BT, attention_mask=mask_BT, logits_to_keep=kept).logits[:, :-1]
        logprobs_BC = logits_BCV.log_softmax(-1).gather(2, ids_BC.unsqueeze(2)).squeeze(2)
        ratio_BC = (logprobs_BC - logprobs_BC.detach()).exp()
        (-ratio_BC * advantage_B.unsqueeze(1)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(sides: Sides, runs: int) -> dict[str, dict[str, Any]]:
    """Of each side, medians over `runs` turns after one that is not measured, and all of them."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(runs + 1):
        for name, run in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run(turn)
            turns[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    found = {}
    for name, both in turns.items():
        columns = zip(("wall_seconds", "cpu_seconds"), zip(*both[1:], strict=True), strict=True)
        found[name] = {
            kind: {"median": round(statistics.median(x), 4), "all": [round(y, 4) for y in x]}
            for kind, x in columns
        }
    return found


def table(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [f"{'':<10}{'':<28}{'wall':>10}{'processor':>12}"]
    for work, sides in found.items():
        for name, kinds in sides.items():
            wall, cpu = (kinds[kind]["median"] for kind in ("wall_seconds", "cpu_seconds"))
            lines.append(f"{work:<10}{name:<28}{wall:>8.3f} s{cpu:>10.3f} s")
    return lines


def environment(threads: int) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, capture_output=True, text=True
    )
    return {
        "processor": processor_name(),
        "torch": torch.__version__,
        "versions": {name: version(name) for name in ("transformers", "trl") if _is_there(name)},
        "threads": threads,
        "commit": commit.stdout.strip(),
    }


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="One CPU thread, beside transformers and TRL")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", choices=WORK)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    rows = given.prompts * given.completions
    engine = Engine(given.model, EngineConfig(max_sequences=rows))
    load = random_load(given.prompts, given.completions, given.tokens, engine.vocab_limit)
    found = {
        work: measure(sides(given.model, load, engine), given.runs)
        for work, sides in WORK.items()
        if given.only in (None, work)
    }
    print("\n".join(table(found)))
    if given.output:
        shape = {"prompts": given.prompts, "completions": given.completions, "tokens": given.tokens}
        result = {"environment": environment(given.threads), "load": shape, "results": found}
        given.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


WORK = {"rollout": rollout_sides, "step": step_sides}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
