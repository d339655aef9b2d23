"""Low-rank adapters beside a decoder's frozen weights: storage, peft's names, reading, writing.

Adapters of one fused product are stored together, as `lora` takes them: the A of q, k and v are one
array and their B another. peft's tensors are views into them. Nothing is ever merged into W.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_ops.model.config import ModelConfig
from shared_ops.model.lora_config import (
    GROUPS,
    TENSORS_FILE,
    LoraConfig,
    LoraError,
    target_shapes,
    write_settings,
)
from shared_ops.model.weights import Leaves, WeightsError
from shared_ops.opset import OpSet

PREFIX = "base_model.model."


@dataclass
class Adapter:
    """The adapters of one product; the arguments of `lora`, and the module paths they belong to."""

    a_QK: Tensor
    b_MR: Tensor
    spans: tuple[tuple[int, int], ...]
    scale: float
    paths: tuple[str, ...]

    def views(self) -> dict[str, Tensor]:
        rank = self.b_MR.shape[1]
        rows = self.b_MR.split([end - first for first, end in self.spans])
        pairs = zip(self.paths, self.a_QK.split(rank), rows, strict=True)
        return {
            f"{path}.lora_{name}.weight": tensor
            for path, a_RK, b_NR in pairs
            for name, tensor in (("A", a_RK), ("B", b_NR))
        }


@dataclass
class LayerAdapters:
    """By the product that they stand beside; None where no module of it is a target."""

    qkv: Adapter | None = None
    output: Adapter | None = None
    gate_up: Adapter | None = None
    down: Adapter | None = None

    def present(self) -> list[tuple[str, Adapter]]:
        found = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, adapter) for name, adapter in found if adapter is not None]


NO_ADAPTERS = LayerAdapters()


class Adapters(Leaves):
    """All adapters of a decoder, 0 until they are filled."""

    def __init__(
        self,
        config: ModelConfig,
        lora: LoraConfig,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.config, self.lora, self.scale = config, lora, lora.scale
        self.layers = [
            LayerAdapters(
                **{n: _zeros(config, lora, paths, dtype, device) for n, paths in GROUPS.items()}
            )
            for _ in range(config.num_layers)
        ]

    def named_leaves(self) -> list[tuple[str, Tensor]]:
        return [
            (f"layer {index}: {name} {part}", tensor)
            for index, layer in enumerate(self.layers)
            for name, adapter in layer.present()
            for part, tensor in (("A", adapter.a_QK), ("B", adapter.b_MR))
        ]

    def views(self) -> dict[str, Tensor]:
        """peft's name -> detached view into the leaves."""
        return {
            f"{PREFIX}model.layers.{index}.{name}": view.detach()
            for index, layer in enumerate(self.layers)
            for _, adapter in layer.present()
            for name, view in adapter.views().items()
        }

    def empty_like(self, dtype: torch.dtype, device: torch.device | str) -> "Adapters":
        other = Adapters(self.config, self.lora, dtype, device)
        other.base = self.base
        return other


def _zeros(
    config: ModelConfig, lora: LoraConfig, paths: tuple[str, ...], dtype: torch.dtype, device
) -> Adapter | None:
    """Adapters of those modules of one fused product that are targets."""
    shapes, chosen, spans, first, inputs = target_shapes(config), [], [], 0, 0
    for path in paths:
        outputs, inputs = shapes[path.rpartition(".")[2]]
        if path.endswith(lora.target_modules):
            chosen.append(path)
            spans.append((first, first + outputs))
        first += outputs
    if not chosen:
        return None
    rows = sum(end - start for start, end in spans)
    return Adapter(
        a_QK=torch.zeros(len(chosen) * lora.rank, inputs, dtype=dtype, device=device),
        b_MR=torch.zeros(rows, lora.rank, dtype=dtype, device=device),
        spans=tuple(spans),
        scale=lora.scale,
        paths=tuple(chosen),
    )


def project(
    ops: OpSet,
    adapter: Adapter | None,
    x_TK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    see: Callable[[str, Tensor], None] | None = None,
) -> Tensor:
    """[T, N]: the frozen product, and the low-rank path where there is one.

    see: shown the frozen product, for finding a differing op.
    """
    y_TN = ops.linear(x_TK, w_NK, bias_N)
    if adapter is None:
        return y_TN
    if see is not None:
        see(f"linear below the adapters of {', '.join(adapter.paths)}", y_TN)
    return ops.lora(y_TN, x_TK, adapter.a_QK, adapter.b_MR, adapter.spans, adapter.scale)


@torch.no_grad()
def start_adapters(
    config: ModelConfig, lora: LoraConfig, dtype: torch.dtype, device: torch.device | str
) -> Adapters:
    """The adapters that a run begins with: those of `lora.folder`, or fresh ones.

    A fresh A is uniform in +-1 / sqrt(inputs) (peft's start: kaiming_uniform with a = sqrt(5)) and
    B is 0. Each A is a function of the seed and its name, whatever else is adapted.

    Raises:
        LoraError: the folder's tensors do not fit the model or its own settings.
    """
    adapters = Adapters(config, lora, dtype, device)
    if lora.folder is not None:
        load_adapters(lora.folder, adapters)
        return adapters
    for name, view in adapters.views().items():
        if "lora_A" in name:
            key = hashlib.sha256(f"{lora.seed}|{name}".encode()).digest()[:7]
            generator = torch.Generator().manual_seed(int.from_bytes(key))
            draw = torch.rand(view.shape, generator=generator) * 2 - 1
            view.copy_(draw / math.sqrt(view.shape[1]))
    return adapters


def load_adapters(folder: str | Path, adapters: Adapters) -> None:
    """Fill adapters from a peft folder's tensors.

    Raises:
        LoraError: no or broken safetensors, or names or shapes that do not fit.
    """
    path = Path(folder) / TENSORS_FILE
    try:
        adapters.copy_from(load_file(path))
    except (OSError, SafetensorError, WeightsError) as error:
        raise LoraError(f"adapters {str(path)!r} cannot be used: {error}") from None


def save_adapters(folder: str | Path, adapters: Adapters, base: str | Path) -> None:
    """Write a peft folder; base: the model folder that it names as its base."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(folder, adapters.lora, str(base))
    tensors = {name: view.cpu().contiguous() for name, view in adapters.views().items()}
    save_file(tensors, folder / TENSORS_FILE, metadata={"format": "pt"})
