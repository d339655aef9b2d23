"""Activation recomputation: a layer keeps only its input, and runs again in the backward."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_ops.model.weights import Layer


def recomputed(body: Callable[[Layer, Tensor], Tensor], layer: Layer, x_TD: Tensor) -> Tensor:
    """A way to run a layer (`shared_ops.model.decoder.run_plainly`) that recomputes it.

    The second forward sees the same tokens in the same packing, and no op draws or depends on what
    ran before it, so what it saves has the bits of what was dropped.
    """
    if not torch.is_grad_enabled():
        return body(layer, x_TD)
    out_TD = checkpoint(body, layer, x_TD, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(out_TD, Tensor)
    return out_TD
