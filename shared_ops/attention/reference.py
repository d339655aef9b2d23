"""attention in plain torch (contract: op.py).

Sequences of like length are padded to one block and share their products. Query rows are laid out
as (position, head of the group), so that a KV head's group is one product. `core` is the one place
that computes; packed and paged differ in how they gather.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from shared_ops.cpu_products import batched_product
from shared_ops.elementary import exp, log
from shared_ops.primitives import row_sum

KV_TILE = 64
WIDTH_BLOCK = 128
ROW_TILE = 8
ROW_BLOCK = 64
SCORES_LIMIT = 1 << 24


class Block(NamedTuple):
    """Sequences padded alike: their indices, query rows and KV positions (a multiple of a tile)."""

    sequences: list[int]
    queries: int
    positions: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def plan_blocks(query_lens: list[int], context_lens: list[int], rows_limit: int) -> list[Block]:
    """Group sequences by padded size; a block holds at most `rows_limit` rows x positions.

    A sequence without queries is in no block.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        if queries == 0:
            continue
        padded = 1 if queries == 1 else _round_up(queries, KV_TILE)
        groups.setdefault((padded, _round_up(context, KV_TILE)), []).append(index)
    blocks = []
    for (queries, positions), members in groups.items():
        size = max(1, rows_limit // (queries * positions))
        chunks = [members[i : i + size] for i in range(0, len(members), size)]
        blocks += [Block(chunk, queries, positions) for chunk in chunks]
    return blocks


def core(q_BKRE: Tensor, k_BKNE: Tensor, v_BKNE: Tensor, last_BR: Tensor) -> tuple[Tensor, Tensor]:
    """The contract. Row r of sequence b sees positions 0..last_BR[b, r]; float32 in and out.

    Returns o_BKRE and the log of each row's sum of exponentials, lse_BKR.
    """
    sequences, kv_heads, rows, width = q_BKRE.shape
    tiles = k_BKNE.shape[2] // KV_TILE
    scores_XRN = _scores(q_BKRE, k_BKNE, last_BR)
    top_XR1 = scores_XRN.amax(-1, keepdim=True)
    p_XRN = exp(scores_XRN.sub_(top_XR1))
    v_XNE = v_BKNE.reshape(-1, k_BKNE.shape[2], width)
    sums_XRJ = row_sum(p_XRN.unflatten(-1, (tiles, KV_TILE))).squeeze(-1)
    total_XR1 = sums_XRJ[..., :1].clone()
    o_XRE = batched_product(p_XRN[..., :KV_TILE].contiguous(), v_XNE[:, :KV_TILE])
    for tile in range(1, tiles):
        span = slice(tile * KV_TILE, (tile + 1) * KV_TILE)
        o_XRE += batched_product(p_XRN[..., span].contiguous(), v_XNE[:, span])
        total_XR1 += sums_XRJ[..., tile : tile + 1]
    lse_XR = (top_XR1 + log(total_XR1)).squeeze(-1)
    o_BKRE = (o_XRE / total_XR1).view(sequences, kv_heads, rows, width)
    return o_BKRE, lse_XR.view(sequences, kv_heads, rows)


def tile_scores(q_XRE: Tensor, k_XNE: Tensor) -> Tensor:
    """q @ k^T [X, R, N] of one KV tile, E in blocks of `WIDTH_BLOCK` added left to right.

    A whole product is no schedule for heads wider than 160: 8 rows may then be ordered otherwise.
    """
    blocks = zip(q_XRE.split(WIDTH_BLOCK, -1), k_XNE.split(WIDTH_BLOCK, -1), strict=True)
    products = (batched_product(q.contiguous(), k.transpose(1, 2)) for q, k in blocks)
    return functools.reduce(torch.Tensor.add_, products)


def _scores(q_BKRE: Tensor, k_BKNE: Tensor, last_BR: Tensor) -> Tensor:
    """Scaled scores [B x K, R, N], -inf after each row's last position."""
    _, kv_heads, rows, width = q_BKRE.shape
    positions = k_BKNE.shape[2]
    q_XRE = q_BKRE.reshape(-1, rows, width)
    k_XNE = k_BKNE.reshape(-1, positions, width)
    scores_XRN = q_XRE.new_empty((q_XRE.shape[0], rows, positions))
    for start in range(0, positions, KV_TILE):
        span = slice(start, start + KV_TILE)
        scores_XRN[..., span] = tile_scores(q_XRE, k_XNE[:, span])
    scores_XRN *= width**-0.5
    hidden_BRN = torch.arange(positions) > last_BR.unsqueeze(-1)
    scores_BKRN = scores_XRN.view(-1, kv_heads, rows, positions)
    scores_BKRN.masked_fill_(hidden_BRN.unsqueeze(1), float("-inf"))
    return scores_XRN


def _grouped_rows(x_BQHE: Tensor, kv_heads: int, padding: float = 0.0) -> Tensor:
    """[B, Q, H, E] to [B, K, R, E] with R = Q x (H / K), padded to whole row tiles."""
    sequences, queries, heads, width = x_BQHE.shape
    x_BKRE = (
        x_BQHE.view(sequences, queries, kv_heads, heads // kv_heads, width)
        .transpose(1, 2)
        .reshape(sequences, kv_heads, queries * heads // kv_heads, width)
    )
    missing = -x_BKRE.shape[2] % ROW_TILE
    return torch.nn.functional.pad(x_BKRE, (0, 0, 0, missing), value=padding).contiguous()


def _ungrouped(x_BKRE: Tensor, queries: int, heads: int) -> Tensor:
    """The inverse of `_grouped_rows`."""
    sequences, kv_heads, _, width = x_BKRE.shape
    group = heads // kv_heads
    x_BKQGE = x_BKRE[:, :, : queries * group].reshape(sequences, kv_heads, queries, group, width)
    return x_BKQGE.transpose(1, 2).reshape(sequences, queries, heads, width)


def _last_seen(positions_BQ: Tensor, group: int) -> Tensor:
    """[B, R]: the last KV position each padded row may see (padding rows see position 0)."""
    last_BR = positions_BQ.repeat_interleave(group, dim=1)
    return torch.nn.functional.pad(last_BR, (0, -last_BR.shape[1] % ROW_TILE))


def _attend_rows(q_BQHE, k_BNKE, v_BNKE, positions_BQ: Tensor) -> tuple[Tensor, Tensor]:
    """One padded block: o_BQHE and lse_BQH in float32. Long query spans go in pieces."""
    heads, kv_heads = q_BQHE.shape[2], k_BNKE.shape[2]
    k_BKNE = k_BNKE.float().transpose(1, 2).contiguous()
    v_BKNE = v_BNKE.float().transpose(1, 2).contiguous()
    step = max(ROW_TILE, SCORES_LIMIT // (len(q_BQHE) * heads * k_BKNE.shape[2]))
    outputs, lses = [], []
    for start in range(0, q_BQHE.shape[1], step):
        q_piece, positions = q_BQHE[:, start : start + step], positions_BQ[:, start : start + step]
        last_BR = _last_seen(positions, heads // kv_heads)
        o_BKRE, lse_BKR = core(_grouped_rows(q_piece.float(), kv_heads), k_BKNE, v_BKNE, last_BR)
        outputs.append(_ungrouped(o_BKRE, q_piece.shape[1], heads))
        lses.append(_ungrouped(lse_BKR.unsqueeze(-1), q_piece.shape[1], heads).squeeze(-1))
    return torch.cat(outputs, 1), torch.cat(lses, 1)


def _row_index(starts: list[int], lens: list[int], width: int) -> tuple[Tensor, Tensor]:
    """[B, width] indices of rows starts[b] + i, and whether i < lens[b] (others repeat row 0)."""
    offsets_1W = torch.arange(width).unsqueeze(0)
    valid_BW = offsets_1W < torch.tensor(lens).unsqueeze(1)
    index_BW = torch.tensor(starts).unsqueeze(1) + offsets_1W
    return torch.where(valid_BW, index_BW, torch.tensor(starts).unsqueeze(1)), valid_BW


def packed_forward(q_THE, k_TKE, v_TKE, starts: list[int]) -> tuple[Tensor, Tensor]:
    lens = [end - start for start, end in itertools.pairwise(starts)]
    o_THE = torch.empty_like(q_THE)
    lse_TH = q_THE.new_empty(q_THE.shape[:2], dtype=torch.float32)
    for block in plan_blocks(lens, lens, SCORES_LIMIT // q_THE.shape[1]):
        index_BQ, valid_BQ, index_BN, _ = _packed_index(block, starts, lens)
        positions_BQ = torch.arange(block.queries).expand(len(block.sequences), -1)
        o_BQHE, lse_BQH = _attend_rows(
            q_THE[index_BQ], k_TKE[index_BN], v_TKE[index_BN], positions_BQ
        )
        o_THE[index_BQ[valid_BQ]] = o_BQHE[valid_BQ].to(q_THE.dtype)
        lse_TH[index_BQ[valid_BQ]] = lse_BQH[valid_BQ]
    return o_THE, lse_TH


def _packed_index(block: Block, starts: list[int], lens: list[int]):
    chosen_starts = [starts[i] for i in block.sequences]
    chosen_lens = [lens[i] for i in block.sequences]
    return (
        *_row_index(chosen_starts, chosen_lens, block.queries),
        *_row_index(chosen_starts, chosen_lens, block.positions),
    )


def write_pages(k_pages_PSKE, v_pages_PSKE, slots_T, k_TKE, v_TKE) -> None:
    k_pages_PSKE.flatten(0, 1).index_copy_(0, slots_T, k_TKE)
    v_pages_PSKE.flatten(0, 1).index_copy_(0, slots_T, v_TKE)


def paged_forward(q_THE, k_pages_PSKE, v_pages_PSKE, layout) -> Tensor:
    starts = layout.query_starts
    lens = [end - start for start, end in itertools.pairwise(starts)]
    o_THE = torch.empty_like(q_THE)
    for block in plan_blocks(lens, layout.context_lens, SCORES_LIMIT // q_THE.shape[1]):
        chosen_lens = [lens[i] for i in block.sequences]
        index_BQ, valid_BQ = _row_index(
            [starts[i] for i in block.sequences], chosen_lens, block.queries
        )
        first_B1 = torch.tensor([[layout.context_lens[i] - lens[i]] for i in block.sequences])
        positions_BQ = torch.where(valid_BQ, first_B1 + torch.arange(block.queries), 0)
        slots_BN = _page_slots(layout.page_table_BP[block.sequences], k_pages_PSKE.shape[1], block)
        unwritten_BN = (
            torch.arange(block.positions) >= first_B1 + torch.tensor(chosen_lens)[:, None]
        )
        v_BNKE = v_pages_PSKE.flatten(0, 1)[slots_BN].masked_fill_(unwritten_BN[..., None, None], 0)
        k_BNKE = k_pages_PSKE.flatten(0, 1)[slots_BN]
        o_BQHE, _ = _attend_rows(q_THE[index_BQ], k_BNKE, v_BNKE, positions_BQ)
        o_THE[index_BQ[valid_BQ]] = o_BQHE[valid_BQ].to(q_THE.dtype)
    return o_THE


def _page_slots(page_table_BP: Tensor, page_size: int, block: Block) -> Tensor:
    """[B, N] cache rows of positions 0..N-1; positions past the table repeat its last page."""
    positions_N = torch.arange(block.positions)
    page_N = (positions_N // page_size).clamp_(max=page_table_BP.shape[1] - 1)
    return page_table_BP[:, page_N] * page_size + positions_N % page_size


def packed_backward(do_THE, q_THE, k_TKE, v_TKE, o_THE, lse_TH, starts: list[int]):
    lens = [end - start for start, end in itertools.pairwise(starts)]
    heads, kv_heads = q_THE.shape[1], k_TKE.shape[1]
    dq_THE, dk_TKE, dv_TKE = (torch.zeros_like(x) for x in (q_THE, k_TKE, v_TKE))
    for block in plan_blocks(lens, lens, SCORES_LIMIT // heads):
        index_BQ, valid_BQ, index_BN, valid_BN = _packed_index(block, starts, lens)
        lse_BQH = lse_TH[index_BQ].masked_fill_(~valid_BQ.unsqueeze(-1), float("inf"))
        q_XRE, do_XRE, o_XRE = (_rows(x[index_BQ], kv_heads) for x in (q_THE, do_THE, o_THE))
        lse_XR1 = _rows(lse_BQH.unsqueeze(-1), kv_heads, padding=float("inf"))
        last_R = _last_seen(torch.arange(block.queries).unsqueeze(0), heads // kv_heads)[0]
        k_XNE, v_XNE = (_positions(x_TKE[index_BN]) for x_TKE in (k_TKE, v_TKE))
        dq_XRE, dk_XNE, dv_XNE = _block_gradients(
            q_XRE, do_XRE, o_XRE, lse_XR1, last_R, k_XNE, v_XNE
        )
        dq_BKRE = dq_XRE.unflatten(0, (-1, kv_heads))
        dq_THE[index_BQ[valid_BQ]] = _ungrouped(dq_BKRE, block.queries, heads)[valid_BQ].to(
            q_THE.dtype
        )
        for d_TKE, d_XNE in ((dk_TKE, dk_XNE), (dv_TKE, dv_XNE)):
            d_BNKE = d_XNE.unflatten(0, (-1, kv_heads)).transpose(1, 2)
            d_TKE[index_BN[valid_BN]] = d_BNKE[valid_BN].to(d_TKE.dtype)
    return dq_THE, dk_TKE, dv_TKE


def _rows(x_BQHE: Tensor, kv_heads: int, padding: float = 0.0) -> Tensor:
    """[B x K, R, E] float32: grouped rows of a padded block."""
    x_BKRE = _grouped_rows(x_BQHE.float(), kv_heads, padding)
    return x_BKRE.flatten(0, 1)


def _positions(x_BNKE: Tensor) -> Tensor:
    """[B x K, N, E] float32."""
    return x_BNKE.float().transpose(1, 2).contiguous().flatten(0, 1)


def _block_gradients(q_XRE, do_XRE, o_XRE, lse_XR1, last_R, k_XNE, v_XNE):
    """Gradients of one padded block, by row blocks and KV tiles in increasing order.

    With P = exp(S - lse): dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = dS K, dK = dS^T Q
    (Dao et al. 2022, "FlashAttention", appendix B.2).
    """
    scale = q_XRE.shape[-1] ** -0.5
    delta_XR1 = row_sum(do_XRE * o_XRE)
    dq_XRE, dk_XNE, dv_XNE = (torch.zeros_like(x) for x in (q_XRE, k_XNE, v_XNE))
    for row in range(0, q_XRE.shape[1], ROW_BLOCK):
        rows = slice(row, row + ROW_BLOCK)
        q, do, last_r = q_XRE[:, rows], do_XRE[:, rows], last_R[rows]
        for position in range(0, int(last_r.max()) + 1, KV_TILE):
            span = slice(position, position + KV_TILE)
            k, v = k_XNE[:, span], v_XNE[:, span]
            hidden_rn = torch.arange(position, position + KV_TILE) > last_r.unsqueeze(-1)
            scores = tile_scores(q, k).mul_(scale)
            p = exp(scores.sub_(lse_XR1[:, rows])).masked_fill_(hidden_rn, 0.0)
            ds = batched_product(do, v.transpose(1, 2)).sub_(delta_XR1[:, rows]).mul_(p).mul_(scale)
            dv_XNE[:, span] += batched_product(p.transpose(1, 2), do)
            dq_XRE[:, rows] += batched_product(ds, k)
            dk_XNE[:, span] += batched_product(ds.transpose(1, 2), q)
    return dq_XRE, dk_XNE, dv_XNE
