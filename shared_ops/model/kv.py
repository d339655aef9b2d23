"""The one seam of the decoder: where keys and values live."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from shared_ops.fused.op import Places


class KV(Protocol):
    """Keys and values of the tokens in flight, packed (trainer) or paged (sampler)."""

    def places(self, layer: int) -> Places | None:
        """Where a fused launch may put this step's keys and values; None: nowhere."""
        ...

    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None
    ) -> Tensor:
        """Take this step's keys and values of `layer` in, and attend.

        Args:
            layer: 0-based.
            q_THE: [T, H, E] rotated queries.
            k_TKE: [T, K, E] rotated keys; None where they were put in their `places`.
            v_TKE: [T, K, E] values; likewise.

        Returns:
            [T, H, E] in the dtype of `q_THE`.
        """
        ...


@runtime_checkable
class PackedSequences(KV, Protocol):
    """Whole sequences one behind the other, which `attend` hands to packed attention.

    starts: B + 1 cumulative lengths.
    """

    starts: list[int]
