"""The trainer: scores samples with `shared_ops`, proves parity, and takes optimiser steps.

Public names are loaded on first use, so that reading a configuration needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared_ops.model.lora_config import LoraConfig
    from trainer.checkpoint import CheckpointError
    from trainer.config import TrainerConfig, TrainerConfigError
    from trainer.parity import ParityError, ParityReport
    from trainer.sample import TrainSample, TrainStats
    from trainer.trainer import Trainer

_HOMES = {
    "CheckpointError": "trainer.checkpoint",
    "LoraConfig": "shared_ops.model.lora_config",
    "ParityError": "trainer.parity",
    "ParityReport": "trainer.parity",
    "TrainSample": "trainer.sample",
    "TrainStats": "trainer.sample",
    "Trainer": "trainer.trainer",
    "TrainerConfig": "trainer.config",
    "TrainerConfigError": "trainer.config",
}

__all__ = [
    "CheckpointError",
    "LoraConfig",
    "ParityError",
    "ParityReport",
    "TrainSample",
    "TrainStats",
    "Trainer",
    "TrainerConfig",
    "TrainerConfigError",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
