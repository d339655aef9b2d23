"""An engine in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import EngineConfig
from rollout.request import Completion, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from shared_ops.attest import Report
    from shared_ops.model.weights import Manifest


class RolloutActor:
    """The engine's methods as remote calls; arguments and results are plain data and tensors."""

    def __init__(
        self, model_folder: str | Path, config: EngineConfig, num_threads: int | None = None
    ) -> None:
        """num_threads: torch's threads in this process; None leaves them as they are."""
        import torch

        from rollout.engine import Engine

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.engine = Engine(model_folder, config)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[list[Completion]]:
        return self.engine.generate(prompts, params)

    def load_weights(self, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        self.engine.load_weights(manifest, tensors)

    def weights_digest(self) -> str:
        return self.engine.weights_digest()

    def attest(self) -> Report:
        """The contracts of the model's ops, checked on this process's machine and threads."""
        from shared_ops.attest import attest

        engine = self.engine
        return attest(engine.model_config, device=engine.device.type, dtype=engine.config.dtype)

    def version(self) -> int:
        return self.engine.version

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    def trace(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        position: int,
        temperature: float = 1.0,
    ) -> dict[str, Tensor]:
        return self.engine.trace(prompt_ids, token_ids, position, temperature)


def remote_class(**options: Any) -> Any:
    """RolloutActor as a Ray actor class; options as for `ray.remote` (num_cpus, num_gpus, ...)."""
    import ray

    return ray.remote(**options)(RolloutActor) if options else ray.remote(RolloutActor)
