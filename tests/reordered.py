"""Torch's ops with sums whose order follows from the batch, on any processor: the control of the
parity checks.

Whether torch's own ops round otherwise beside other rows depends on the library and the processor.
Here every product takes its terms in an order drawn for its number of rows, and attention takes its
keys in one drawn for its number of queries. Nothing else differs from `shared_ops.ordinary`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_ops import ordinary


def order(size: int, seed: int, device: torch.device) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).to(device)


def linear(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The columns change places too: the gradient of x is a sum over them."""
    n_N, k_K = (order(size, len(x_TK), w_NK.device) for size in w_NK.shape)
    y_TN = F.linear(x_TK[:, k_K], w_NK[n_N][:, k_K])[:, n_N.argsort()]
    return y_TN if bias_N is None else y_TN + bias_N


def attention(q, k, v, attn_mask: Tensor | None = None, is_causal=False, enable_gqa=False):
    queries, keys = q.shape[-2], k.shape[-2]
    if is_causal:
        attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
    keys_N = order(keys, queries, q.device)
    masked = None if attn_mask is None else attn_mask[..., keys_N]
    k, v = k[..., keys_N, :], v[..., keys_N, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=masked, enable_gqa=enable_gqa)


class _Functional:
    """torch.nn.functional with these two."""

    linear = staticmethod(linear)
    scaled_dot_product_attention = staticmethod(attention)

    def __getattr__(self, name: str):
        return getattr(F, name)


def _second_copy():
    spec = importlib.util.spec_from_file_location(
        "shared_ops.ordinary_reordered", ordinary.__file__
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.F = _Functional()
    return module


REORDERED = _second_copy().ORDINARY


def install() -> None:
    """From now on this process has REORDERED wherever it would have torch's own ops."""
    for place in PLACES:
        mock.patch(place, REORDERED).start()


PLACES = ("shared_ops.ordinary.ORDINARY", "shared_ops.unconstrained.ORDINARY")


@contextlib.contextmanager
def reordered_ops() -> Iterator[None]:
    """An engine or trainer made within, with exact=False on a CPU, runs REORDERED."""
    with contextlib.ExitStack() as stack:
        for place in PLACES:
            stack.enter_context(mock.patch(place, REORDERED))
        yield
