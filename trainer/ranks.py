"""The processes of a data-parallel group: where each one's tensors live, and sums over them.

Sums over ranks go left to right in rank order, so that they are equal from run to run.
"""

import atexit
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.config import TrainerConfigError

CHUNK = 1 << 24


class Ranks:
    """One process, or a group that accelerate found in the environment (torchrun, or its own
    launcher); every rank is given its own share of the samples.

    Attributes:
        device: of this process.
        count: processes in the group.
        index: of this one.
        is_first: whether this one writes files.
    """

    def __init__(self, device: str) -> None:
        from accelerate import PartialState

        chosen = _find_device(device)
        state = PartialState(cpu=chosen.type == "cpu")
        self.count, self.index = state.num_processes, state.process_index
        self.is_first = state.is_main_process
        self.device = chosen
        if self.count > 1 and chosen.type == "cuda":
            self.device = torch.device("cuda", state.local_process_index)
        self._wait = state.wait_for_everyone
        if self.count > 1:
            # A group that still stands at exit can abort the process from one of its threads.
            atexit.register(state.destroy_process_group)

    def wait(self) -> None:
        """Until every rank is here."""
        self._wait()

    def gather(self, values: list[float]) -> list[list[float]]:
        """Every rank's values, in rank order."""
        if self.count == 1:
            return [values]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [rank.tolist() for rank in self.gather_tensor(own)]

    def sum(self, values: list[float]) -> list[float]:
        return [sum(column) for column in zip(*self.gather(values), strict=True)]

    def max(self, values: list[float]) -> list[float]:
        return [max(column) for column in zip(*self.gather(values), strict=True)]

    def all_pass(self, check: Callable[[], None]) -> None:
        """Run a check of this rank's input; where one rank's fails, none waits for it for ever.

        Raises:
            ValueError: this rank's own, or one that names the rank whose check failed.
        """
        error = None
        try:
            check()
        except ValueError as caught:
            error = caught
        failed = [rank for rank, (flag,) in enumerate(self.gather([float(bool(error))])) if flag]
        if error:
            raise error
        if failed:
            raise ValueError(f"rank {failed[0]} was given input that it refused; it says why")

    def most(self, value: int) -> int:
        """The largest of every rank's values."""
        return int(self.max([float(value)])[0])

    def sum_(self, tensors: list[Tensor]) -> None:
        """Replace each contiguous tensor by its sum over ranks, a chunk at a time."""
        if self.count == 1:
            return
        for tensor in tensors:
            for chunk in tensor.view(-1).split(CHUNK):
                padded = torch.nn.functional.pad(chunk, (0, -len(chunk) % self.count))
                own = padded.new_empty(len(padded) // self.count)
                self.scatter_sum(own, padded)
                chunk.copy_(torch.cat(self.gather_tensor(own))[: len(chunk)])

    def scatter_sum(self, own: Tensor, parts: Tensor) -> None:
        """own [n]: this rank's place of the sum over ranks of their parts [count x n]."""
        received = torch.empty_like(parts)
        torch.distributed.all_to_all_single(received, parts)
        first, *others = received.split(len(own))
        own.copy_(first)
        for other in others:
            own.add_(other)

    def gather_tensor(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor of this shape, in rank order."""
        received = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(received, own)
        return received


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TrainerConfigError(
            f'device {name!r} is unknown: use "cpu", "cuda" or "auto"'
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainerConfigError(f'device {name!r} is not there: use "cpu" or "auto"')
    return device
