"""torch's global settings that change what every op computes, refused before they do."""

import torch

LEAST_SUBNORMAL = 2.0**-149


class NumericsError(RuntimeError):
    """A setting of this process under which no contract holds; the message says how to undo it."""


def require_plain_numerics(device: torch.device) -> None:
    """Refuse what would change float32 arithmetic or the dtype of new tensors in this thread.

    Takes a few microseconds, so callers check before every forward: another library may switch
    something in the middle of a run. The number of threads may change at any time.

    Args:
        device: where ops run.

    Raises:
        NumericsError: another default dtype, autocast; on a CPU also flushed subnormals, and
            float32 products of less than float32's precision.
    """
    if torch.get_default_dtype() != torch.float32:
        raise NumericsError(
            f"torch's default dtype is {torch.get_default_dtype()}: set it back with"
            " torch.set_default_dtype(torch.float32)"
        )
    if torch.is_autocast_enabled(device.type):
        raise NumericsError(
            f"autocast is on for {device.type}: call the engine and the trainer outside"
            " torch.autocast, and choose a dtype in their settings"
        )
    if device.type != "cpu":
        return
    if (torch.full((1,), 2 * LEAST_SUBNORMAL) * 0.5).item() == 0.0:
        raise NumericsError(
            "numbers below the least normal float32 are flushed to zero in this thread: call"
            " torch.set_flush_denormal(False), or find the library that set it"
        )
    precision = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore
    if precision not in ("none", "ieee"):
        raise NumericsError(
            f"products of float32 are computed in {precision} here: set it back with"
            ' torch.set_float32_matmul_precision("highest"), or with'
            ' torch.backends.mkldnn.matmul.fp32_precision = "ieee" if that was used'
        )
