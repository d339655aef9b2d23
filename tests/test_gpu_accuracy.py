"""Accuracy: the error against float64 is at most twice that of torch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu import HALVES, needs_gpu, randn
from poison import poisoned_memory
from torch import Tensor

from shared_ops import ordinary
from shared_ops.opset import EXACT

pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def poison():
    with poisoned_memory():
        yield


def errors(run: Callable[..., Tensor], leaves: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Relative errors of the output and of each leaf's gradient."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = run(*leaves)
    out.backward(direction(out).to(out.dtype))
    got = [out.detach(), *(leaf.grad for leaf in leaves)]
    assert all(x is not None and x.isfinite().all() for x in got)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]


def direction(out: Tensor) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(11)
    return torch.randn(out.shape, generator=generator, device="cuda", dtype=torch.float64)


def compare(
    ours: Callable[..., Tensor], torchs: Callable[..., Tensor], leaves: list[Tensor]
) -> None:
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    out = torchs(*wide)
    out.backward(direction(out))
    wanted = [out.detach(), *(leaf.grad for leaf in wide)]
    pairs = zip(errors(ours, leaves, wanted), errors(torchs, leaves, wanted), strict=True)
    for index, (own, other) in enumerate(pairs):
        assert own <= 2 * other + 1e-7, f"result {index}: error {own:.2e}, torch's {other:.2e}"


@HALVES
def test_linear(dtype) -> None:
    for rows, depth, columns in ((7, 3072, 1024), (700, 896, 1152)):
        leaves = [
            randn(rows, depth, dtype=dtype),
            randn(columns, depth, dtype=dtype, scale=0.03),
            randn(columns, dtype=dtype),
        ]
        compare(EXACT.linear, ordinary.linear, leaves)


@HALVES
@pytest.mark.parametrize("shape", [(300, 896), (50, 7, 128), (3, 100)])
def test_rmsnorm(dtype, shape) -> None:
    leaves = [randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)]
    compare(lambda x, w: EXACT.rmsnorm(x, w, 1e-6), _rmsnorm, leaves)


def _rmsnorm(x: Tensor, w: Tensor) -> Tensor:
    return ordinary.rmsnorm(x, w, 1e-6)


@HALVES
def test_rope_and_swiglu(dtype) -> None:
    angles_TR = randn(77, 32, dtype=torch.float32)
    given = (angles_TR.cos(), angles_TR.sin())
    x_THE = randn(77, 5, 64, dtype=dtype)
    compare(lambda x: EXACT.rope(x, *given), lambda x: _rope(x, *given), [x_THE])
    compare(EXACT.swiglu, ordinary.swiglu, [randn(77, 2 * 1111, dtype=dtype, scale=2.0)])


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@HALVES
def test_embedding(dtype) -> None:
    ids_T = torch.randint(0, 30, (500,), device="cuda")
    compare(
        lambda w: EXACT.embedding(ids_T, w),
        lambda w: ordinary.embedding(ids_T, w),
        [randn(40, 300, dtype=dtype)],
    )


@HALVES
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 4, 128), (14, 2, 64), (6, 2, 96)])
def test_packed_attention(dtype, heads, kv_heads, width) -> None:
    starts = [0, 1, 130, 1330]
    sizes = ((heads, width), (kv_heads, width), (kv_heads, width))
    leaves = [randn(starts[-1], *size, dtype=dtype, seed=n) for n, size in enumerate(sizes)]
    compare(
        lambda q, k, v: EXACT.packed_attention(q, k, v, starts),
        lambda q, k, v: ordinary.packed_attention(q, k, v, starts),
        leaves,
    )


@HALVES
def test_token_logprobs(dtype) -> None:
    vocabulary, limit = 5003, 5000
    targets_T = torch.randint(0, limit, (300,), device="cuda")
    temperature_T = torch.rand(300, device="cuda") + 0.5
    leaves = [
        randn(300, 256, dtype=dtype),
        randn(vocabulary, 256, dtype=dtype, scale=0.1),
    ]

    def ours(hidden: Tensor, head: Tensor) -> Tensor:
        return EXACT.token_logprobs(hidden, head, targets_T, temperature_T, limit)[0]

    compare(
        ours, lambda hidden, head: _logprobs(hidden, head, targets_T, temperature_T, limit), leaves
    )

    def our_bonus(hidden: Tensor, head: Tensor) -> Tensor:
        both = EXACT.token_logprobs(hidden, head, targets_T, temperature_T, limit)
        return both[0] + 3 * both[1]

    def plain_bonus(hidden: Tensor, head: Tensor) -> Tensor:
        logits_TV = (hidden @ head[:limit].T) / temperature_T[:, None].to(hidden.dtype)
        entropy_T = -(logits_TV.softmax(-1) * logits_TV.log_softmax(-1)).sum(-1)
        return _logprobs(hidden, head, targets_T, temperature_T, limit) + 3 * entropy_T

    compare(our_bonus, plain_bonus, leaves)
    logprobs_T, entropy_T = EXACT.token_logprobs(*leaves, targets_T, temperature_T, limit)
    logits_TV = leaves[0].double() @ leaves[1].double()[:limit].T / temperature_T.double()[:, None]
    torch.testing.assert_close(entropy_T.double(), _entropy(logits_TV), rtol=1e-5, atol=1e-5)
    wanted_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
    torch.testing.assert_close(logprobs_T.double(), wanted_T, rtol=1e-5, atol=1e-5)


def _logprobs(hidden, head, targets_T, temperature_T, limit: int) -> Tensor:
    logits_TV = (hidden @ head[:limit].T) / temperature_T[:, None].to(hidden.dtype)
    return logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]


def _entropy(logits_TV: Tensor) -> Tensor:
    return torch.special.entr(logits_TV.softmax(-1)).sum(-1)


def test_float32_ops_are_float32() -> None:
    """Inputs in float32 are multiplied in float32, not in TF32."""
    float32 = torch.float32
    x_TK, w_NK = randn(33, 500, dtype=float32), randn(70, 500, dtype=float32)
    compare(EXACT.linear, lambda x, w: x @ w.T, [x_TK, w_NK])
    starts = [0, 1, 130]
    sizes = ((6, 64), (2, 64), (2, 64))
    leaves = [randn(130, *size, dtype=float32, seed=n) for n, size in enumerate(sizes)]
    compare(
        lambda q, k, v: EXACT.packed_attention(q, k, v, starts),
        lambda q, k, v: ordinary.packed_attention(q, k, v, starts),
        leaves,
    )


def test_draws_follow_the_distribution() -> None:
    """100,000 draws against softmax: chi-square below its 1 - 1e-6 quantile (41 for 9 degrees)."""
    from shared_ops.sample.op import draw

    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 0.1, 1.5, -0.5, 0.7], device="cuda")
    count = 100_000
    keys_B2 = torch.randint(0, 1 << 32, (1, 2), device="cuda").expand(count, -1)
    tokens_B = draw(logits_V.expand(count, -1), keys_B2, torch.arange(count, device="cuda"))
    expected_V = logits_V.double().softmax(0) * count
    observed_V = torch.bincount(tokens_B, minlength=10).double()
    assert float(((observed_V - expected_V) ** 2 / expected_V).sum()) < 48


def test_draws_are_nearly_always_those_of_the_cpu() -> None:
    from shared_ops.sample import reference
    from shared_ops.sample.op import draw

    logits_BV = randn(256, 49152, dtype=torch.float32, scale=2.0)
    keys_B2 = torch.randint(0, 1 << 32, (256, 2))
    positions_B = torch.arange(256)
    wanted_B = reference.draw(logits_BV.cpu(), keys_B2, positions_B)
    got_B = draw(logits_BV, keys_B2.cuda(), positions_B.cuda()).cpu()
    assert (got_B != wanted_B).sum() <= 1
