# pyright: reportMissingImports=false, reportIndexIssue=false
"""logprob on CUDA (contract: op.py).

A row's vocabulary is reduced in chunks of `CHUNK`, each in one program; how a chunk is added
follows from its register layout, which follows from the vocabulary size alone (rows are brought to
one alignment, the row count is never specialised on).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_ops.primitives import aligned
from shared_ops.products import product

CHUNK = 4096
LOGITS_LIMIT = 1 << 28
ROW_TILE = 128


def head_logits(hidden_BD: Tensor, head_VD: Tensor, multiply=product) -> Tensor:
    return multiply(hidden_BD, head_VD, out_dtype=torch.float32)


def scaled_logits(
    hidden_BD, head_VD, temperature_B: Tensor, vocab_limit: int, multiply=product
) -> Tensor:
    logits_BV = head_logits(hidden_BD, head_VD, multiply)
    rows, vocabulary = logits_BV.shape
    if rows:
        grid = (rows, triton.cdiv(vocabulary, CHUNK))
        _scale[grid](logits_BV, temperature_B.contiguous(), vocabulary, vocab_limit, CHUNK=CHUNK)
    return logits_BV


def select_logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    ones_B = torch.ones(len(tokens_B), device=logits_BV.device)
    return reduce(logits_BV, tokens_B, ones_B, logits_BV.shape[1])[0]


def reduce(
    logits_BV: Tensor, tokens_B: Tensor, temperature_B: Tensor, vocab_limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float32 [B] each: log probability, entropy, row maximum, sum of exponentials.

    The logits are scaled on the way (dividing scaled ones by 1 changes no bit).
    """
    rows, vocabulary = logits_BV.shape
    temperature_B = temperature_B.contiguous()
    logits_BV = aligned(logits_BV)
    chunks = triton.cdiv(vocabulary, CHUNK)
    out = [torch.empty(rows, dtype=torch.float32, device=logits_BV.device) for _ in range(4)]
    if rows == 0:
        return out[0], out[1], out[2], out[3]
    parts = [logits_BV.new_empty((rows, chunks)) for _ in range(3)]
    _reduce_chunk[(rows, chunks)](
        logits_BV, temperature_B, *parts, vocabulary, vocab_limit, chunks, CHUNK=CHUNK, num_warps=4
    )
    _reduce_row[(rows,)](
        logits_BV, temperature_B, tokens_B.contiguous(), *parts, *out, vocabulary, vocab_limit,
        chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return out[0], out[1], out[2], out[3]


def _row_blocks(rows: int, vocabulary: int) -> list[slice]:
    step = max(ROW_TILE, LOGITS_LIMIT // vocabulary // ROW_TILE * ROW_TILE)
    return [slice(start, start + step) for start in range(0, rows, step)]


def token_logprobs(hidden_TD, head_VD, targets_T, temperature_T, vocab_limit: int):
    """Log probabilities, entropies, and what the backward needs: [3, T] entropies again, row
    maxima and sums."""
    out_4T = torch.empty((4, len(targets_T)), dtype=torch.float32, device=hidden_TD.device)
    for rows in _row_blocks(len(targets_T), head_VD.shape[0]):
        logits_BV = head_logits(hidden_TD[rows], head_VD)
        found = reduce(logits_BV, targets_T[rows], temperature_T[rows], vocab_limit)
        out_4T[:, rows] = torch.stack(found)
    return out_4T[0], out_4T[1], out_4T[1:]


def token_logprobs_backward(
    grad_T,
    hidden_TD,
    head_VD,
    targets_T,
    temperature_T,
    saved_3T,
    vocab_limit: int,
    grad_entropy_T=None,
    needs_head: bool = True,
):
    """d logprob / d logits = (onehot - softmax) / temperature, the entropy's gradient added where
    one arrives, rounded to the input's dtype.

    Both products are library calls on row blocks in increasing order; dhead adds the blocks in
    float32.
    """
    dhidden_TD = torch.empty_like(hidden_TD)
    dhead_VD = None
    scale_T = grad_T.float() / temperature_T
    entropy_scale_T = scale_T if grad_entropy_T is None else grad_entropy_T.float() / temperature_T
    for rows in _row_blocks(len(targets_T), head_VD.shape[0]):
        logits_BV = head_logits(hidden_TD[rows], head_VD)
        dlogits_BV = torch.empty_like(logits_BV, dtype=hidden_TD.dtype)
        grid = (logits_BV.shape[0], triton.cdiv(logits_BV.shape[1], CHUNK))
        _gradient[grid](
            logits_BV, temperature_T[rows].contiguous(), targets_T[rows].contiguous(),
            scale_T[rows], entropy_scale_T[rows], *saved_3T[:, rows].contiguous(), dlogits_BV,
            logits_BV.shape[1], vocab_limit,
            WITH_ENTROPY=grad_entropy_T is not None, CHUNK=CHUNK,
        )  # fmt: skip
        del logits_BV
        dhidden_TD[rows] = torch.mm(dlogits_BV, head_VD)
        if needs_head:
            dhead_VD = _add_product(dhead_VD, dlogits_BV.T, hidden_TD[rows])
    if dhead_VD is None:
        return dhidden_TD, torch.zeros_like(head_VD) if needs_head else None
    return dhidden_TD, dhead_VD.to(head_VD.dtype)


def _add_product(total_MN: Tensor | None, left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """total + left @ right in float32, in place after the first time."""
    if left_MK.dtype == torch.float32:
        return left_MK @ right_KN if total_MN is None else total_MN.addmm_(left_MK, right_KN)
    if total_MN is None:
        return torch.mm(left_MK, right_KN, out_dtype=torch.float32)
    return torch.addmm(total_MN, left_MK, right_KN, out_dtype=torch.float32, out=total_MN)


@triton.jit
def row_and_chunk(vocabulary, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    return row, v, row * vocabulary + v


@triton.jit
def scaled(logits_ptr, temperature_ptr, row, v, at, vocabulary, limit):
    """logits / temperature, -inf outside the vocabulary and from the limit on."""
    x = tl.load(logits_ptr + at, mask=v < vocabulary, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if temperature != 1.0:  # dividing by 1 changes no bit
        x = tl.div_rn(x, temperature)
    return tl.where(v < limit, x, float("-inf"))


@triton.jit(do_not_specialize=["limit"])
def _scale(logits_ptr, temperature_ptr, vocabulary, limit, CHUNK: tl.constexpr):
    row, v, at = row_and_chunk(vocabulary, CHUNK)
    x = scaled(logits_ptr, temperature_ptr, row, v, at, vocabulary, limit)
    tl.store(logits_ptr + at, x, mask=v < vocabulary)


@triton.jit
def exponentials(x):
    """Of one chunk of one row: its maximum m, x - m, and exp(x - m)."""
    top = tl.max(x, 0)
    shifted = x - tl.where(top == float("-inf"), 0.0, top)
    return top, shifted, tl.exp(shifted)


@triton.jit(do_not_specialize=["limit", "chunks"])
def _reduce_chunk(
    logits_ptr, temperature_ptr, top_ptr, sum_ptr, weighted_ptr, vocabulary, limit, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Maximum m, sum of exp(x - m), and sum of exp(x - m) (x - m) of one chunk of one row."""
    row, v, at = row_and_chunk(vocabulary, CHUNK)
    x = scaled(logits_ptr, temperature_ptr, row, v, at, vocabulary, limit)
    top, shifted, p = exponentials(x)
    to = row * chunks + tl.program_id(1)
    tl.store(top_ptr + to, top)
    tl.store(sum_ptr + to, tl.sum(p, 0))
    tl.store(weighted_ptr + to, tl.sum(p * tl.maximum(shifted, -1e4), 0))


@triton.jit
def row_sum(top_ptr, sum_ptr, at, inside):
    """Of one row: its chunks' maxima and sums, the factors to the row's maximum, that maximum, and
    the sum of exponentials there."""
    tops = tl.load(top_ptr + at, mask=inside, other=float("-inf"))
    sums = tl.load(sum_ptr + at, mask=inside, other=0.0)
    top = tl.max(tops, 0)
    factor = tl.exp(tops - top)
    return tops, sums, factor, top, tl.sum(sums * factor, 0)


@triton.jit
def chosen_logit(logits_ptr, temperature_ptr, row, token, vocabulary):
    return tl.div_rn(tl.load(logits_ptr + row * vocabulary + token), tl.load(temperature_ptr + row))


@triton.jit(do_not_specialize=["limit", "chunks"])
def _reduce_row(
    logits_ptr,
    temperature_ptr,
    tokens_ptr,
    top_ptr,
    sum_ptr,
    weighted_ptr,
    logprob_ptr,
    entropy_ptr,
    row_top_ptr,
    row_sum_ptr,
    vocabulary,
    limit,
    chunks,
    CHUNKS: tl.constexpr,
):
    """Chunks rescaled to the row's maximum and added; entropy = log(sum) - weighted / sum."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, CHUNKS)
    at = row * chunks + j
    weighted = tl.load(weighted_ptr + at, mask=j < chunks, other=0.0)
    tops, sums, factor, top, total = row_sum(top_ptr, sum_ptr, at, j < chunks)
    moved = tl.where(tops == float("-inf"), 0.0, weighted + sums * (tops - top))
    log_total = tl.log(total)
    chosen = chosen_logit(logits_ptr, temperature_ptr, row, tl.load(tokens_ptr + row), vocabulary)
    chosen = tl.where(tl.load(tokens_ptr + row) < limit, chosen, float("-inf"))
    tl.store(logprob_ptr + row, chosen - top - log_total)
    tl.store(entropy_ptr + row, log_total - tl.sum(moved * factor, 0) / total)
    tl.store(row_top_ptr + row, top)
    tl.store(row_sum_ptr + row, total)


@triton.jit(do_not_specialize=["limit"])
def _gradient(
    logits_ptr,
    temperature_ptr,
    targets_ptr,
    scale_ptr,
    entropy_scale_ptr,
    entropy_ptr,
    top_ptr,
    sum_ptr,
    dlogits_ptr,
    vocabulary,
    limit,
    WITH_ENTROPY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The sum of p s over a row is log(sum) - entropy."""
    row, v, at = row_and_chunk(vocabulary, CHUNK)
    x = scaled(logits_ptr, temperature_ptr, row, v, at, vocabulary, limit)
    shifted = x - tl.load(top_ptr + row)
    p = tl.exp(shifted) / tl.load(sum_ptr + row)
    onehot = tl.where(v == tl.load(targets_ptr + row), 1.0, 0.0)
    dlogits = (onehot - p) * tl.load(scale_ptr + row)
    if WITH_ENTROPY:
        mean = tl.log(tl.load(sum_ptr + row)) - tl.load(entropy_ptr + row)
        slope = p * (tl.maximum(shifted, -1e4) - mean)
        dlogits -= slope * tl.load(entropy_scale_ptr + row)
    tl.store(dlogits_ptr + at, dlogits.to(dlogits_ptr.dtype.element_ty), mask=v < vocabulary)
