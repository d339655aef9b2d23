"""sample: one draw from softmax(logits), a function of (logits, key, position) and nothing else.

Contract: Gumbel-max. The drawn token is the argmax over v of logits[v] + g[v] in float32, the
lowest v on ties, with g = -log(-log u) rounded to float32. u = (x + 1/2) / 2^32, and x is word
v mod 4 of Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") at
counter (v div 4, position, 0, 0) under the request's key. A maximum has no order, so splitting
the vocabulary cannot change the token. CUDA has the same words, and takes the logarithms in float32
(near u = 1 by a series in 1 - u), so a draw can differ from a CPU's where two scores almost tie.

A row with a NaN has no maximum: it gives some number in 0..V (V on the CPU) and no other row feels
it. Its log probability is NaN, which the caller has to refuse; looking here would stall a GPU.
"""

from types import ModuleType

from torch import Tensor

from shared_ops import cuda
from shared_ops.sample import reference


def _schedules(x: Tensor) -> ModuleType:
    return cuda.kernels("sample", x) if x.is_cuda else reference


def draw(logits_BV: Tensor, keys_B2: Tensor, positions_B: Tensor) -> Tensor:
    """Draw one token per row.

    Args:
        logits_BV: [B, V] float32, already divided by the temperature; -inf is never drawn.
        keys_B2: [B, 2] int64, two 32-bit words each (`shared_ops.sample.key.request_key`).
        positions_B: [B] int64, the drawn token's index in its sequence.

    Returns:
        [B] int64.
    """
    return _schedules(logits_BV).draw(logits_BV, keys_B2, positions_B)


def greedy(logits_BV: Tensor) -> Tensor:
    """[B] int64: each row's largest logit, the lowest index on ties."""
    return _schedules(logits_BV).first_argmax(logits_BV)
