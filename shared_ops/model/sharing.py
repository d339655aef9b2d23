"""Weights on a GPU that another process of the same host opens where they lie: nothing is copied.

CUDA IPC, through torch.multiprocessing. What travels is plain data: a handle for each storage, and
the tensors as views into them. The opened tensors alias the other process's memory, so they change
when it writes; whoever takes them over must be through before that, and should compare a digest.

torch wraps a storage anew each time that it is shared, and keeps a counter and an event with each
wrap. So `Sharer` shares a storage once, and `Opener` opens it once; a publication in the same
storages costs neither anything.
"""

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import reduce_tensor

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class SharingError(RuntimeError):
    """Weights cannot go from process to process on the device; host memory is the other way."""


@dataclass(frozen=True)
class View:
    """A tensor: which storage, and its offset, shape and strides in elements."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class SharedTensors:
    """Tensors as `Opener.open` takes them; pickles anywhere.

    key: equal for publications in the same storages. gpu: see `gpu_of`. device: its index there.
    storages: for each what makes a tensor of all its bytes in another process.
    """

    key: str
    gpu: str
    device: int
    storages: tuple[tuple[Callable[..., Tensor], tuple], ...]
    views: dict[str, View]


def gpu_of(device: torch.device) -> str:
    """Host and UUID of a GPU, equal in all processes; empty for another device."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def describe(tensors: dict[str, Tensor]) -> tuple[list[UntypedStorage], dict[str, View]]:
    """The storages behind tensors, each once, and the tensors as views into them."""
    storages: list[UntypedStorage] = []
    places: dict[int, int] = {}
    views = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        place = places.setdefault(storage.data_ptr(), len(storages))
        if place == len(storages):
            storages.append(storage)
        views[name] = View(
            place,
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
        )
    return storages, views


def rebuild(storages: Sequence[UntypedStorage], views: dict[str, View]) -> dict[str, Tensor]:
    """The tensors that `describe` was given; they alias the storages."""
    found = {}
    for name, view in views.items():
        storage = storages[view.storage]
        empty = torch.empty(0, dtype=view.dtype, device=storage.device)
        found[name] = empty.set_(storage, view.offset, view.shape, view.stride)
    return found


class Sharer:
    """Shares tensors with other processes; their storages are kept until others are shared."""

    def __init__(self) -> None:
        self._storages: list[UntypedStorage] = []
        self._handles: tuple[tuple[Callable[..., Tensor], tuple], ...] = ()
        self._key = ""

    def share(self, tensors: dict[str, Tensor]) -> SharedTensors:
        """What another process opens; all work on the tensors must have been waited for.

        Raises:
            SharingError: they are not on one GPU, or its memory cannot be shared.
        """
        storages, views = describe(tensors)
        devices = {storage.device for storage in storages}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise SharingError(f"the weights are on {_names(devices)} and not on one GPU")
        (device,) = devices
        if _places(storages) != _places(self._storages):
            self._take(storages)
        return SharedTensors(self._key, gpu_of(device), device.index, self._handles, views)

    def _take(self, storages: list[UntypedStorage]) -> None:
        _require_plain_allocator()
        self._storages, self._handles, self._key = [], (), ""
        torch.cuda.ipc_collect()
        try:
            handles = tuple(reduce_tensor(_bytes_of(storage)) for storage in storages)
        except RuntimeError as error:
            raise SharingError(f"torch cannot share this memory: {_line(error)}") from error
        self._storages, self._handles, self._key = storages, handles, uuid.uuid4().hex


class Opener:
    """Opens what a `Sharer` gives; the storages stay open until others come."""

    def __init__(self) -> None:
        self._storages: list[UntypedStorage] = []
        self._key = ""

    def open(self, shared: SharedTensors) -> dict[str, Tensor]:
        """The tensors, aliasing the other process's memory.

        Raises:
            SharingError: this process sees another GPU there, or the memory cannot be opened.
        """
        if shared.key != self._key:
            self.close()
            self._storages = _opened(shared)
            self._key = shared.key
        return rebuild(self._storages, shared.views)

    def close(self) -> None:
        """Give the storages back; no tensor of theirs may be used any more."""
        self._storages, self._key = [], ""
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


def _opened(shared: SharedTensors) -> list[UntypedStorage]:
    if shared.device >= torch.cuda.device_count():
        raise SharingError(f"this process has no GPU number {shared.device}")
    own = gpu_of(torch.device("cuda", shared.device))
    if own != shared.gpu:
        raise SharingError(f"the weights are on GPU {shared.gpu} and here that is {own}")
    try:
        return [make(*arguments).untyped_storage() for make, arguments in shared.storages]
    except RuntimeError as error:
        raise SharingError(
            f"torch cannot open the other process's memory: {_line(error)}"
        ) from error


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _places(storages: Sequence[UntypedStorage]) -> list[tuple[int, int]]:
    """They name storages that are alive: nothing else can lie there."""
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


def _require_plain_allocator() -> None:
    """Expandable segments are shared by file descriptors that another process may be denied."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise SharingError(f"{name} asks for expandable segments: leave them out")


def _names(devices: set[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices))) or "no device"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
