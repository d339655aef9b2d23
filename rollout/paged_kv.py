"""Keys and values in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.batch import Batch
from rollout.config import EngineError
from shared_ops.attention.op import write_pages
from shared_ops.fused.op import Places
from shared_ops.model.config import ModelConfig
from shared_ops.opset import OpSet


class PagedKV:
    """One pair of [P, S, K, E] arrays a layer, in the model's dtype."""

    def __init__(
        self,
        model: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: OpSet,
    ) -> None:
        shape = (2, num_pages, page_size, model.num_kv_heads, model.head_dim)
        try:
            self.layers = [
                torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)
            ]
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise EngineError(
                f"no memory for {num_pages} KV pages of {page_size} tokens: lower num_pages or"
                f" max_sequences ({str(error).splitlines()[0]})"
            ) from None
        self.page_size = page_size
        self.ops = ops

    def at(self, batch: Batch) -> BatchKV:
        return BatchKV(self, batch)


class BatchKV:
    """The KV of one forward (the decoder's KV protocol): writes at slots, reads through tables."""

    def __init__(self, kv: PagedKV, batch: Batch) -> None:
        self._kv = kv
        self._batch = batch

    def places(self, layer: int) -> Places:
        k_pages_PSKE, v_pages_PSKE = self._kv.layers[layer]
        return Places(k_pages_PSKE, v_pages_PSKE, self._batch.slots_T)

    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None
    ) -> Tensor:
        k_pages_PSKE, v_pages_PSKE = self._kv.layers[layer]
        if k_TKE is not None and v_TKE is not None:
            write_pages(k_pages_PSKE, v_pages_PSKE, self._batch.slots_T, k_TKE, v_TKE)
        return self._kv.ops.paged_attention(q_THE, k_pages_PSKE, v_pages_PSKE, self._batch.layout)
