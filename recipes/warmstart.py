"""Makes the tiny model of the default run: `python -m recipes.warmstart --out FOLDER`.

Phase 1 teaches the right method. Phase 2 is shorter, and most of its demonstrations take a wrong
operation or stop too early. The result is a model that knows the method but does not prefer it, as
real base models do; GRPO has something to sharpen. (A model that was simply trained too little has
nothing to sharpen: its samples are wrong in ways that no reward sorts out.)

One thread, one seed and deterministic operations: on one kind of machine with one version of torch
the weights come out the same, byte for byte. The sha256 of model.safetensors is the last line.
"""

import argparse
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.tiny_tokenizer import save_tokenizer
from recipes.wordproblems import problem, tempting_answers

MAX_POSITIONS = 512
WARMUP_STEPS = 40
NO_LOSS = -100


@dataclass(frozen=True)
class Phase:
    """A stretch of supervised training.

    tempting_share: share of demonstrations that follow a wrong method.
    final_rate: learning rate of the last step as a share of the highest; linear in between.
    """

    name: str
    steps: int
    learning_rate: float
    tempting_share: float = 0.0
    final_rate: float = 1.0
    batch: int = 64


PHASES = (
    Phase("right method", steps=2000, learning_rate=3e-3, final_rate=0.05),
    Phase("tempting methods", steps=200, learning_rate=5e-4, tempting_share=0.7, final_rate=0.1),
)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 0.85 M float32 parameters, freshly drawn from torch's global generator."""
    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def demonstration(index: int, phase: Phase, seed: int) -> tuple[str, str]:
    """(question, answer) number `index` of train; the answer is a tempting one by a seeded draw."""
    item = problem("train", index)
    rng = Random(f"warmstart {seed} {index}")
    if rng.random() >= phase.tempting_share:
        return item["question"], item["answer"]
    tempting = tempting_answers("train", index)
    return item["question"], tempting[int(rng.random() * len(tempting))]


def encode(
    tokenizer: PreTrainedTokenizerFast, demonstrations: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, labels), both [B, T] int64, padded on the right; labels only on the answers."""
    rows, labels = [], []
    for question, answer in demonstrations:
        user = {"role": "user", "content": question}
        prompt_ids: Any = tokenizer.apply_chat_template(
            [user], add_generation_prompt=True, return_dict=False
        )
        answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append(prompt_ids + answer_ids)
        labels.append([NO_LOSS] * len(prompt_ids) + answer_ids)
    longest = max(map(len, rows))
    filler: Any = tokenizer.pad_token_id
    return _pad(rows, longest, filler), _pad(labels, longest, NO_LOSS)


def _pad(rows: list[list[int]], length: int, filler: int) -> torch.Tensor:
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])


def train_phase(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    first_index: int = 0,
    seed: int = 0,
) -> float:
    """Trains in place on the train problems from `first_index` on; returns the last loss."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(phase, step))
    loss = torch.tensor(float("nan"))
    progress = tqdm(_batches(tokenizer, phase, first_index, seed), phase.name, phase.steps)
    for token_ids, labels in progress:
        # Padding is on the right and attention is causal: no mask is needed.
        loss = model(input_ids=token_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()


def _batches(
    tokenizer: PreTrainedTokenizerFast, phase: Phase, first_index: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(phase.steps):
        start = first_index + step * phase.batch
        indices = range(start, start + phase.batch)
        yield encode(tokenizer, [demonstration(index, phase, seed) for index in indices])


def _rate(phase: Phase, step: int) -> float:
    decayed = 1.0 - (1.0 - phase.final_rate) * step / phase.steps
    return min(1.0, (step + 1) / WARMUP_STEPS) * decayed


def warm_start(out: Path, phases: tuple[Phase, ...] = PHASES, seed: int = 0) -> str:
    """Writes tokenizer, configuration and weights to `out`; returns the weights' sha256."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(out)
    model = build_model(tokenizer)
    first_index = 0
    for phase in phases:
        train_phase(model, tokenizer, phase, first_index, seed)
        first_index += phase.steps * phase.batch
    model.save_pretrained(out)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model of the default run.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.out.is_file() or not os.access(arguments.out.absolute().parent, os.W_OK):
        parser.error(f"--out: {arguments.out} is no folder that can be written; name another")
    digest = warm_start(arguments.out, seed=arguments.seed)
    print(f"{digest}  {arguments.out / 'model.safetensors'}")


if __name__ == "__main__":
    main()
