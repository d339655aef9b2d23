"""An engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.admission import one_each
from rollout.config import EngineConfig, InFlight
from rollout.request import Completion, Environment, SamplingParams
from rollout.stops import Decode

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.async_engine import Piece
    from shared_ops.attest import Report
    from shared_ops.model.sharing import SharedTensors
    from shared_ops.model.weights import Manifest

    Published = dict[str, Tensor] | SharedTensors


class RolloutActor:
    """The engine's methods as remote calls; arguments and results are plain data and tensors."""

    def __init__(
        self,
        model_folder: str | Path,
        config: EngineConfig,
        num_threads: int | None = None,
        decode: Decode | None = None,
    ) -> None:
        """num_threads: torch's threads in this process; None leaves them as they are."""
        import torch

        from rollout.engine import Engine
        from shared_ops.model.sharing import Opener

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.engine = Engine(model_folder, config, decode)
        self._opener = Opener()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        environment: Environment | None = None,
    ) -> list[list[Completion]]:
        return self.engine.generate(prompts, params, environment=environment)

    def load_weights(
        self, manifest: Manifest, tensors: Published, in_flight: InFlight | None = None
    ) -> list[Completion]:
        """As `Engine.load_weights`; tensors that are shared stay where they are until then.

        Raises:
            SharingError: the shared tensors cannot be opened here; nothing has changed.
        """
        return self.engine.load_weights(manifest, self._opened(tensors), in_flight)

    def _opened(self, tensors: Published) -> dict[str, Tensor]:
        return tensors if isinstance(tensors, dict) else self._opener.open(tensors)

    def gpu(self) -> str:
        """The engine's GPU, as `gpu_of`; empty for another device."""
        from shared_ops.model.sharing import gpu_of

        return gpu_of(self.engine.device)

    def weights_digest(self) -> str:
        return self.engine.weights_digest()

    def attest(self) -> Report:
        """The contracts of the model's ops, checked on this process's machine and threads."""
        return self.engine.attest()

    def use_plain(self, functions: Sequence[str]) -> None:
        """Compute these functions by their plain schedules from now on (shared_ops.elementary)."""
        from shared_ops.elementary import use_plain

        use_plain(functions)

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


class AsyncRolloutActor(RolloutActor):
    """Accepts requests while it steps. As a Ray actor, calls of `generate`, `resume` and `stream`
    run beside each other, up to max_concurrency; whatever else touches the engine, `load_weights`
    above all, runs between two steps of all of them. Cancelling a call aborts its requests."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """As RolloutActor."""
        from rollout.async_engine import AsyncEngine

        super().__init__(*arguments, **settings)
        self.front = AsyncEngine(self.engine)

    async def generate(  # type: ignore[override]
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        environment: Environment | None = None,
    ) -> list[list[Completion]]:
        """As Engine.generate with on_error="return"; a prompt that is refused starts none."""
        pairs = list(zip(prompts, one_each(params, len(prompts)), strict=True))
        for prompt, each in pairs:
            self.engine.check_request(prompt, each)
        calls = (self.front.generate(prompt, each, environment) for prompt, each in pairs)
        return list(await asyncio.gather(*calls))

    async def load_weights(  # type: ignore[override]
        self, manifest: Manifest, tensors: Published, in_flight: InFlight | None = None
    ) -> list[Completion]:
        return await self.front.load_weights(manifest, self._opened(tensors), in_flight)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        environment: Environment | None = None,
    ) -> AsyncIterator[Piece]:
        """Tokens as they are drawn; through Ray, an iterator of references to pieces."""
        async for piece in self.front.stream(prompt, params, environment):
            yield piece

    async def resume(
        self,
        completion: Completion,
        params: SamplingParams,
        environment: Environment | None = None,
    ) -> Completion:
        return await self.front.resume(completion, params, environment)

    async def weights_digest(self) -> str:  # type: ignore[override]
        return await self.front.between_steps(super().weights_digest)

    async def attest(self) -> Report:  # type: ignore[override]
        return await self.front.between_steps(super().attest)

    async def stats(self) -> dict[str, float]:  # type: ignore[override]
        return await self.front.between_steps(super().stats)

    async def trace(  # type: ignore[override]
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        position: int,
        temperature: float = 1.0,
    ) -> dict[str, Tensor]:
        run = super().trace
        return await self.front.between_steps(run, prompt_ids, token_ids, position, temperature)


def remote_class(actor: type[RolloutActor] = RolloutActor, **options: Any) -> Any:
    """An actor as a Ray actor class; options as for `ray.remote` (num_cpus, num_gpus, ...)."""
    import ray

    return ray.remote(**options)(actor) if options else ray.remote(actor)
