"""What a rank holds of what is trained, how it scores with it, and how gradients add up.

Gradients are summed in float32 in one order, sharded or not: rounds of micro-batches one after the
other, and within a round the ranks' micro-batches left to right.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shared_ops.model.adapters import Adapters, start_adapters
from shared_ops.model.config import ModelConfig
from shared_ops.model.decoder import Decoder, RunLayer, dtype_of, run_plainly
from shared_ops.model.lora_config import LoraConfig
from shared_ops.model.vocabulary import vocab_limit
from shared_ops.model.weights import Leaves, Weights, digest_of, load_folder
from shared_ops.opset import EXACT, OpSet
from trainer.config import TrainerConfig
from trainer.ranks import Ranks
from trainer.recompute import recomputed
from trainer.score import Scorer, Scores


class Held:
    """All of it on every rank: float32 masters, and working weights in the run's dtype.

    Either are what is trained: all weights, or adapters beside weights that are frozen.

    Attributes:
        masters: float32, what the optimiser steps.
        weights: what is run and published; `masters` itself where that is float32.
        scorer: of the working weights. reference: of the initial model, where beta needs it.
        together: whether every forward is a collective call, the same number of them on each rank.
    """

    together = False
    masters: Leaves
    weights: Leaves
    scorer: Scores
    reference: Scores | None = None

    def __init__(
        self,
        folder: Path,
        model_config: ModelConfig,
        config: TrainerConfig,
        lora: LoraConfig,
        ranks: Ranks,
    ) -> None:
        self.model_config, self.config, self.lora, self.ranks = model_config, config, lora, ranks
        self.vocab_limit = vocab_limit(folder, model_config)
        self._base: Weights | None = None
        self._gradients: list[Tensor] = []
        self._load(folder, dtype_of(config.dtype), ranks.device)

    def _load(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        if self.lora.rank:
            self._base = load_folder(folder, self.model_config, dtype, device)
            self.masters = start_adapters(self.model_config, self.lora, torch.float32, device)
            self.masters.base = digest_of(self._base.views())
        else:
            self.masters = load_folder(folder, self.model_config, torch.float32, device)
        whole = dtype == torch.float32
        self.weights = self.masters if whole else self.masters.to(dtype, device)
        self.scorer = self.scorer_of(self.weights)
        if self.config.beta:
            self.reference = self.scorer_of(self._base or self.weights.to(dtype, device))
        self.weights.requires_grad_(True)

    def scorer_of(self, trained: Leaves) -> Scorer:
        """Of all weights, or of adapters beside the frozen ones."""
        adapters = trained if isinstance(trained, Adapters) else None
        weights = self._base if adapters else trained
        assert isinstance(weights, Weights)
        model = Decoder(
            self.model_config,
            weights,
            self.ops(),
            self.run_layer(),
            adapters,
            self.config.recompute,
        )
        return Scorer(model, self.vocab_limit)

    def run_layer(self) -> RunLayer:
        """Exact ops are recomputed by the decoder itself."""
        dropped = self.config.recompute == "full" and not self.config.exact
        return recomputed if dropped else run_plainly

    def ops(self) -> OpSet:
        if self.config.exact:
            return EXACT
        from shared_ops.ordinary import ORDINARY

        return ORDINARY

    def backward(self, loss: Tensor) -> None:
        """Add a round's gradient; every rank calls it alike.

        Each leaf's part is dropped as soon as it is added, so that the parts in the run's dtype and
        the float32 sums are never there together in the first round.
        """
        parts = list(reversed(torch.autograd.grad(loss, self.weights.leaves())))
        is_first = not self._gradients
        for place in range(len(parts)):
            part = parts.pop().float().contiguous()
            self.ranks.sum_([part])
            if is_first:
                self._gradients.append(part)
            else:
                self._gradients[place].add_(part)

    def drop_gradients(self) -> None:
        self._gradients = []

    def take_gradients(self) -> list[Tensor]:
        """Float32 gradients, shaped like the leaves of `masters`, since the last call; 0 at first.

        They are dropped here.
        """
        taken = self._gradients
        self.drop_gradients()
        masters = self.masters.leaves()
        return taken or [torch.zeros_like(x, dtype=torch.float32) for x in masters]

    def copies(self) -> list[Tensor] | None:
        """The working weights' leaves, where they are not the masters themselves."""
        return None if self.weights is self.masters else self.weights.leaves()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the masters' values over into the working weights."""
        for leaf, master in zip(self.copies() or (), self.masters.leaves(), strict=False):
            leaf.copy_(master)

    def gathered(self, parts: Sequence[Tensor]) -> Iterable[Tensor]:
        """Whole tensors from tensors shaped like the leaves of `masters`."""
        return parts

    def rows(self, whole: Tensor) -> Tensor:
        """What this rank holds of a leaf, or of a tensor of its shape."""
        return whole

    def whole_shapes(self) -> list[torch.Size]:
        return [leaf.shape for leaf in self.masters.leaves()]

    def whole_weights(self) -> Leaves:
        """The working weights or adapters for a file."""
        return self.weights
