# pyright: reportMissingImports=false, reportIndexIssue=false
"""embedding on CUDA (contract: op.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def forward(token_ids_T: Tensor, w_VD: Tensor) -> Tensor:
    return w_VD.index_select(0, token_ids_T)


def backward(dy_TD: Tensor, token_ids_T: Tensor, rows: int) -> Tensor:
    """Equal tokens are brought together by a stable sort; one program adds each run, in order."""
    tokens, width = dy_TD.shape
    dw_VD = dy_TD.new_zeros((rows, width))
    if tokens:
        ids_T, order_T = torch.sort(token_ids_T, stable=True)
        grid = (tokens, triton.cdiv(width, BLOCK))
        _add_runs[grid](
            dy_TD.contiguous(), ids_T, order_T, dw_VD, tokens, width, BLOCK=BLOCK, num_warps=2
        )
    return dw_VD


@triton.jit(do_not_specialize=["tokens"])
def _add_runs(dy_ptr, ids_ptr, order_ptr, dw_ptr, tokens, width, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + first)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    if token != before:
        total = tl.zeros((BLOCK,), tl.float32)
        here = token
        index = first
        while here == token:
            t = tl.load(order_ptr + index)
            total += tl.load(dy_ptr + t * width + d, mask=d < width, other=0.0).to(tl.float32)
            index += 1
            here = tl.load(ids_ptr + index, mask=index < tokens, other=-1)
        tl.store(dw_ptr + token * width + d, total.to(dw_ptr.dtype.element_ty), mask=d < width)
