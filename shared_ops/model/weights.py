"""Weights: fused storage, Hugging Face names, reading and writing folders, digests.

q, k, v are one array and gate, up another, so that each is one product; Hugging Face's tensors are
views into them. A tied head is the embedding, stored and published once.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared_ops.checksum.op import checksums
from shared_ops.model.config import ConfigError, ModelConfig, read_json

TEXT_FILES = (".json", ".jinja", ".model", ".txt")
DIGEST_KIND = "sum1:"
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class WeightsError(ValueError):
    """Weights that do not match what was promised; the message names the tensor."""


@dataclass
class Layer:
    """One layer's leaves; N = (H + 2 K) E, the rows of q, then k, then v."""

    attention_norm_D: Tensor
    qkv_ND: Tensor
    qkv_bias_N: Tensor | None
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    output_DN: Tensor
    mlp_norm_D: Tensor
    gate_up_2FD: Tensor
    down_DF: Tensor

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value


class Leaves:
    """Storage tensors that are loaded, stepped and published together.

    base, scale: as in `Manifest`.
    """

    base: str = ""
    scale: float = 1.0

    def named_leaves(self) -> list[tuple[str, Tensor]]:
        """Every storage tensor once, in a fixed order, with a name of our own."""
        raise NotImplementedError

    def views(self) -> dict[str, Tensor]:
        """Name in files and publications -> detached view into the leaves."""
        raise NotImplementedError

    def leaves(self) -> list[Tensor]:
        """What an optimiser steps: every storage tensor once, in a fixed order."""
        return [leaf for _, leaf in self.named_leaves()]

    def leaf_names(self) -> list[str]:
        """Names of `leaves`, in the same order."""
        return [name for name, _ in self.named_leaves()]

    def empty_like(self, dtype: torch.dtype, device: torch.device | str) -> Self:
        """The same leaves in another dtype or on another device, not filled."""
        raise NotImplementedError

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Self:
        """A copy in another dtype or on another device."""
        copy = self.empty_like(dtype, device)
        for target, source in zip(copy.leaves(), self.leaves(), strict=True):
            target.copy_(source.detach())
        return copy

    def requires_grad_(self, flag: bool = True) -> Self:
        for leaf in self.leaves():
            leaf.requires_grad_(flag)
        return self

    @torch.no_grad()
    def copy_from(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite in place, by the names of `views`; nothing changes unless everything fits.

        Raises:
            WeightsError: a tensor is missing, unknown or of another shape.
        """
        views = self.views()
        check_names({name: view.shape for name, view in views.items()}, tensors)
        for name, view in views.items():
            view.copy_(tensors[name])


class Weights(Leaves):
    """All leaves of a decoder. `head_VD is embed_VD` when tied."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str):
        self.config = config
        self.embed_VD = self._empty(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = [_empty_layer(config, dtype, device) for _ in range(config.num_layers)]
        self.final_norm_D = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.head_VD = (
            self.embed_VD
            if config.tie_embeddings
            else self._empty(config.vocab_size, config.hidden_size, dtype, device)
        )

    @staticmethod
    def _empty(rows: int, columns: int, dtype, device) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=device)

    def named_leaves(self) -> list[tuple[str, Tensor]]:
        leaves = [("embedding", self.embed_VD)]
        for index, layer in enumerate(self.layers):
            leaves += [(f"layer {index}: {name}", value) for name, value in layer.leaves()]
        leaves.append(("final norm", self.final_norm_D))
        if not self.config.tie_embeddings:
            leaves.append(("head", self.head_VD))
        return leaves

    def views(self) -> dict[str, Tensor]:
        """Hugging Face name -> detached view into the leaves (a tied head is not listed)."""
        named = {EMBEDDING: self.embed_VD}
        for index, layer in enumerate(self.layers):
            named |= _layer_views(self.config, layer, f"model.layers.{index}.")
        named[FINAL_NORM] = self.final_norm_D
        if not self.config.tie_embeddings:
            named[HEAD] = self.head_VD
        return {name: tensor.detach() for name, tensor in named.items()}

    def empty_like(self, dtype: torch.dtype, device: torch.device | str) -> "Weights":
        return Weights(self.config, dtype, device)


def check_names(wanted: dict[str, torch.Size], tensors: dict[str, Tensor]) -> None:
    """Names and shapes must be the wanted ones (a listed copy of a tied head is let pass)."""
    missing = sorted(wanted.keys() - tensors.keys())
    unknown = sorted(name for name in tensors.keys() - wanted.keys() if name != HEAD)
    if missing or unknown:
        raise WeightsError(f"weights do not fit: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise WeightsError(
                f"{name} has shape {tuple(tensors[name].shape)}, config.json says {tuple(shape)}"
            )


def _empty_layer(config: ModelConfig, dtype: torch.dtype, device) -> Layer:
    width, head = config.hidden_size, config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * head

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Layer(
        attention_norm_D=empty(width),
        qkv_ND=empty(qkv, width),
        qkv_bias_N=empty(qkv) if config.qkv_bias else None,
        q_norm_E=empty(head) if config.qk_norm else None,
        k_norm_E=empty(head) if config.qk_norm else None,
        output_DN=empty(width, config.num_heads * head),
        mlp_norm_D=empty(width),
        gate_up_2FD=empty(2 * config.intermediate_size, width),
        down_DF=empty(width, config.intermediate_size),
    )


def _layer_views(config: ModelConfig, layer: Layer, prefix: str) -> dict[str, Tensor]:
    sizes = [n * config.head_dim for n in (config.num_heads, *[config.num_kv_heads] * 2)]
    gate_FD, up_FD = layer.gate_up_2FD.chunk(2)
    views = {
        "input_layernorm.weight": layer.attention_norm_D,
        "post_attention_layernorm.weight": layer.mlp_norm_D,
        "self_attn.o_proj.weight": layer.output_DN,
        "mlp.gate_proj.weight": gate_FD,
        "mlp.up_proj.weight": up_FD,
        "mlp.down_proj.weight": layer.down_DF,
        "self_attn.q_norm.weight": layer.q_norm_E,
        "self_attn.k_norm.weight": layer.k_norm_E,
    }
    for name, weight in zip("qkv", layer.qkv_ND.split(sizes), strict=True):
        views[f"self_attn.{name}_proj.weight"] = weight
    if layer.qkv_bias_N is not None:
        for name, bias in zip("qkv", layer.qkv_bias_N.split(sizes), strict=True):
            views[f"self_attn.{name}_proj.bias"] = bias
    return {prefix + name: view for name, view in views.items() if view is not None}


@dataclass(frozen=True)
class Manifest:
    """What a publication of weights holds; plain data that travels between processes.

    Example: Manifest(version=3, names=("lm_head.weight", ...), shapes=((480, 128), ...),
    dtypes=("float32", ...), digest="sum1:9f2c...").

    Of adapters, `base` is the digest of the frozen weights that they were trained on (else empty),
    and `scale` what their path is multiplied by.
    """

    version: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    digest: str
    base: str = ""
    scale: float = 1.0


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def digest_of(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, shapes, dtypes and checksums of the bytes, in the order of names.

    Equal on every device (`shared_ops/checksum/op.py`); on a GPU the bytes stay there. It begins
    with `DIGEST_KIND`, so that digests of another kind are known as such.
    """
    digest, names = hashlib.sha256(), sorted(tensors)
    sums = checksums([tensors[name] for name in names])
    for name, (low, high) in zip(names, sums, strict=True):
        described = f"{name}|{tuple(tensors[name].shape)}|{_dtype_name(tensors[name])}"
        digest.update(f"{described}|{high:016x}{low:016x}|".encode())
    return DIGEST_KIND + digest.hexdigest()


def make_manifest(version: int, tensors: dict[str, Tensor]) -> Manifest:
    """Describe tensors that are about to be published as policy `version`."""
    names = tuple(sorted(tensors))
    shapes = tuple(tuple(tensors[name].shape) for name in names)
    dtypes = tuple(_dtype_name(tensors[name]) for name in names)
    return Manifest(version, names, shapes, dtypes, digest_of(tensors))


@contextmanager
def _reader(path: Path):
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read the weights in {str(path)!r}: {error}") from None


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded folder or its single file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(folder, index.name).get("weight_map")
        if not isinstance(names, dict):
            raise ConfigError(f"{str(index)!r} has no weight_map: download the folder again")
        files = {name: folder / file for name, file in names.items()}
    elif (folder / "model.safetensors").exists():
        with _reader(folder / "model.safetensors") as reader:
            files = dict.fromkeys(reader.keys(), folder / "model.safetensors")
    else:
        raise ConfigError(
            f"model folder {str(folder)!r} has no model.safetensors: pass a folder saved with "
            "save_pretrained, or convert a GGUF file with `python -m shared_ops.model.gguf`"
        )
    missing = sorted({str(path) for path in files.values() if not path.exists()})
    if missing:
        raise ConfigError(f"model folder {str(folder)!r} lacks the weight file {missing[0]!r}")
    return files


def load_folder(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> Weights:
    """Read a Hugging Face folder's safetensors, sharded or not.

    Raises:
        ConfigError: no or broken safetensors.
        WeightsError: names or shapes do not fit the config.
    """
    files = _weight_files(Path(folder))
    weights = Weights(config, dtype, device)
    views = weights.views()
    tensors: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        with _reader(path) as reader:
            tensors |= {n: reader.get_tensor(n) for n in reader.keys() if n in views}  # noqa: SIM118
    unused = {n: torch.empty(0) for n in files.keys() - views.keys() if "rotary_emb" not in n}
    weights.copy_from(tensors | unused)
    return weights


def save_folder(path: str | Path, weights: Weights, source_folder: str | Path) -> None:
    """Write a Hugging Face folder: weights here, config and tokenizer files from the source.

    config.json names the dtype of the weights, as transformers casts what it loads to it. The
    folder appears whole or not at all; an existing one is replaced, and kept until then.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for source in Path(source_folder).iterdir():
            if source.suffix in TEXT_FILES and not source.name.endswith(".index.json"):
                shutil.copy2(source, temporary / source.name)
        _record_dtype(temporary / "config.json", _dtype_name(weights.embed_VD))
        tensors = {name: view.cpu().contiguous() for name, view in weights.views().items()}
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.chmod(0o755)
        replaced = temporary.with_name(f"{temporary.name}.replaced")
        if path.exists():
            os.replace(path, replaced)
        os.replace(temporary, path)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _record_dtype(path: Path, dtype: str) -> None:
    raw = read_json(path.parent, path.name)
    raw.pop("torch_dtype", None)
    path.write_text(json.dumps(raw | {"dtype": dtype}, indent=2) + "\n")
