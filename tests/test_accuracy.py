"""Accuracy: the error against float64 is at most twice that of torch's own op in the same dtype.

Forward and every gradient; the root mean square and the largest error. Bits are tested elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shared_ops.opset import EXACT
from shared_ops.ordinary import ORDINARY

STARTS = [0, 1, 64, 129, 270]
TOKENS = STARTS[-1]
# Below this multiple of one rounding of the output, torch's op is right by luck.
LUCK = 0.25


@dataclass(frozen=True)
class Case:
    """`inputs` are float32 leaves; `exact` is the function in plain float64 arithmetic."""

    name: str
    inputs: tuple[Tensor, ...]
    run: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    to_float32: bool = False


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _linear(width: int, outputs: int) -> Case:
    inputs = (
        random(TOKENS, width, seed=1),
        random(outputs, width, seed=2),
        random(outputs, seed=3),
    )
    return Case(
        f"linear {width} to {outputs}",
        inputs,
        lambda ops, x, w, b: ops.linear(x, w, b),
        lambda x, w, b: x @ w.T + b,
    )


def _lora(width: int, rank: int) -> Case:
    """Two adapters of one input; the columns between them have none."""
    spans, scale = ((0, 40), (57, 90)), 1.7
    inputs = (
        random(TOKENS, 97, seed=1),
        random(TOKENS, width, seed=2),
        random(2 * rank, width, seed=3, scale=width**-0.5),
        random(73, rank, seed=4, scale=0.5),
    )

    def exact(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        paths = [x @ a[:rank].T @ b[:40].T, x @ a[rank:].T @ b[40:].T]
        parts = [paths[0], torch.zeros_like(y[:, 40:57]), paths[1], torch.zeros_like(y[:, 90:])]
        return y + scale * torch.cat(parts, 1)

    return Case(
        f"lora {width} by {rank}",
        inputs,
        lambda ops, y, x, a, b: ops.lora(y, x, a, b, spans, scale),
        exact,
    )


def _rmsnorm(*shape: int) -> Case:
    return Case(
        f"rmsnorm {shape}",
        (random(TOKENS, *shape, seed=1, scale=3.0), random(shape[-1], seed=2)),
        lambda ops, x, w: ops.rmsnorm(x, w, 1e-5),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w,
    )


def _swiglu(width: int) -> Case:
    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up

    return Case(
        f"swiglu {width}",
        (random(TOKENS, 2 * width, seed=1, scale=4.0),),
        lambda ops, x: ops.swiglu(x),
        exact,
    )


def _rope(heads: int, width: int) -> Case:
    angles = random(TOKENS, 1, width // 2, seed=2, scale=3.0).double()
    cos, sin = angles.cos().float(), angles.sin().float()

    def exact(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return Case(
        f"rope {heads}x{width}",
        (random(TOKENS, heads, width, seed=1),),
        lambda ops, x: ops.rope(x, cos.squeeze(1), sin.squeeze(1)),
        exact,
    )


def _embedding() -> Case:
    ids = torch.randint(31, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return Case(
        "embedding",
        (random(31, 37, seed=2),),
        lambda ops, w: ops.embedding(ids, w),
        lambda w: w[ids],
    )


def _attention(heads: int, kv_heads: int, width: int) -> Case:
    def sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) / width**0.5
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khe->qhe", scores.masked_fill(later, -torch.inf).softmax(-1), v)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spans = [slice(a, b) for a, b in itertools.pairwise(STARTS)]
        return torch.cat([sequence(q[s], k[s], v[s]) for s in spans])

    shapes = ((heads, width), (kv_heads, width), (kv_heads, width))
    return Case(
        f"packed_attention {heads}/{kv_heads} of {width}",
        tuple(random(TOKENS, *shape, seed=i, scale=1.5) for i, shape in enumerate(shapes)),
        lambda ops, q, k, v: ops.packed_attention(q, k, v, STARTS),
        exact,
    )


def _token_logprobs(width: int, vocabulary: int, limit: int, which: str = "logprobs") -> Case:
    targets = torch.randint(limit, (TOKENS,), generator=torch.Generator().manual_seed(1))
    heat = torch.linspace(0.5, 1.5, TOKENS)

    def exact(hidden: Tensor, head: Tensor) -> Tensor:
        logprobs = ((hidden @ head.T)[:, :limit] / heat.double().unsqueeze(1)).log_softmax(-1)
        if which == "entropy":
            return -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)

    return Case(
        f"token_logprobs {width} to {vocabulary}: {which}",
        (random(TOKENS, width, seed=2), random(vocabulary, width, seed=3, scale=0.3)),
        lambda ops, hidden, head: ops.token_logprobs(hidden, head, targets, heat, limit)[
            which == "entropy"
        ],
        exact,
        to_float32=True,
    )


CASES = [
    _linear(64, 96),
    _linear(600, 131),
    _lora(64, 1),
    _lora(600, 8),
    _rmsnorm(257),
    _rmsnorm(7, 80),
    _swiglu(131),
    _rope(3, 80),
    _embedding(),
    _attention(4, 2, 64),
    _attention(7, 1, 80),
    _attention(2, 2, 256),
    _token_logprobs(64, 131, 131),
    _token_logprobs(300, 301, 290),
    _token_logprobs(64, 131, 131, "entropy"),
    _token_logprobs(300, 301, 290, "entropy"),
]


def results(run: Callable[..., Tensor], inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """The output and the gradient of every input, in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    out.backward(cotangent.to(out.dtype))
    grads = [leaf.grad for leaf in leaves]
    return [out.detach().double(), *(grad.double() for grad in grads if grad is not None)]


def errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    error = got - exact
    return float(error.square().mean().sqrt()), float(error.abs().max())


def within_twice(got: Tensor, ordinary: Tensor, exact: Tensor, luck: float) -> bool:
    """Both errors, given that torch's count as at least `luck` of the exact value's size."""
    size = float(exact.square().mean().sqrt())
    ours, theirs = errors(got, exact), errors(ordinary, exact)
    return all(a <= 2 * max(b, luck * size) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_error_is_at_most_twice_that_of_torch(case: Case, dtype):
    inputs = [x.to(dtype) for x in case.inputs]
    wide = [x.double() for x in inputs]
    cotangent = random(*case.exact(*wide).shape, seed=9).to(
        torch.float32 if case.to_float32 else dtype
    )
    exact = results(case.exact, wide, cotangent)
    ours = results(lambda *xs: case.run(EXACT, *xs), inputs, cotangent)
    theirs = results(lambda *xs: case.run(ORDINARY, *xs), inputs, cotangent)
    assert len(ours) == len(theirs) == len(exact) == 1 + len(inputs)
    luck = LUCK * torch.finfo(dtype).eps
    names = ["output", *(f"gradient of input {i}" for i in range(len(inputs)))]
    report = {
        n: (errors(a, e), errors(b, e))
        for n, a, b, e in zip(names, ours, theirs, exact, strict=True)
    }
    wrong = [
        n
        for n, a, b, e in zip(names, ours, theirs, exact, strict=True)
        if not within_twice(a, b, e, luck)
    ]
    assert not wrong, {name: report[name] for name in wrong}


def test_the_rule_catches_one_wrong_rounding():
    exact = random(1000, seed=1).double()
    once = exact.bfloat16().double()
    twice = (exact + exact.abs() * 2**-7).bfloat16().double()
    assert within_twice(once, once, exact, 0.0)
    assert not within_twice(twice, once, exact, LUCK * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_entropy_is_that_of_the_tempered_distribution(dtype):
    hidden, head = random(40, 64, seed=1).to(dtype), random(131, 64, seed=2, scale=0.3).to(dtype)
    heat, targets = torch.linspace(0.3, 2.0, 40), torch.zeros(40, dtype=torch.int64)
    logits = (hidden.double() @ head.double().T)[:, :120] / heat.double().unsqueeze(1)
    exact = torch.special.entr(logits.softmax(-1)).sum(-1)
    ours, theirs = (
        ops.token_logprobs(hidden, head, targets, heat, 120)[1] for ops in (EXACT, ORDINARY)
    )
    assert within_twice(
        ours.double(), theirs.double(), exact, LUCK * torch.finfo(torch.float32).eps
    )
    one_sure = torch.tensor([[1000.0]]), torch.tensor([[1.0], [-1.0], [0.5]])
    certain = EXACT.token_logprobs(*one_sure, targets[:1], heat[:1], 3)
    assert [float(x) for x in certain] == [0.0, 0.0]
