"""rmsnorm in plain torch (contract: op.py)."""

from torch import Tensor

from shared_ops.elementary import square_root
from shared_ops.primitives import row_sum, token_sum


def _inverse_rms(x_RD: Tensor, eps: float) -> Tensor:
    mean_R1 = row_sum(x_RD * x_RD).div_(x_RD.shape[-1])
    return square_root(mean_R1.add_(eps)).reciprocal_()


def forward(x_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    wide_RD = x_RD.float()
    return (wide_RD * _inverse_rms(wide_RD, eps)).mul_(w_D.float()).to(x_RD.dtype)


def backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    w_D: Tensor,
    eps: float,
    residual_RD: Tensor | None = None,
    out_RD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """residual_RD: added to dx, after dx was rounded; out_RD: where dx is put."""
    wide_RD, dy_RD = x_RD.float(), dy_RD.float()
    inverse_R1 = _inverse_rms(wide_RD, eps)
    normed_RD = wide_RD * inverse_R1
    scaled_RD = dy_RD * w_D.float()
    mean_R1 = row_sum(scaled_RD * normed_RD).div_(x_RD.shape[-1])
    dw_D = token_sum((dy_RD * normed_RD).reshape(-1, x_RD.shape[-1]))
    dx_RD = scaled_RD.sub_(normed_RD.mul_(mean_R1)).mul_(inverse_R1).to(x_RD.dtype)
    if residual_RD is not None:
        dx_RD = dx_RD.add_(residual_RD)
    return dx_RD if out_RD is None else out_RD.copy_(dx_RD), dw_D.to(w_D.dtype)
