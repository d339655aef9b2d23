"""How many KV pages an engine gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rollout.config import EngineConfig, EngineError
from shared_ops.model.config import ModelConfig

PLAUSIBLE_LENGTH = 2048
GIB = 2**30


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page: keys and values of page_size tokens in every layer."""
    numbers = 2 * model.num_layers * page_size * model.num_kv_heads * model.head_dim
    return numbers * dtype.itemsize


def weights_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a decoder's weights (norms and biases, less than a thousandth, are left out)."""
    heads = (model.num_heads + 2 * model.num_kv_heads) + model.num_heads
    layer = model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return (model.num_layers * layer + tables) * dtype.itemsize


def require_weights_fit(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """EngineError where the weights alone take more than is free."""
    size, free = weights_bytes(model, dtype), free_memory(device)
    if size > free:
        raise EngineError(
            f"the model's weights take {size / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}"
            f" and {free / GIB:.1f} GiB is free: use a smaller model or a dtype of half the size,"
            " or free memory"
        )


def choose_num_pages(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """config.num_pages, or enough for max_sequences of a plausible length, within the free memory.

    Raises:
        EngineError: the pages asked for, or even one sequence of a page, do not fit.
    """
    size, free = page_bytes(model, config.page_size, dtype), free_memory(device)
    if config.num_pages is not None:
        if config.num_pages * size > free:
            raise EngineError(
                f"num_pages {config.num_pages} takes {config.num_pages * size / GIB:.1f} GiB of KV"
                f" and {free / GIB:.1f} GiB is free: use at most {free // size}, or None"
            )
        return config.num_pages
    length = min(model.max_positions, PLAUSIBLE_LENGTH)
    wanted = config.max_sequences * -(-length // config.page_size)
    num_pages = min(wanted, int(free * config.memory_share) // size)
    if num_pages < 1:
        raise EngineError(
            f"one KV page takes {size / GIB:.2f} GiB and {free / GIB:.2f} GiB is free: use a"
            " smaller page_size, a model that leaves room, or raise memory_share"
        )
    return num_pages


def free_memory(device: torch.device) -> int:
    """Bytes that may still be taken on the device; a container's limit counts."""
    if device.type == "cuda":
        reserved, taken = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved - taken
    return max(0, min(_system_available(), _container_available()))


def _system_available() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # no Linux: count half of what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _container_available() -> int:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # no limit, or another kind of system
        return 1 << 62


def find_device(name: str) -> torch.device:
    """EngineError where the device is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EngineError(f'device {name!r} is unknown: use "cpu", "cuda" or "auto"') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f'device {name!r} is not there: use "cpu" or "auto"')
    return device


@contextmanager
def naming_memory(config: EngineConfig, num_tokens: int) -> Iterator[None]:
    """EngineError that names the settings, where a forward finds no memory."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        text = str(error).splitlines()[0] if str(error) else ""
        if not (isinstance(error, torch.OutOfMemoryError) or "allocate memory" in text):
            raise
        raise EngineError(
            f"no memory for a forward of {num_tokens} tokens: lower max_batch_tokens"
            f" ({config.max_batch_tokens}), or num_pages or memory_share, which KV takes ({text})"
        ) from None
