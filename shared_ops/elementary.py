"""Square root, exp and log. exp and log are torch's, or plain ones on a CPU where those differ.

Contract: an element's bits depend on that element only, not on its place in the array, on others or
on the number of threads. The library keeps to it wherever that was measured, but promises nothing,
and it rounds some values otherwise on another processor or with other instructions. The attestation
checks it, and sampler and trainer compare what they measured. Where it breaks or differs,
`use_plain` puts in its place: a float64 polynomial by Horner's rule, one elementwise IEEE 754
operation at a time, which every processor rounds alike, rounded to float32 at the end (within
0.501 units in the last place).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_plain: set[str] = set()

# ln(2) in two parts; the last 21 bits of the first are zero, so that n * LN2_HIGH is exact.
LN2_HIGH = float.fromhex("0x1.62e42feep-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
EXP_TERMS = [1.0 / math.factorial(n) for n in range(14)]
# log(m) = 2 atanh(s), s = (m - 1) / (m + 1): 2 s^(2 n + 1) / (2 n + 1), |s| < 0.172.
LOG_TERMS = [2.0 / (2 * n + 1) for n in range(11)]
FUNCTIONS = ("exp", "log", "log of float64")


def use_plain(names: Iterable[str]) -> None:
    """Compute these of FUNCTIONS by the plain schedule from now on, in this process."""
    names = set(names)
    if unknown := names - set(FUNCTIONS):
        raise ValueError(
            f"{sorted(unknown)[0]!r} has no plain schedule: use one of {', '.join(FUNCTIONS)}"
        )
    _plain.update(names)


def in_plain_use() -> frozenset[str]:
    return frozenset(_plain)


def square_root(x: Tensor) -> Tensor:
    """float32 square root, rounded once, as in IEEE 754; torch's own float32 one is not.

    The root of a float32 number is at least 2^-51 of its size away from the middle between two
    others, so a float64 root that is right within a unit in the last place rounds to it.
    """
    return x.double().sqrt().float()


def exp(x: Tensor) -> Tensor:
    """float32 e^x of a float32 tensor."""
    return plain_exp(x) if "exp" in _plain and not x.is_cuda else torch.exp(x)


def log(x: Tensor) -> Tensor:
    """float32 natural logarithm of a float32 tensor."""
    return plain_log(x) if "log" in _plain and not x.is_cuda else torch.log(x)


def log_of_float64(x: Tensor) -> Tensor:
    """float64 natural logarithm of a float64 tensor."""
    return _wide_log(x) if "log of float64" in _plain and not x.is_cuda else torch.log(x)


def plain_exp(x: Tensor) -> Tensor:
    """e^x = 2^n e^r with |r| <= ln(2) / 2."""
    wide = x.double().clamp(-200.0, 200.0)
    n = torch.round(wide * (1.0 / math.log(2)))
    r = (wide - n * LN2_HIGH) - n * LN2_LOW
    e_to_r = _horner(r, EXP_TERMS)
    power_of_two = ((n.to(torch.int64) + 1023) << 52).view(torch.float64)
    return (e_to_r * power_of_two).float()


def plain_log(x: Tensor) -> Tensor:
    return _wide_log(x.double()).float()


def _wide_log(x: Tensor) -> Tensor:
    """log(2^n m) = n ln(2) + log(m) with m in [sqrt(1/2), sqrt(2)); -inf at 0, NaN below."""
    m, n = torch.frexp(x)
    is_low = m < math.sqrt(0.5)
    m, n = torch.where(is_low, m * 2.0, m), (n - is_low.to(n.dtype)).double()
    s = (m - 1.0) / (m + 1.0)
    log_m = s * _horner(s * s, LOG_TERMS)
    result = n * LN2_HIGH + (n * LN2_LOW + log_m)
    result = torch.where(x == 0, -torch.inf, result)
    result = torch.where(x == torch.inf, torch.inf, result)
    return torch.where((x < 0) | x.isnan(), torch.nan, result)


def _horner(x: Tensor, terms: list[float]) -> Tensor:
    total = torch.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        total = total * x + term
    return total
