# pyright: reportMissingImports=false, reportIndexIssue=false
"""The gradients of packed attention on CUDA (contract: op.py).

With P = exp(S - lse): dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = dS K, dK = dS^T Q
(Dao et al. 2022, "FlashAttention", appendix B.2). P and dS are rounded to the input's dtype before
a product. `lse_ptr` holds base-2 logarithms.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def delta(
    do_ptr, o_ptr, delta_ptr, rows, width: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    """rowsum(dO O) in float32."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    e = tl.arange(0, WIDE)
    inside = (r[:, None] < rows) & (e[None, :] < width)
    at = r[:, None] * width + e[None, :]
    do = tl.load(do_ptr + at, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + r, tl.sum(do * o, 1), mask=r < rows)


@triton.jit
def _probabilities(q, k, lse, n, query, scale):
    s = tl.dot(q, k.T, input_precision="ieee")
    p = tl.exp2(tl.fma(s, scale * LOG2_E, -lse[:, None]))
    return tl.where(n[None, :] <= query[:, None], p, 0.0)


@triton.jit
def gradient_of_queries(
    q_ptr,
    k_ptr,
    v_ptr,
    dq_ptr,
    tiles_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    starts_ptr,
    heads,
    width: tl.constexpr,
    stride_q,
    stride_k,
    stride_v,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile of rows (query r div GROUP, head r mod GROUP): KV tiles in increasing order."""
    sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    row = first + tl.arange(0, ROWS)
    query = row // GROUP
    head = tl.program_id(1) * GROUP + row % GROUP
    e = tl.arange(0, WIDE)
    valid = query < queries
    inside = valid[:, None] & (e[None, :] < width)
    token = (start + query).to(tl.int64)
    q_ptrs = q_ptr + (token * stride_q + head * width)[:, None] + e[None, :]
    flat = token * heads + head
    q = tl.load(q_ptrs, mask=inside, other=0.0)
    do = tl.load(do_ptr + flat[:, None] * width + e[None, :], mask=inside, other=0.0)
    lse = tl.load(lse_ptr + flat, mask=valid, other=float("inf"))
    mean = tl.load(delta_ptr + flat, mask=valid, other=0.0)
    k_base = k_ptr + tl.program_id(1) * width
    v_base = v_ptr + tl.program_id(1) * width
    dq = tl.zeros((ROWS, WIDE), tl.float32)
    stop = tl.minimum((first + ROWS - 1) // GROUP + 1, queries)
    for low in range(0, stop, TILE):
        n = low + tl.arange(0, TILE)
        at = (start + n).to(tl.int64)[:, None]
        kv_inside = (n[:, None] < stop) & (e[None, :] < width)
        k = tl.load(k_base + at * stride_k + e[None, :], mask=kv_inside, other=0.0)
        v = tl.load(v_base + at * stride_v + e[None, :], mask=kv_inside, other=0.0)
        p = _probabilities(q, k, lse, n, query, scale)
        dp = tl.dot(do, v.T, input_precision="ieee")
        ds = (p * (dp - mean[:, None])).to(q.dtype)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    dq_ptrs = dq_ptr + flat[:, None] * width + e[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradient_of_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    starts_ptr,
    heads,
    width: tl.constexpr,
    stride_q,
    stride_k,
    stride_v,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One KV tile of one KV head: the rows of its whole group in increasing order."""
    sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    kv_head = tl.program_id(1)
    n = first + tl.arange(0, TILE)
    e = tl.arange(0, WIDE)
    kv_inside = (n[:, None] < queries) & (e[None, :] < width)
    at = (start + n).to(tl.int64)[:, None]
    k = tl.load(k_ptr + at * stride_k + kv_head * width + e[None, :], mask=kv_inside, other=0.0)
    v = tl.load(v_ptr + at * stride_v + kv_head * width + e[None, :], mask=kv_inside, other=0.0)
    dk = tl.zeros((TILE, WIDE), tl.float32)
    dv = tl.zeros((TILE, WIDE), tl.float32)
    for low in range(first * GROUP // ROWS * ROWS, queries * GROUP, ROWS):
        row = low + tl.arange(0, ROWS)
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        valid = query < queries
        inside = valid[:, None] & (e[None, :] < width)
        token = (start + query).to(tl.int64)
        flat = token * heads + head
        q_ptrs = q_ptr + (token * stride_q + head * width)[:, None] + e[None, :]
        q = tl.load(q_ptrs, mask=inside, other=0.0)
        do = tl.load(do_ptr + flat[:, None] * width + e[None, :], mask=inside, other=0.0)
        lse = tl.load(lse_ptr + flat, mask=valid, other=float("inf"))
        mean = tl.load(delta_ptr + flat, mask=valid, other=0.0)
        p = _probabilities(q, k, lse, n, query, scale)
        dv = tl.dot(p.to(q.dtype).T, do, dv, input_precision="ieee")
        dp = tl.dot(do, v.T, input_precision="ieee")
        ds = (p * (dp - mean[:, None])).to(q.dtype)
        dk = tl.dot(ds.T, q, dk, input_precision="ieee")
    out = at * tl.num_programs(1) * width + kv_head * width + e[None, :]
    tl.store(dk_ptr + out, (dk * scale).to(dk_ptr.dtype.element_ty), mask=kv_inside)
    tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=kv_inside)
