"""Draws and scores a few completions and prints every bit as JSON, for a process of its own.

python on_processor.py FOLDER THREADS [FUNCTION ...]    (functions to compute by plain schedules)
"""

from __future__ import annotations

import json
import sys

import torch

from rollout import Engine, EngineConfig, SamplingParams
from shared_ops.elementary import use_plain
from trainer import Trainer, TrainerConfig, TrainSample

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [*range(20, 60)]]


def main(folder: str, threads: int, functions: list[str]) -> dict:
    torch.set_num_threads(threads)
    use_plain(functions)
    engine, trainer = Engine(folder, EngineConfig()), Trainer(folder, TrainerConfig())
    drawn = engine.generate(PROMPTS, SamplingParams(max_tokens=8, n=2, seed=3, ignore_eos=True))
    completions = [one for each in drawn for one in each]
    scored = trainer.logprobs([TrainSample.of(one, advantage=1.0) for one in completions])
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "facts": dict(engine.attest().facts),
        "tokens": [one.token_ids for one in completions],
        "drawn": [[x.hex() for x in one.logprobs] for one in completions],
        "scored": [[x.hex() for x in one.tolist()] for one in scored],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
