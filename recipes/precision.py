"""A sampler of lower precision than its trainer, as ordinary engines run: for comparison only.

Weights are rounded on their way into the engine and widened again to the run's dtype, so the engine
computes in that dtype on a coarser grid of weights. The trainer's own weights stay as they are.

* `bfloat16`: every tensor, by a cast (to the nearest, ties to even; no scale).
* `float8_e4m3fn`: the matrices of the layers (`*_proj.weight`), each output row by its own scale
  max|row| / 448, the largest finite number of the format (Micikevicius et al. 2022, "FP8 Formats
  for Deep Learning"). Embedding, head, norms and biases stay, as engines that quantise leave them.
* `float4_e2m1fn`: the same matrices to 0, 0.5, 1, 1.5, 2, 3, 4 and 6 and their negatives (OCP
  Microscaling Formats 1.0, E2M1), each 16 neighbours along the input by their own float32 scale
  max / 6; ties go towards zero. A large mismatch, as of engines with 4-bit weights.

The publication's digest is that of the rounded tensors, taken where they are rounded. The engine
takes it again from what it holds, and before each update the trainer rounds its weights anew and
compares (`recipes.audit.require_known_policy`).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.settings import RunConfig
from trainer.actor import TrainerActor

if TYPE_CHECKING:
    from torch import Tensor

    from shared_ops.model.weights import Manifest

ROUNDED = {
    "bfloat16": "every weight rounded to bfloat16",
    "float8_e4m3fn": "layer matrices rounded to float8_e4m3fn, one scale an output row",
    "float4_e2m1fn": "layer matrices rounded to float4_e2m1fn, one scale for 16 inputs",
}
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT4_BLOCK = 16


def plan_line(config: RunConfig) -> str:
    """What the sampler's weights are, for the plan."""
    what = ROUNDED.get(config.sampler_precision or "", "as published, nothing rounded")
    kernels = "this project's ops" if config.rollout.exact else "ordinary ops"
    if not config.rollout.exact and config.device.startswith("cuda"):
        kernels = "products as the vendor library likes, attention split by load,"
    return f"sampler    {kernels} in {config.dtype}; weights: {what}"


def rounded(tensors: "dict[str, Tensor]", precision: str) -> "dict[str, Tensor]":
    """Copies of published tensors on the coarser grid, shapes and dtypes as they were.

    Args:
        tensors: by Hugging Face name; matrices are [rows out, columns in].
        precision: a key of `ROUNDED`. Every device rounds alike.
    """
    import torch

    if precision == "bfloat16":
        return {name: x.to(torch.bfloat16).to(x.dtype) for name, x in tensors.items()}
    by_scale = _row_scaled if precision == "float8_e4m3fn" else _block_scaled
    return {
        name: by_scale(x) if name.endswith("_proj.weight") else x.clone()
        for name, x in tensors.items()
    }


def _row_scaled(w_NK: "Tensor") -> "Tensor":
    """[N, K] on the grid of float8_e4m3fn times each row's scale; rows of zeros stay."""
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    wide_NK = w_NK.float()
    # By a number, CUDA would multiply by the reciprocal; by a tensor it divides, as a CPU does.
    scale_N1 = wide_NK.abs().amax(1, keepdim=True) / wide_NK.new_tensor(largest)
    scale_N1 = torch.where(scale_N1 > 0, scale_N1, 1.0)
    grid_NK = (wide_NK / scale_N1).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return (grid_NK.float() * scale_N1).to(w_NK.dtype)


def _block_scaled(w_NK: "Tensor") -> "Tensor":
    """[N, K] on the grid of E2M1 times each block's scale; blocks of zeros stay."""
    import torch

    grid = torch.tensor(FLOAT4, device=w_NK.device)
    padded_NK = torch.nn.functional.pad(w_NK.float(), (0, -w_NK.shape[1] % FLOAT4_BLOCK))
    wide_NBX = padded_NK.unflatten(1, (-1, FLOAT4_BLOCK))
    scale_NB1 = wide_NBX.abs().amax(-1, keepdim=True) / grid[-1]
    scale_NB1 = torch.where(scale_NB1 > 0, scale_NB1, 1.0)
    place_NBX = torch.bucketize((wide_NBX / scale_NB1).abs(), (grid[1:] + grid[:-1]) / 2)
    near_NBX = grid[place_NBX] * scale_NB1 * wide_NBX.sign()
    return near_NBX.flatten(1)[:, : w_NK.shape[1]].to(w_NK.dtype)


class RoundingTrainerActor(TrainerActor):
    """A trainer that publishes rounded weights; what it trains on stays whole."""

    def __init__(self, precision: str, *arguments: Any) -> None:
        """precision: as for `rounded`; the rest as for TrainerActor."""
        super().__init__(*arguments)
        self.precision = precision

    def publish(self) -> "tuple[Manifest, dict[str, Tensor]]":
        """The rounded weights and their own manifest, on the CPU."""
        return self._rounded(super().publish())

    def lend(self) -> "tuple[Manifest, dict[str, Tensor]]":
        """The same where the weights are; a copy like the other."""
        return self._rounded(super().lend())

    def gpu(self) -> str:
        """Nowhere: an engine in another process takes the copy on the CPU."""
        return ""

    def weights_digest(self) -> str:
        """Of the rounded weights, rounded anew: what an engine in step with this trainer holds."""
        return self.lend()[0].digest

    def _rounded(
        self, publication: "tuple[Manifest, dict[str, Tensor]]"
    ) -> "tuple[Manifest, dict[str, Tensor]]":
        from shared_ops.model.weights import make_manifest

        manifest, tensors = publication
        tensors = rounded(tensors, self.precision)
        return make_manifest(manifest.version, tensors), tensors


def trainer_actor(config: RunConfig, folder: str | Path, threads: int) -> TrainerActor:
    """The trainer's side in this process."""
    if config.sampler_precision is None:
        return TrainerActor(folder, config.trainer, threads)
    return RoundingTrainerActor(config.sampler_precision, folder, config.trainer, threads)


def remote_trainer(config: RunConfig, folder: str | Path, threads: int, **options: Any) -> Any:
    """The trainer's side as a Ray actor; options as for `ray.remote`."""
    import ray

    if config.sampler_precision is None:
        return ray.remote(**options)(TrainerActor).remote(folder, config.trainer, threads)
    actor = ray.remote(**options)(RoundingTrainerActor)
    return actor.remote(config.sampler_precision, folder, config.trainer, threads)
