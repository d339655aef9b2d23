"""linear in plain torch (contract: op.py)."""

from torch import Tensor

from shared_ops.primitives import fixed_product, token_product, token_sum


def forward(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    y_TN = fixed_product(x_TK, w_NK.T)
    if bias_N is not None:
        y_TN = y_TN + bias_N.float()
    return y_TN.to(x_TK.dtype)


def backward(dy_TN: Tensor, x_TK: Tensor, w_NK: Tensor, needs):
    dx_TK = fixed_product(dy_TN, w_NK).to(x_TK.dtype) if needs[0] else None
    dw_NK = token_product(dy_TN, x_TK).to(w_NK.dtype) if needs[1] else None
    dbias_N = token_sum(dy_TN).to(w_NK.dtype) if needs[2] else None
    return dx_TK, dw_NK, dbias_N
