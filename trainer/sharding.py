"""Sharded training: each rank holds its rows of every weight, master and moment (FSDP2).

`torch.distributed.fsdp.fully_shard` gathers a layer's weights, in the run's dtype, when the layer
runs or runs backward, and frees them after it. What it shards are the float32 masters, so that
working weights need no room between steps. Of accelerate only the process group is used
(trainer/ranks.py): its `prepare` wraps a module and its optimiser for a mean over ranks in the
library's own order and checkpoints in its own format, while here gradients are sums in rank order,
the optimiser is `trainer.optimizer.AdamW` on the rows, and files are those of an unsharded run.

Order: the gradient of a round of micro-batches (one of each rank) is added over ranks left to
right in float32, then to those of the rounds before: exactly the unsharded data-parallel sum
(trainer/held.py). The optimiser works element by element, so a row's bits are the same there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shared_ops.model.decoder import Decoder
from shared_ops.model.weights import Layer, Leaves, Weights, load_folder
from trainer.held import Held
from trainer.packing import MicroBatch
from trainer.ranks import Ranks
from trainer.sample import TrainSample
from trainer.score import Scorer


class _Part(nn.Module):
    """Leaves that are gathered and freed together, around what runs with them; while it runs they
    are plain tensors under the names of `Layer` or `Weights`."""

    def __init__(self, leaves: dict[str, Tensor | None]) -> None:
        super().__init__()
        for name, leaf in leaves.items():
            self.register_parameter(name, None if leaf is None else nn.Parameter(leaf))

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        return run(*arguments)


class _Root(_Part):
    """Leaves outside the layers, and the layers: what a decoder reads of `Weights`."""

    def __init__(self, weights: Weights) -> None:
        head_VD = None if weights.config.tie_embeddings else weights.head_VD
        super().__init__(
            {
                "embed_VD": weights.embed_VD,
                "final_norm_D": weights.final_norm_D,
                "untied_head_VD": head_VD,
            }
        )
        self.layers = nn.ModuleList(
            _Part({field.name: getattr(layer, field.name) for field in fields(Layer)})
            for layer in weights.layers
        )

    @property
    def head_VD(self) -> Tensor:
        return cast(Tensor, self.embed_VD if self.untied_head_VD is None else self.untied_head_VD)

    def places(self) -> list[tuple[nn.Module, str]]:
        """Module and name of every leaf, in the order of `Weights.leaves`."""
        inner = [
            (layer, field.name)
            for layer in self.layers
            for field in fields(Layer)
            if getattr(layer, field.name) is not None
        ]
        places = [(self, "embed_VD"), *inner, (self, "final_norm_D"), (self, "untied_head_VD")]
        return places[: None if self.untied_head_VD is not None else -1]


class _InRankOrder:
    """FSDP2's reduce-scatter with a fixed order: a sum over ranks, left to right."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        self.ranks.scatter_sum(output_tensor, input_tensor)


class ShardedWeights(Leaves):
    """A decoder's weights, of which this rank's leaves are float32 rows. `views` and `whole` are
    collective calls."""

    def __init__(self, weights: Weights, dtype: torch.dtype, ranks: Ranks, trained: bool) -> None:
        """Take this rank's rows of `weights`, which may be freed afterwards.

        dtype: that of the gathered weights. trained: whether gradients are wanted.
        """
        self.config, self.dtype, self.ranks = weights.config, dtype, ranks
        self.shapes = [leaf.shape for leaf in weights.leaves()]
        self._names = weights.leaf_names()
        self.root = _Root(weights).requires_grad_(trained)
        self._places = self.root.places()
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        mesh = init_device_mesh(ranks.device.type, (ranks.count,))
        for part in (*self.root.layers, self.root):
            # The root too is freed after each forward: rows stepped later must be gathered anew.
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            sharded = cast(FSDPModule, part)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_custom_reduce_scatter(cast(Any, _InRankOrder(ranks)))

    def parameters(self) -> list[Any]:
        """FSDP2's, in the order of the leaves."""
        return [getattr(module, name) for module, name in self._places]

    @torch.no_grad()
    def named_leaves(self) -> list[tuple[str, Tensor]]:
        """This rank's rows of each leaf; writing to them changes the weights."""
        rows = [parameter.to_local() for parameter in self.parameters()]
        return list(zip(self._names, rows, strict=True))

    def gathered(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Whole tensors, one after the other, from rows like the leaves', in any multiple."""
        for shape, part in zip(cycle(self.shapes), parts, strict=False):
            padded = part.new_zeros(-(-shape[0] // self.ranks.count), *shape[1:])
            padded[: len(part)] = part
            yield torch.cat(self.ranks.gather_tensor(padded))[: shape[0]]

    @torch.no_grad()
    def whole(self) -> Weights:
        """All weights in the run's dtype, on every rank."""
        weights = Weights(self.config, self.dtype, self.ranks.device)
        rows = [leaf.to(self.dtype) for leaf in self.leaves()]
        for target, source in zip(weights.leaves(), self.gathered(rows), strict=True):
            target.copy_(source)
        return weights

    def views(self) -> dict[str, Tensor]:
        return self.whole().views()


class Sharded(Held):
    """The masters' rows on each rank; working weights are gathered from them when they are run."""

    together = True

    def _load(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        weights = load_folder(folder, self.model_config, torch.float32, "cpu")
        if self.config.beta:
            frozen = ShardedWeights(weights.to(dtype, "cpu"), dtype, self.ranks, trained=False)
            self.reference = self._gathering(frozen)
        self.masters = self.weights = self._sharded = ShardedWeights(
            weights, dtype, self.ranks, trained=True
        )
        self.scorer = self._gathering(self._sharded)

    def _gathering(self, sharded: ShardedWeights) -> "GatheredScorer":
        """Layers run inside their gathering, and are never fused with one another."""
        run_layer = self.run_layer()

        def run_gathered(body, layer, x_TD: Tensor) -> Tensor:
            return layer(partial(run_layer, body, layer), x_TD)

        weights, ops = cast(Weights, sharded.root), self.ops()._replace(fuses=False)
        recompute = self.config.recompute
        model = Decoder(self.model_config, weights, ops, run_gathered, recompute=recompute)
        return GatheredScorer(Scorer(model, self.vocab_limit), sharded.root)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def drop_gradients(self) -> None:
        for parameter in self._sharded.parameters():
            parameter.grad = None

    def take_gradients(self) -> list[Tensor]:
        parts = [parameter.grad for parameter in self._sharded.parameters()]
        self.drop_gradients()
        return [
            torch.zeros_like(leaf) if part is None else part.to_local()
            for leaf, part in zip(self.masters.leaves(), parts, strict=True)
        ]

    def gathered(self, parts: Sequence[Tensor]) -> Iterable[Tensor]:
        return self._sharded.gathered(parts)

    def rows(self, whole: Tensor) -> Tensor:
        count = -(-len(whole) // self.ranks.count)
        return whole[self.ranks.index * count : (self.ranks.index + 1) * count]

    def whole_shapes(self) -> list[torch.Size]:
        return self._sharded.shapes

    def whole_weights(self) -> Leaves:
        return self._sharded.whole()


class GatheredScorer(NamedTuple):
    """A scorer whose weights are gathered while it runs: every rank must call it alike."""

    scorer: Scorer
    root: nn.Module

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return self.root(partial(self.scorer.score, batch))

    def trace(self, sample: TrainSample, position: int) -> dict[str, Tensor]:
        return self.root(partial(self.scorer.trace, sample, position))
