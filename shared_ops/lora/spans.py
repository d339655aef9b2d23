"""How several adapters of one input share storage."""

from collections.abc import Iterator

from torch import Tensor

Spans = tuple[tuple[int, int], ...]


def columns_of(spans: Spans) -> list[int]:
    return [end - first for first, end in spans]


def pieces(spans: Spans, z_TQ: Tensor, b_MR: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of each adapter: its columns of y, its columns [T, R] of z, its rows [N, R] of B."""
    columns = [slice(first, end) for first, end in spans]
    parts_of_z = z_TQ.split(b_MR.shape[1], dim=1)
    return zip(columns, parts_of_z, b_MR.split(columns_of(spans)), strict=True)
