"""Publication of the working weights: what the sampler loads."""

from torch import Tensor

from shared_ops.model.weights import Manifest, Weights, make_manifest

Publication = tuple[Manifest, dict[str, Tensor]]


def publish(version: int, weights: Weights) -> Publication:
    """Manifest with digest, and tensors by Hugging Face name.

    The tensors are detached but alias the live weights: the next optimiser step changes them in
    place. Copy them (an engine's load_weights does) before that step; loading them later fails the
    digest.
    """
    tensors = weights.views()
    return make_manifest(version, tensors), tensors


def own_storage(publication: Publication) -> Publication:
    """The same on the CPU, each tensor in a storage of its own.

    For sending to another process: pickling a view would send the whole storage behind it, the
    fused q, k and v three times.
    """
    manifest, tensors = publication
    return manifest, {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
