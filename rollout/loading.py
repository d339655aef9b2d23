"""What an engine takes: a publication that fits the weights or adapters that it holds."""

from __future__ import annotations

from shared_ops.model.adapters import Adapters, start_adapters
from shared_ops.model.lora_config import LoraConfig
from shared_ops.model.weights import Leaves, Manifest, Weights, WeightsError, digest_of


def adapters_beside(weights: Weights, lora: LoraConfig) -> Adapters:
    """Adapters from `lora.folder`, or at 0, that know which weights they stand beside.

    They keep their addresses: captured graphs outlive what is loaded into them.

    Raises:
        LoraError: the folder cannot be used.
    """
    place = weights.embed_VD.dtype, weights.embed_VD.device
    start = start_adapters if lora.folder else Adapters
    adapters = start(weights.config, lora, *place)
    adapters.base = digest_of(weights.views())
    return adapters


def check_publication(manifest: Manifest, dtype: str, held: Leaves) -> None:
    """Refuse what would not be the policy that was published.

    Raises:
        WeightsError: another dtype, adapters for whole weights or the other way round, or adapters
            of another base or scale.
    """
    name = f"weights version {manifest.version}"
    others = set(manifest.dtypes) - {dtype}
    if others:
        raise WeightsError(
            f"{name} are {sorted(others)[0]} and the engine's dtype is {dtype}: publish in the"
            " engine's dtype"
        )
    if bool(manifest.base) != bool(held.base):
        given, wanted = (("whole", "adapters")[bool(base)] for base in (manifest.base, held.base))
        raise WeightsError(
            f"{name} are {given} and the engine takes {wanted}: give both sides the same lora"
            " settings"
        )
    if manifest.base != held.base:
        raise WeightsError(
            f"{name} are adapters of a base with digest {manifest.base[:16]} and the engine holds"
            f" {held.base[:16]}: load both sides from the same folder in the same dtype"
        )
    if manifest.scale != held.scale:
        raise WeightsError(
            f"{name} are adapters scaled by {manifest.scale:g} and the engine scales by"
            f" {held.scale:g}: give both sides the same lora.alpha"
        )
