"""An engine in a process of its own, asked over a pipe that carries pickled bytes; no Ray."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import torch

from rollout import EngineConfig, SamplingParams
from rollout.actor import RolloutActor

PATIENCE = 120  # seconds that no answer comes near

Drawn = list[tuple[tuple[int, ...], tuple[float, ...]]]


class AskedActor(RolloutActor):
    """What the tests ask beside the actor's own methods."""

    def drawn(self, prompts: list[list[int]], params: SamplingParams) -> Drawn:
        """Tokens and log-probabilities of every completion."""
        groups = self.generate(prompts, params)
        return [(one.token_ids, one.logprobs) for group in groups for one in group]

    def captured(self) -> int:
        """Decode steps that are captured as graphs."""
        return len(self.engine.graphs._graphs) if self.engine.graphs is not None else 0

    def allocated(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


class OtherEngine:
    """`ask(method, ...)` is the actor's method there; its exceptions are raised here."""

    def __init__(self, folder, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, str(folder), config
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.ask("version")

    def ask(self, name: str, *arguments: Any) -> Any:
        self._pipe.send_bytes(pickle.dumps((name, arguments)))
        assert self._pipe.poll(PATIENCE), f"no answer to {name}"
        value = pickle.loads(self._pipe.recv_bytes())
        if isinstance(value, BaseException):
            raise value
        return value

    def close(self) -> None:
        self._pipe.close()
        self._process.join(PATIENCE)
        self._process.kill()


def _serve(pipe, folder: str, config: EngineConfig) -> None:
    actor = AskedActor(folder, config)
    while True:
        try:
            name, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = getattr(actor, name)(*arguments)
        except Exception as error:
            answer = error
        pipe.send_bytes(pickle.dumps(answer))
