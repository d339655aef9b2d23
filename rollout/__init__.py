"""The sampler: continuous batching over paged KV.

A request's tokens and logprobs depend on the weights, its prompt and its parameters only.

Public names are loaded on first use, so that reading a config does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.async_engine import AsyncEngine
    from rollout.config import EngineConfig, EngineError
    from rollout.engine import Engine
    from rollout.request import Completion, RequestError, SamplingParams
    from shared_ops.model.lora_config import LoraConfig

_HOMES = {
    "AsyncEngine": "rollout.async_engine",
    "Completion": "rollout.request",
    "Engine": "rollout.engine",
    "EngineConfig": "rollout.config",
    "EngineError": "rollout.config",
    "LoraConfig": "shared_ops.model.lora_config",
    "RequestError": "rollout.request",
    "SamplingParams": "rollout.request",
}

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineError",
    "LoraConfig",
    "RequestError",
    "SamplingParams",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
