"""Publication of the working weights: what the sampler loads."""

from dataclasses import replace

import torch
from torch import Tensor

from shared_ops.model.weights import Leaves, Manifest, make_manifest

Publication = tuple[Manifest, dict[str, Tensor]]


def publish(version: int, weights: Leaves) -> Publication:
    """Manifest with digest, and tensors by Hugging Face's name (of adapters, peft's).

    The tensors are detached but alias the live weights: the next optimiser step changes them in
    place. Copy them (an engine's load_weights does) before that step; loading them later fails the
    digest.
    """
    tensors = weights.views()
    manifest = make_manifest(version, tensors)
    return replace(manifest, base=weights.base, scale=weights.scale), tensors


def own_storage(publication: Publication) -> Publication:
    """The same on the CPU, each tensor in a storage of its own.

    For sending to another process through host memory: pickling a view would send the whole storage
    behind it, the fused q, k and v three times.
    """
    manifest, tensors = publication
    return manifest, {name: _on_host(tensor) for name, tensor in tensors.items()}


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
