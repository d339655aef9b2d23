"""The plain schedule of a float32 product: chains of fused multiply-adds, from IEEE 754 alone.

chain[m, n] = fma(x[m, K-1], w[K-1, n], ... fma(x[m, 1], w[1, n], fma(x[m, 0], w[0, n], 0))): K in
increasing order, one rounding to float32 per term (IEEE 754-2008, 5.4.1). Nothing here is left to
a library's order of sums or to a compiler's choice of instructions: every step is one elementwise
float64 operation, which all processors round alike. It is the definition that faster schedules are
checked against (`cpu_products`), and it runs where none of them keeps to it.

A float64 product of two float32 numbers is exact. Their sum with the chain so far is rounded to
float64 first and to float32 then; the two roundings give another value than one only where the
float64 lies in the middle between two float32 numbers and the exact sum does not. Those are found
and moved off the middle, towards the exact sum.
"""

import torch
from torch import Tensor

# Accumulators of one pass, so that they stay in a core's own cache.
PASS_LIMIT = 1 << 14
# A float64 that is no float32 and whose last 28 bits are zero may be such a middle.
LOW_BITS = (1 << 28) - 1


def chain(x_XMK: Tensor, w_XKN: Tensor) -> Tensor:
    """float32 [X, M, N]: the product of float32 operands as above; slow (50 to 100 times)."""
    count, rows, columns = *x_XMK.shape[:2], w_XKN.shape[2]
    out_XMN = x_XMK.new_empty((count, rows, columns))
    width = min(columns, PASS_LIMIT)
    step = max(1, PASS_LIMIT // max(1, width))
    for index in range(count):
        for first in range(0, columns, width):
            w_Kn = w_XKN[index, :, first : first + width].double()
            for row in range(0, rows, step):
                x_mK = x_XMK[index, row : row + step].double()
                out_XMN[index, row : row + step, first : first + width] = _chain(x_mK, w_Kn)
    return out_XMN


def _chain(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """float32 [M, N] of float64 operands that hold float32 numbers."""
    total_MN = x_MK.new_zeros((x_MK.shape[0], w_KN.shape[1]))
    for k in range(x_MK.shape[1]):
        term_MN = x_MK[:, k : k + 1] * w_KN[k]
        sum_MN = term_MN + total_MN
        rounded_MN = sum_MN.float().double()
        is_middle_MN = ((sum_MN.view(torch.int64) & LOW_BITS) == 0) & (sum_MN != rounded_MN)
        if is_middle_MN.any():
            terms, totals = term_MN[is_middle_MN], total_MN[is_middle_MN]
            rounded_MN[is_middle_MN] = _rounded_once(terms, totals)
        total_MN = rounded_MN
    return total_MN.float()


def _rounded_once(terms: Tensor, totals: Tensor) -> Tensor:
    """terms + totals rounded once to float32, as float64 (the error is Knuth's TwoSum)."""
    sums = terms + totals
    back = sums - terms
    errors = (terms - (sums - back)) + (totals - back)
    towards = torch.where(errors > 0, torch.inf, -torch.inf).to(sums)
    nudged = torch.where(errors == 0, sums, torch.nextafter(sums, towards))
    return nudged.float().double()
