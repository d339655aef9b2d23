"""What a CUDA machine must have before a schedule of ours runs on it, and the way to the kernels.

No triton is imported before a CUDA tensor reaches an op, so a machine without a GPU needs none.
"""

import functools
import importlib
import re
from types import ModuleType

import torch
from torch import Tensor

MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class DeviceError(ValueError):
    """This device, or what is installed for it, cannot run the CUDA schedules."""


def kernels(op: str, x: Tensor) -> ModuleType:
    """The module `shared_ops.<op>.kernels`, for a tensor on a CUDA device.

    Raises:
        DeviceError: the GPU is too old, triton is missing or too old, or the dtype is none of ours.
    """
    if x.dtype not in DTYPES:
        raise DeviceError(
            f"{op}: dtype {str(x.dtype).removeprefix('torch.')} has no CUDA schedule: use bfloat16,"
            " float16 or float32"
        )
    return _kernels(op, x.device)


@functools.cache
def _kernels(op: str, device: torch.device) -> ModuleType:
    require_device(device)
    require_triton()
    return importlib.import_module(f"shared_ops.{op}.kernels")


def require_device(device: torch.device) -> None:
    """Raises DeviceError for a GPU older than sm_80 (no bfloat16 tensor cores)."""
    if torch.version.cuda is None:
        raise DeviceError('device "cuda" here is no NVIDIA GPU: use device "cpu"')
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} is sm_{capability[0]}{capability[1]} and the"
            ' CUDA schedules need sm_80 (A100) or newer: use device "cpu"'
        )


def require_triton() -> str:
    """triton's version; DeviceError where it is missing or too old."""
    wanted = ".".join(map(str, MIN_TRITON))
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        raise DeviceError(
            f'device "cuda" needs triton {wanted} or newer: pip install "triton>={wanted}"'
        ) from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_TRITON:
        raise DeviceError(
            f'triton {version} is too old for device "cuda": pip install "triton>={wanted}"'
        )
    return version


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled here, for what may also run without."""
    try:
        return bool(require_triton())
    except DeviceError:
        return False
