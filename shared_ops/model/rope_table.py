"""Rotary angles as a function of the position only.

Frequencies follow Su et al. 2021; "linear" is position interpolation (Chen et al. 2023), "llama3"
the Llama 3.1 report's wavelength bands, "yarn" Peng et al. 2023 (sections 3.2 and 3.4). As the
models were trained with float32 angles, the angle is a float32 product; its cosine and sine are
taken in float64 and rounded, so that no vector library's tail path can show.
"""

import math

import torch
from torch import Tensor

from shared_ops.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """float32 [head_dim / 2] radians per position, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    assert rope.original_max_positions is not None
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often are kept, those that turn seldom interpolated, a ramp between."""
    assert rope.original_max_positions is not None
    low, high = (
        head_dim
        * math.log(rope.original_max_positions / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0.0, 1.0)
    return frequencies / rope.factor * ramp + frequencies * (1.0 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class RopeTable:
    """Cosines and sines for positions; rows are made once, in blocks, and kept."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device):
        self._frequencies, self._factor = inverse_frequencies(rope, head_dim)
        self._device = device
        self._cos_PR = self._sin_PR = torch.empty((0, head_dim // 2), device=device)

    def reserve(self, positions: int) -> None:
        """Hold rows for positions 0..positions - 1, so that later calls need no look at them."""
        if positions > self._cos_PR.shape[0]:
            count = -(-positions // 1024) * 1024
            angles_PR = torch.arange(count).float().unsqueeze(1) * self._frequencies
            scaled = (f(angles_PR.double()) * self._factor for f in (torch.cos, torch.sin))
            self._cos_PR, self._sin_PR = (x_PR.float().to(self._device) for x_PR in scaled)

    def rows(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [T, E / 2] cosines and sines of reserved positions."""
        return self._cos_PR[positions_T], self._sin_PR[positions_T]
