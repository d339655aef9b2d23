"""The one seam of the decoder: where keys and values live."""

from typing import Protocol, runtime_checkable

from torch import Tensor


class KV(Protocol):
    """Keys and values of the tokens in flight, packed (trainer) or paged (sampler)."""

    def attend(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Take this step's keys and values of `layer` in, and attend.

        Args:
            layer: 0-based.
            q_THE: [T, H, E] rotated queries.
            k_TKE: [T, K, E] rotated keys.
            v_TKE: [T, K, E] values.

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
