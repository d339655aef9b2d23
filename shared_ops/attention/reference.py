"""attention in plain torch (contract: op.py).

Query rows are laid out as (position, head of the group), so that a KV head's group is one product
with its keys. `core` is the one place that computes; packed and paged differ in what they gather
(`plans`). Rows, positions and sequences that are padding are cut off after the products.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from shared_ops.attention.plans import (
    PackedBlock,
    PagedBlock,
    Piece,
    causal_mask,
    packed_blocks,
    paged_blocks,
)
from shared_ops.cpu_products import BATCH_ROWS, K_BLOCK, TILE, batched_product, product
from shared_ops.elementary import exp, log
from shared_ops.primitives import row_sum

KV_TILE = K_BLOCK
WIDTH_BLOCK = 128
SCORES_LIMIT = 1 << 18


def core(
    q_KXRE: Sequence[Tensor],
    k_KXNE: Sequence[Tensor],
    v_KXNE: Sequence[Tensor],
    mask: Tensor,
    first: int = 0,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contract, for matrices of X rows and positions, K times; float32 in and out.

    mask: added to the scaled scores from position `first` on, -inf where a row does not see.
    rows: of R, those that are no padding.

    Returns o_KXRE, each row's maximum and its sum of exponentials.
    """
    rows = rows or q_KXRE[0].shape[1]
    pairs = zip(q_KXRE, k_KXNE, strict=True)
    scores_KXRN = _stacked([_scores(q, k)[:, :rows] for q, k in pairs])
    scores_KXRN.mul_(q_KXRE[0].shape[-1] ** -0.5)
    scores_KXRN[..., first:].add_(mask)
    top_KXR1 = scores_KXRN.amax(-1, keepdim=True)
    p_KXRN = exp(scores_KXRN.sub_(top_KXR1))
    total_KXR1 = _totals(p_KXRN)
    wide_KXRN = _filled_rows(p_KXRN)
    o_KXRE = _stacked([_values(p, v)[:, :rows] for p, v in zip(wide_KXRN, v_KXNE, strict=True)])
    return o_KXRE.div_(total_KXR1), top_KXR1, total_KXR1


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _totals(p_KXRN: Tensor) -> Tensor:
    """Sums of rows in the order of the product with values: one chain in each KV tile."""
    p_RN = p_KXRN.view(-1, p_KXRN.shape[-1])
    return product(p_RN, _ones(p_RN.shape[1]))[:, :1].view(*p_KXRN.shape[:-1], 1)


@functools.lru_cache(maxsize=64)
def _ones(positions: int) -> Tensor:
    return torch.ones(positions, TILE)


def _filled_rows(x_KXRN: Tensor) -> Tensor:
    """Rows of zeros appended, once for the products of all KV heads."""
    missing = -x_KXRN.shape[2] % BATCH_ROWS
    return pad(x_KXRN, (0, 0, 0, missing)) if missing else x_KXRN


def _tiles(positions: int) -> list[slice]:
    return [slice(start, start + KV_TILE) for start in range(0, positions, KV_TILE)]


def tile_scores(q_XRE: Tensor, k_XNE: Tensor) -> Tensor:
    """q @ k^T [X, R, N] of one KV tile, E in blocks of `WIDTH_BLOCK` added left to right."""
    if q_XRE.shape[-1] <= WIDTH_BLOCK:
        return batched_product(q_XRE, k_XNE.transpose(1, 2))
    blocks = zip(q_XRE.split(WIDTH_BLOCK, -1), k_XNE.split(WIDTH_BLOCK, -1), strict=True)
    products = (batched_product(q, k.transpose(1, 2)) for q, k in blocks)
    return functools.reduce(torch.Tensor.add_, products)


def _scores(q_XRE: Tensor, k_XNE: Tensor) -> Tensor:
    if k_XNE.shape[1] <= KV_TILE:
        return tile_scores(q_XRE, k_XNE)
    return torch.cat([tile_scores(q_XRE, k_XNE[:, span]) for span in _tiles(k_XNE.shape[1])], -1)


def _values(p_XRN: Tensor, v_XNE: Tensor) -> Tensor:
    """p @ v [X, R, E]: tiles added left to right."""
    if v_XNE.shape[1] <= KV_TILE:
        return batched_product(p_XRN, v_XNE)
    spans = _tiles(v_XNE.shape[1])
    products = (batched_product(p_XRN[..., span], v_XNE[:, span]) for span in spans)
    return functools.reduce(torch.Tensor.add_, products)


def packed_forward(q_THE, k_TKE, v_TKE, starts: list[int]) -> tuple[Tensor, Tensor]:
    heads, kv_heads, group = _heads(q_THE, k_TKE)
    o_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    lse_TH = q_THE.new_empty(q_THE.shape[:2], dtype=torch.float32)
    for block in packed_blocks(tuple(starts), heads, kv_heads, SCORES_LIMIT):
        q_XRE, k_XNE, v_XNE = (_gathered(x, block, kv_heads) for x in (q_THE, k_TKE, v_TKE))
        o_XRE, lse_XR1 = torch.empty_like(q_XRE), torch.empty_like(q_XRE[..., :1])
        for piece in block.pieces:
            some, rows, mask = _of(piece, kv_heads, group)
            k, v = k_XNE[some, : piece.positions], v_XNE[some, : piece.positions]
            o, top, total = core([q_XRE[some, rows]], [k], [v], mask, piece.first)
            o_XRE[some, rows] = o[0]
            lse_XR1[some, rows] = log(total[0]).add_(top[0])
        _put(o_THE, o_XRE, block)
        _put(lse_TH.unsqueeze(-1), lse_XR1, block)
    return o_THE, lse_TH


def _heads(q_THE: Tensor, k_TKE: Tensor) -> tuple[int, int, int]:
    heads, kv_heads = q_THE.shape[1], k_TKE.shape[1]
    return heads, kv_heads, heads // kv_heads


def _of(piece: Piece, kv_heads: int, group: int) -> tuple[slice, slice, Tensor]:
    """A piece's matrices, its rows of them, and the mask of its last positions."""
    rows = slice(piece.first * group, piece.end * group)
    mask = causal_mask(piece.end - piece.first, piece.positions - piece.first, group)
    return slice(0, piece.sequences * kv_heads), rows, mask


def _gathered(x_THE: Tensor, block: PackedBlock, kv_heads: int) -> Tensor:
    """float32 [X, R, E] of queries, keys or values: X = B x K, R = N x heads of a group."""
    width = x_THE.shape[-1]
    x_LF = x_THE.reshape(x_THE.shape[0] * kv_heads, -1).index_select(0, block.rows_L)
    return x_LF.float().view(block.sequences * kv_heads, -1, width)


def _put(x_THE: Tensor, x_XRE: Tensor, block: PackedBlock) -> None:
    """The inverse of `_gathered`, into the block's tokens."""
    rows_LF = x_XRE.view(len(block.rows_L), -1).index_select(0, block.back_L)
    x_THE[block.tokens_T] = rows_LF.view(-1, *x_THE.shape[1:]).to(x_THE.dtype)


def write_pages(k_pages_PSKE, v_pages_PSKE, slots_T, k_TKE, v_TKE) -> None:
    k_pages_PSKE.flatten(0, 1).index_copy_(0, slots_T, k_TKE)
    v_pages_PSKE.flatten(0, 1).index_copy_(0, slots_T, v_TKE)


def paged_forward(q_THE, k_pages_PSKE, v_pages_PSKE, layout) -> Tensor:
    blocks = _paged_plan(layout, k_pages_PSKE.shape, q_THE.shape[1])
    if len(blocks) == 1 and blocks[0].tokens_L is None:
        return _attend_pages(q_THE, k_pages_PSKE, v_pages_PSKE, blocks[0])
    o_THE = torch.empty_like(q_THE)
    for block in blocks:
        tokens_L, real_L = block.tokens_L, block.real_L
        assert tokens_L is not None
        o_LHE = _attend_pages(q_THE[tokens_L], k_pages_PSKE, v_pages_PSKE, block)
        if real_L is not None:
            tokens_L, o_LHE = tokens_L[real_L], o_LHE[real_L]
        o_THE[tokens_L] = o_LHE
    return o_THE


def _paged_plan(layout, shape: torch.Size, heads: int) -> list[PagedBlock]:
    """The layout's blocks, for all layers of a forward where it can keep them."""
    key = shape, heads, SCORES_LIMIT
    kept = {} if layout.kept is None else layout.kept
    if key not in kept:
        given = layout.query_starts, layout.context_lens, layout.page_table_BP
        kept[key] = paged_blocks(*given, shape[1], (heads, shape[2]), SCORES_LIMIT)
    return kept[key]


def _attend_pages(q_LHE: Tensor, k_pages_PSKE, v_pages_PSKE, block: PagedBlock) -> Tensor:
    """Slots past a context meet p = 0, which hides what they hold unless that is not finite: then
    the output is NaN, and they are cleared."""
    kv_heads, group = k_pages_PSKE.shape[2], q_LHE.shape[1] // k_pages_PSKE.shape[2]
    q_KBRE = _queries_by_head(q_LHE.float(), block, kv_heads)
    k_BNKE, v_BNKE = (_pages(x, block) for x in (k_pages_PSKE, v_pages_PSKE))
    mask, rows = block.mask_BRN, block.queries * group
    o_KBRE = core(q_KBRE.unbind(0), k_BNKE.unbind(2), v_BNKE.unbind(2), mask, 0, rows)[0]
    if o_KBRE.isnan().any():
        past_BN11 = block.past_BN[..., None, None]
        k_BNKE, v_BNKE = (x.masked_fill(past_BN11, 0.0) for x in (k_BNKE, v_BNKE))
        o_KBRE = core(q_KBRE.unbind(0), k_BNKE.unbind(2), v_BNKE.unbind(2), mask, 0, rows)[0]
    o_KBQGE = o_KBRE.unflatten(2, (block.queries, group))
    return o_KBQGE.permute(1, 2, 0, 3, 4).reshape(q_LHE.shape).to(q_LHE.dtype)


def _queries_by_head(q_LHE: Tensor, block: PagedBlock, kv_heads: int) -> Tensor:
    """[K, B, R, E] with R filled up."""
    shape = block.sequences, block.queries, kv_heads, -1, q_LHE.shape[-1]
    q_KBQGE = q_LHE.reshape(shape).permute(2, 0, 1, 3, 4)
    return _filled_rows(q_KBQGE.flatten(2, 3))


def _pages(pages_PSKE: Tensor, block: PagedBlock) -> Tensor:
    """float32 [B, N, K, E]."""
    found_LF = pages_PSKE.flatten(1).index_select(0, block.pages_L)
    found_BNKE = found_LF.view(block.sequences, -1, *pages_PSKE.shape[2:])
    return found_BNKE[:, : block.positions].float()


def packed_backward(do_THE, q_THE, k_TKE, v_TKE, _o_THE, lse_TH, starts: list[int]):
    heads, kv_heads, group = _heads(q_THE, k_TKE)
    grads = dq_THE, dk_TKE, dv_TKE = tuple(
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_THE, k_TKE, v_TKE)
    )
    for block in packed_blocks(tuple(starts), heads, kv_heads, SCORES_LIMIT):
        given = [_gathered(x, block, kv_heads) for x in (q_THE, do_THE, k_TKE, v_TKE)]
        lse_XR1 = _gathered(lse_TH.unsqueeze(-1), block, kv_heads)
        lse_XR1.view(block.sequences, kv_heads, block.positions, -1).masked_fill_(
            block.padding_BN[:, None, :, None], float("inf")
        )
        parts = [torch.zeros_like(x) for x in (given[0], *given[2:])]
        for piece in block.pieces:
            some, rows, mask = _of(piece, kv_heads, group)
            grouped = [x[some, rows] for x in (*given[:2], lse_XR1, parts[0])]
            pairs = [x[some, : piece.positions] for x in (*given[2:], *parts[1:])]
            _add_gradients(*grouped, *pairs, mask=mask, first=piece.first)
        for d_THE, d_XRE in zip(grads, parts, strict=True):
            _put(d_THE, d_XRE, block)
    return dq_THE, dk_TKE, dv_TKE


def _add_gradients(
    q_XRE, do_XRE, lse_XR1, dq_XRE, k_XNE, v_XNE, dk_XNE, dv_XNE, *, mask: Tensor, first: int
) -> None:
    """Those of one piece, its KV tiles in increasing order.

    With P = exp(S - lse): dV = P^T dO, dS = P (dP - rowsum(P dP)) with dP = dO V^T, dQ = dS K,
    dK = dS^T Q (Dao et al. 2022, "FlashAttention", appendix B.2). Their rowsum(dO O) is the same
    sum, but of other roundings than dP's, which shows where they cancel.
    """
    scale = q_XRE.shape[-1] ** -0.5
    p_XRN = _scores(q_XRE, k_XNE).mul_(scale)
    p_XRN[..., first:].add_(mask)
    p_XRN = exp(p_XRN.sub_(lse_XR1))
    dp_XRN = _scores(do_XRE, v_XNE)
    ds_XRN = dp_XRN.sub_(row_sum(dp_XRN * p_XRN)).mul_(p_XRN).mul_(scale)
    for span in _tiles(k_XNE.shape[1]):
        p, ds = p_XRN[..., span], ds_XRN[..., span]
        dv_XNE[:, span] += batched_product(p.transpose(1, 2), do_XRE)
        dq_XRE += batched_product(ds, k_XNE[:, span])
        dk_XNE[:, span] += batched_product(ds.transpose(1, 2), q_XRE)
