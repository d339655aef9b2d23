"""rmsnorm in plain torch (contract: op.py)."""

from torch import Tensor

from shared_ops.primitives import row_sum


def _inverse_rms(x_RD: Tensor, eps: float) -> Tensor:
    return 1.0 / (row_sum(x_RD * x_RD) / x_RD.shape[-1] + eps).sqrt()


def forward(x_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    wide_RD = x_RD.float()
    return (wide_RD * _inverse_rms(wide_RD, eps) * w_D.float()).to(x_RD.dtype)


def backward(dy_RD: Tensor, x_RD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide_RD, dy_RD = x_RD.float(), dy_RD.float()
    inverse_R1 = _inverse_rms(wide_RD, eps)
    normed_RD = wide_RD * inverse_R1
    scaled_RD = dy_RD * w_D.float()
    mean_R1 = row_sum(scaled_RD * normed_RD) / x_RD.shape[-1]
    dx_RD = (scaled_RD - normed_RD * mean_R1) * inverse_R1
    dw_D = (dy_RD * normed_RD).reshape(-1, x_RD.shape[-1]).sum(0)
    return dx_RD.to(x_RD.dtype), dw_D.to(w_D.dtype)
