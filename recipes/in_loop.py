"""An asyncio actor in a thread of this process, with the face of a remote one."""

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any


class InLoop:
    """Methods of the actor wait for their results; `submit` does not."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._loop = actor, asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str):
        method = getattr(self._actor, name)
        return lambda *args, **kwargs: self._call(method, args, kwargs).result()

    def submit(self, prompt: Sequence[int], params: Any) -> Future:
        """A future of `generate` for one prompt."""
        return self._call(self._actor.generate, ([prompt], [params]), {})

    def close(self) -> None:
        """Cancel what is under way, which aborts its requests, and end the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, method, args: tuple, kwargs: dict) -> Future:
        return asyncio.run_coroutine_threadsafe(_awaited(method, args, kwargs), self._loop)


async def _awaited(method, args: tuple, kwargs: dict) -> Any:
    result = method(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
