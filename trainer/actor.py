"""A trainer in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import TrainerConfig
from trainer.sample import TrainSample, TrainStats

if TYPE_CHECKING:
    from torch import Tensor

    from shared_ops.attest import Report
    from shared_ops.model.sharing import SharedTensors
    from shared_ops.model.weights import Manifest


class TrainerActor:
    """The trainer's methods as remote calls; arguments and results are plain data and tensors.

    `publish` gives tensors in storages of their own, which do not change with the next step;
    `lend` and `share` copy nothing, so an engine must have loaded theirs before it.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: TrainerConfig | None = None,
        num_threads: int | None = None,
    ) -> None:
        """num_threads: torch's threads in this process; None leaves them as they are."""
        import torch

        from shared_ops.model.sharing import Sharer
        from trainer.trainer import Trainer

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.trainer = Trainer(model_folder, config)
        self._sharer = Sharer()

    def step(self, samples: Sequence[TrainSample]) -> TrainStats:
        return self.trainer.step(samples)

    def logprobs(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        return self.trainer.logprobs(samples)

    def with_old_logprobs(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        return self.trainer.with_old_logprobs(samples)

    def with_lag_proof(
        self, samples: Sequence[TrainSample], share: float = 1.0, seed: int = 0
    ) -> list[TrainSample]:
        return self.trainer.with_lag_proof(samples, share, seed)

    def publish(self) -> tuple[Manifest, dict[str, Tensor]]:
        from trainer.publish import own_storage

        return own_storage(self.trainer.publish())

    def lend(self) -> tuple[Manifest, dict[str, Tensor]]:
        """For an engine in this process: the tensors alias the weights."""
        return self.trainer.publish()

    def share(self) -> tuple[Manifest, SharedTensors]:
        """For an engine in another process on the same GPU: `lend`, by handles.

        Raises:
            SharingError: the weights are on no GPU, or its memory cannot be shared.
        """
        manifest, tensors = self.trainer.publish()
        return manifest, self._sharer.share(tensors)

    def gpu(self) -> str:
        """Where what is published lies, as `gpu_of`; empty where it cannot be shared."""
        from shared_ops.model.sharing import gpu_of

        return gpu_of(self.trainer.ranks.device)

    def weights_digest(self) -> str:
        return self.trainer.publish()[0].digest

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        self.trainer.save(path, extra)

    def load(self, path: str | Path) -> dict[str, Any]:
        return self.trainer.load(path)

    def attest(self) -> Report:
        """The contracts of the model's ops, checked on this process's machine and threads."""
        return self.trainer.attest()

    def use_plain(self, functions: Sequence[str]) -> None:
        """Compute these functions by their plain schedules from now on (shared_ops.elementary)."""
        from shared_ops.elementary import use_plain

        use_plain(functions)

    def version(self) -> int:
        return self.trainer.version

    def trace(self, sample: TrainSample, position: int) -> dict[str, Tensor]:
        return self.trainer.trace(sample, position)


def remote_class(**options: Any) -> Any:
    """TrainerActor as a Ray actor class; options as for `ray.remote` (num_cpus, num_gpus, ...)."""
    import ray

    return ray.remote(**options)(TrainerActor) if options else ray.remote(TrainerActor)
