"""The trainer's KV: keys and values of this forward, attended within packed sequences."""

from collections.abc import Callable

from torch import Tensor


class PackedKV:
    """`attend` over sequences that lie one behind the other; nothing is kept."""

    def __init__(
        self, attention: Callable[[Tensor, Tensor, Tensor, list[int]], Tensor], starts: list[int]
    ) -> None:
        self.attention = attention
        self.starts = starts

    def places(self, layer: int) -> None:
        """Nowhere."""

    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None
    ) -> Tensor:
        """[T, H, E], causal within each sequence, differentiable."""
        assert k_TKE is not None and v_TKE is not None
        return self.attention(q_THE, k_TKE, v_TKE, self.starts)
