"""An asyncio front: requests come and go while the engine steps in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rollout.config import InFlight
from rollout.engine import Engine
from rollout.params import SamplingParams
from rollout.request import Completion, Environment

if TYPE_CHECKING:
    from torch import Tensor

    from shared_ops.model.weights import Manifest


class Piece(NamedTuple):
    """What one sample gained in a step; `completion` with its last piece, None before.

    Pieces of a sample, one behind the other, are its completion.
    """

    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    completion: Completion | None = None


class AsyncEngine:
    """Takes the engine over: nobody else may step it. To be used from one event loop.

    A consumer that is cancelled, or stops listening, aborts its request. An exception that ends a
    step (no memory, say) is raised for everybody who waits, and their requests are aborted.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(1, "engine", torch.set_num_threads, (threads,))
        self._lock = asyncio.Lock()
        self._queues: dict[str, asyncio.Queue[Piece | BaseException]] = {}
        self._sent: dict[tuple[str, int], int] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        environment: Environment | None = None,
    ) -> list[Completion]:
        """The n completions of one prompt, by sample index; a failed one has reason "error".

        Raises:
            RequestError: the request can never be served.
        """
        pieces = self.stream(prompt, params, environment)
        done = [piece.completion async for piece in pieces if piece.completion is not None]
        return sorted(done, key=lambda one: one.sample_index)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        environment: Environment | None = None,
    ) -> AsyncIterator[Piece]:
        """Tokens as they are drawn. Raises as `generate` does."""
        add = partial(self.engine.add_request, prompt, params, environment)
        async for piece in self._followed(add, params.n):
            yield piece

    async def resume(
        self,
        completion: Completion,
        params: SamplingParams,
        environment: Environment | None = None,
    ) -> Completion:
        """Go on with an aborted completion, as `Engine.resume`; the whole of it."""
        add = partial(self.engine.resume, completion, params, environment)
        (done,) = [one.completion async for one in self._followed(add, 1) if one.completion]
        return done

    async def _followed(self, add: Callable[[], str], left: int) -> AsyncIterator[Piece]:
        """The pieces of the request that `add` makes, until so many samples have ended."""
        queue: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        async with self._lock:
            name = add()
            self._queues[name] = queue
        try:
            self._start()
            while left:
                piece = await queue.get()
                if isinstance(piece, BaseException):
                    raise piece
                left -= piece.completion is not None
                yield piece
        finally:
            self._forget(name)
            if left:
                async with self._lock:
                    self.engine.abort(name)

    async def load_weights(
        self, manifest: Manifest, tensors: dict[str, Tensor], in_flight: InFlight | None = None
    ) -> list[Completion]:
        """Between two steps, as `Engine.load_weights`; who waits for what it aborts receives it."""
        cut = await self.between_steps(self.engine.load_weights, manifest, tensors, in_flight)
        self._deliver(cut)
        return cut

    def close(self) -> None:
        """End the engine's thread; nobody may wait for a completion."""
        self._executor.shutdown()

    async def between_steps(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns, called in the engine's thread while no step runs."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._executor, function, *arguments)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                # The thread goes on; nobody else may touch the engine before it is through.
                await asyncio.wait([work])
                raise

    def _start(self) -> None:
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.get_running_loop().create_task(self._step_on())

    async def _step_on(self) -> None:
        while self._queues:
            try:
                done = await self.between_steps(self.engine.step)
            except Exception as error:
                for queue in self._queues.values():
                    queue.put_nowait(error)
                return
            self._deliver(done)
            await asyncio.sleep(0)

    def _deliver(self, done: Sequence[Completion]) -> None:
        for sample in self.engine.scheduler.running:
            name = sample.request.request_id
            if name in self._queues:
                drawn = sample.tokens[len(sample.request.prompt_ids) :]
                self._put(name, sample.index, drawn, sample.logprobs)
        for one in done:
            if one.request_id in self._queues:
                self._put(one.request_id, one.sample_index, one.token_ids, one.logprobs, one)

    def _put(
        self,
        name: str,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        completion: Completion | None = None,
    ) -> None:
        sent = self._sent.get((name, index), 0)
        self._sent[name, index] = len(tokens)
        if len(tokens) > sent or completion is not None:
            piece = Piece(index, tuple(tokens[sent:]), tuple(logprobs[sent:]), completion)
            self._queues[name].put_nowait(piece)

    def _forget(self, name: str) -> None:
        del self._queues[name]
        self._sent = {key: count for key, count in self._sent.items() if key[0] != name}
