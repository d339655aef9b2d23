"""Runs with adapters, for tests of them."""

from __future__ import annotations

from engine_runs import requests
from train_samples import drawn, unscored

from rollout import Engine, EngineConfig, LoraConfig
from trainer import Trainer, TrainerConfig, TrainSample

LORA = LoraConfig(rank=4, alpha=8)


def trainer_of(folder, lora: LoraConfig = LORA, **settings) -> Trainer:
    return Trainer(folder, TrainerConfig(**{"learning_rate": 1e-2, "lora": lora, **settings}))


def engine_of(folder, lora: LoraConfig = LORA, **settings) -> Engine:
    return Engine(folder, EngineConfig(lora=lora, **settings))


def take_steps(trainer: Trainer, count: int) -> list[dict]:
    """Steps on what the trainer itself would have drawn; B is not 0 any more after the first."""
    lines = []
    for _ in range(count):
        lines.append(trainer.step(drawn(trainer, unscored(5, seed=trainer.steps))).metrics)
    return lines


def served_samples(engine: Engine, turns: int = 2) -> list[TrainSample]:
    """Completions of requests that join while others decode."""
    waiting = [request for seed in range(turns) for request in requests(seed)]
    asked, done, steps = {}, [], 0
    while waiting or engine.has_work:
        if waiting and steps % 3 == 0:
            prompt, params = waiting.pop(0)
            asked[engine.add_request(prompt, params)] = params.temperature
        done += engine.step()
        steps += 1
    return [
        TrainSample(
            prompt_ids=one.prompt_ids,
            completion_ids=one.token_ids,
            behaviour_logprobs=one.logprobs,
            advantage=one.sample_index - 0.5,
            policy_versions=one.policy_versions,
            temperature=asked[one.request_id],
            request_id=f"{one.request_id}/{one.sample_index}",
        )
        for one in sorted(done, key=lambda one: (one.request_id, one.sample_index))
    ]
