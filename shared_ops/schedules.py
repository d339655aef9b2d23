"""An op's forward and backward without autograd, for gradients of several ops written by hand."""

import importlib
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from shared_ops import cuda


class Schedules(NamedTuple):
    """The modules that compute an op on a tensor's device: its kernels, or its plain torch."""

    linear: ModuleType
    lora: ModuleType
    rmsnorm: ModuleType
    rope: ModuleType
    swiglu: ModuleType
    attention: ModuleType


def schedules_for(x: Tensor) -> Schedules:
    """Raises DeviceError as `cuda.kernels` does."""
    if x.is_cuda:
        return Schedules(*(cuda.kernels(op, x) for op in Schedules._fields))
    modules = (importlib.import_module(f"shared_ops.{op}.reference") for op in Schedules._fields)
    return Schedules(*modules)
