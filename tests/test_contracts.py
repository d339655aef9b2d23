"""Bits: a row's result depends on that row only, whatever runs beside it and on however many
threads. Nothing here has a tolerance; every check of a product is shown to fail with ops whose
order of sums follows from the batch.

torch's embedding, rope, rms_norm and silu keep a row's bits, and draw has no ordinary twin: no
control. Attention is in test_contracts_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from bits import THREAD_COUNTS, differing, differing_in_control, threads
from poison import poisoned_memory
from reordered import REORDERED
from torch import Tensor

from shared_ops.logprob import reference as logprob_reference
from shared_ops.opset import EXACT, OpSet
from shared_ops.primitives import fixed_product
from shared_ops.sample.op import draw, greedy
from shared_ops.sample.reference import gumbel

ROWS = 33
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33)
DTYPES = [torch.float32, torch.bfloat16]
Call = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _poisoned_memory():
    with poisoned_memory():
        yield


@dataclass(frozen=True)
class Case:
    """`rows` are the inputs cut along tokens; `call(ops, *rows)` gives one output row a token."""

    name: str
    rows: Callable[[torch.dtype], list[Tensor]]
    call: Callable[..., Tensor]
    blind: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def random(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(3))


def temperatures(rows: int) -> Tensor:
    return torch.linspace(0.3, 2.0, rows)


def _linear(width: int, outputs: int, bias: bool) -> Case:
    def call(ops: OpSet, x_TK: Tensor) -> Tensor:
        w_NK = random(outputs, width, seed=1, dtype=x_TK.dtype)
        return ops.linear(x_TK, w_NK, random(outputs, seed=2, dtype=x_TK.dtype) if bias else None)

    name = f"linear {width} to {outputs}{' with bias' * bias}"
    return Case(name, lambda dtype: [random(ROWS, width, dtype=dtype)], call)


def _lora(width: int, rank: int, *spans: tuple[int, int]) -> Case:
    def call(ops: OpSet, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        a = random(rank * len(spans), width, seed=1, dtype=x_TK.dtype)
        b = random(sum(end - first for first, end in spans), rank, seed=2, dtype=x_TK.dtype)
        return ops.lora(y_TN, x_TK, a, b, spans, 0.7)

    def rows(dtype: torch.dtype) -> list[Tensor]:
        outputs = spans[-1][1] + 3
        return [random(ROWS, width, dtype=dtype), random(ROWS, outputs, seed=3, dtype=dtype)]

    return Case(f"lora {width} by {rank} at {spans}", rows, call)


def _rmsnorm(*shape: int) -> Case:
    def call(ops: OpSet, x: Tensor) -> Tensor:
        return ops.rmsnorm(x, random(shape[-1], seed=1, dtype=x.dtype), 1e-5)

    return Case(
        f"rmsnorm {shape}", lambda dtype: [random(ROWS, *shape, dtype=dtype)], call, blind=True
    )


def _rope(heads: int, width: int) -> Case:
    def rows(dtype):
        angles = random(ROWS, width // 2, seed=1)
        return [random(ROWS, heads, width, dtype=dtype), angles.cos(), angles.sin()]

    return Case(f"rope {heads}x{width}", rows, lambda ops, *rows: ops.rope(*rows), blind=True)


def _swiglu(width: int) -> Case:
    return Case(
        f"swiglu {width}",
        lambda dtype: [4 * random(ROWS, 2 * width, dtype=dtype)],
        lambda ops, x: ops.swiglu(x),
        blind=True,
    )


def _embedding() -> Case:
    return Case(
        "embedding",
        lambda dtype: [integers(97, ROWS)],
        lambda ops, ids: ops.embedding(ids, random(97, 37)),
        blind=True,
        dtypes=(torch.float32,),
    )


def _scaled_logits(width: int, vocabulary: int, limit: int) -> Case:
    def call(ops: OpSet, hidden: Tensor, temperature: Tensor) -> Tensor:
        head = random(vocabulary, width, seed=1, dtype=hidden.dtype)
        return ops.scaled_logits(hidden, head, temperature, limit)

    return Case(
        f"scaled_logits {width} to {vocabulary}",
        lambda dtype: [random(ROWS, width, dtype=dtype), temperatures(ROWS)],
        call,
    )


def _select_logprobs(vocabulary: int) -> Case:
    return Case(
        f"select_logprobs {vocabulary}",
        lambda dtype: [3 * random(ROWS, vocabulary), integers(vocabulary, ROWS)],
        lambda ops, *rows: ops.select_logprobs(*rows),
        blind=True,
        dtypes=(torch.float32,),
    )


def _token_logprobs(width: int, vocabulary: int, limit: int) -> Case:
    def rows(dtype):
        hidden = random(ROWS, width, dtype=dtype) / 4
        return [hidden, integers(limit, ROWS), temperatures(ROWS)]

    def call(ops: OpSet, hidden: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        head = random(vocabulary, width, seed=1, dtype=hidden.dtype)
        return torch.stack(ops.token_logprobs(hidden, head, targets, temperature, limit), 1)

    return Case(f"token_logprobs {width} to {vocabulary}", rows, call)


def _draw(vocabulary: int) -> Case:
    def rows(dtype):
        return [random(ROWS, vocabulary), integers(2**32, ROWS, 2), integers(5000, ROWS)]

    def call(ops: OpSet, logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        noise = gumbel(keys, positions, vocabulary)
        drawn = draw(logits, keys, positions)
        return torch.cat((noise, drawn[:, None].float(), greedy(logits)[:, None].float()), 1)

    return Case(f"draw {vocabulary}", rows, call, blind=True, dtypes=(torch.float32,))


CASES = [
    _linear(7, 5, False),
    _linear(64, 96, False),
    _linear(255, 97, True),
    _linear(256, 64, False),
    _linear(257, 97, False),
    _linear(600, 33, True),
    _lora(64, 1, (0, 33)),
    _lora(257, 8, (0, 40), (56, 73)),
    _lora(600, 3, (5, 12), (12, 80), (80, 96)),
    _rmsnorm(1),
    _rmsnorm(48),
    _rmsnorm(257),
    _rmsnorm(600),
    _rmsnorm(1, 16),
    _rmsnorm(7, 80),
    _rope(1, 16),
    _rope(7, 80),
    _swiglu(7),
    _swiglu(80),
    _swiglu(257),
    _embedding(),
    _scaled_logits(64, 97, 97),
    _scaled_logits(257, 501, 500),
    _select_logprobs(97),
    _select_logprobs(4099),
    _token_logprobs(64, 97, 90),
    _token_logprobs(257, 501, 501),
    _draw(7),
    _draw(501),
]
CONTROLS = [case for case in CASES if not case.blind]


def named(cases: list[Case]):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def in_its_dtypes(cases: list[Case]):
    pairs = [(case, dtype) for case in cases for dtype in case.dtypes]
    ids = [f"{case.name} {str(dtype)[6:]}" for case, dtype in pairs]
    return pytest.mark.parametrize(("case", "dtype"), pairs, ids=ids)


both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def _mated(x: Tensor) -> Tensor:
    """`x` between rows of other values, of zeros, and of NaN."""
    if not x.is_floating_point():
        return torch.cat((x.flip(0), x, x[:5]))
    return torch.cat((x.flip(0), x, torch.full_like(x[:5], float("nan"))))


def compare_rows(run: Call, rows: list[Tensor], count_wrong=differing) -> tuple[int, int]:
    """(values compared, values differing) of each row among others and the same row alone."""
    with threads(1):
        alone = torch.cat([run(*(x[i : i + 1] for x in rows)) for i in range(ROWS)])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(5))
    compared = wrong = 0

    def check(got: Tensor, wanted: Tensor) -> None:
        nonlocal compared, wrong
        compared += got.numel()
        wrong += count_wrong(got, wanted)

    for count in THREAD_COUNTS:
        with threads(count):
            for size in SIZES:
                check(run(*(x[:size] for x in rows)), alone[:size])
            for first, size in ((1, 16), (15, 2), (17, 7)):
                span = slice(first, first + size)
                check(run(*(x[span] for x in rows)), alone[span])
            check(run(*(x[order] for x in rows)), alone[order])
            check(run(*(_mated(x) for x in rows))[ROWS : 2 * ROWS], alone)
    return compared, wrong


@in_its_dtypes(CASES)
def test_a_row_alone_is_the_row_among_others(case: Case, dtype):
    compared, wrong = compare_rows(lambda *rows: case.call(EXACT, *rows), case.rows(dtype))
    assert compared > 0
    assert wrong == 0


@named(CONTROLS)
def test_ops_in_another_order_fail_the_same_check(case: Case):
    run = lambda *rows: case.call(REORDERED, *rows)  # noqa: E731
    compared, wrong = compare_rows(run, case.rows(torch.float32), differing_in_control)
    assert compared > 0
    assert wrong > 0


def _flat_gradients(run: Call, rows: list[Tensor]) -> Tensor:
    """The gradient of the first input, one row a token, under a fixed cotangent per row."""
    leaf = rows[0].detach().clone().requires_grad_()
    out = run(leaf, *rows[1:]).float()
    cotangent = torch.linspace(-1.0, 1.0, out[0].numel()).view(out[0].shape).expand_as(out)
    out.nan_to_num(neginf=0.0).backward(cotangent.contiguous())
    assert leaf.grad is not None
    return leaf.grad


DIFFERENTIABLE = [case for case in CASES if case.name.split()[0] in ("linear", "lora", "swiglu")]
DIFFERENTIABLE += [case for case in CASES if case.name.split()[0] in ("rmsnorm", "rope")]
DIFFERENTIABLE += [case for case in CASES if case.name.startswith("token_logprobs")]


@in_its_dtypes(DIFFERENTIABLE)
def test_the_gradient_of_a_row_depends_on_that_row(case: Case, dtype):
    compared, wrong = compare_rows(
        lambda *rows: _flat_gradients(lambda *r: case.call(EXACT, *r), list(rows)),
        case.rows(dtype),
    )
    assert compared > 0
    assert wrong == 0


def test_the_gradient_check_fails_with_ops_in_another_order():
    case = _linear(64, 600, False)
    compared, wrong = compare_rows(
        lambda *rows: _flat_gradients(lambda *r: case.call(REORDERED, *r), list(rows)),
        case.rows(torch.float32),
        differing_in_control,
    )
    assert compared > 0
    assert wrong > 0


def _weight_gradients(ops: OpSet, dtype, bonus: float) -> list[Tensor]:
    """Gradients of every parameter and input of every op, summed over 600 tokens."""
    tokens, width, vocabulary = 600, 57, 131
    x = random(tokens, width, dtype=dtype).requires_grad_()
    w = random(width, width, seed=1, dtype=dtype).requires_grad_()
    b = random(width, seed=2, dtype=dtype).requires_grad_()
    norm = random(width, seed=3, dtype=dtype).requires_grad_()
    head = random(vocabulary, width, seed=4, dtype=dtype).requires_grad_()
    ids = integers(vocabulary, tokens)
    down = random(10, width, seed=6, dtype=dtype).requires_grad_()
    up = random(50, 5, seed=7, dtype=dtype).requires_grad_()
    y = ops.lora(ops.linear(x, w, b), x, down, up, ((0, 30), (37, 57)), 0.7)
    y = ops.rmsnorm(y + ops.embedding(ids, head), norm, 1e-5)
    y = ops.swiglu(torch.cat((y, y), 1))
    logprobs, entropy = ops.token_logprobs(y, head, ids, torch.full((tokens,), 0.7), vocabulary - 1)
    kept = ids < vocabulary - 1
    (logprobs[kept].sum() + bonus * entropy.sum() if bonus else logprobs[kept].sum()).backward()
    return [leaf.grad for leaf in (x, w, b, norm, head, down, up)]


@both_dtypes
@pytest.mark.parametrize("bonus", [0.0, 0.3])
def test_weight_gradients_are_equal_from_run_to_run_and_for_any_thread_count(dtype, bonus):
    with threads(1):
        wanted = _weight_gradients(EXACT, dtype, bonus)
    for count in (*THREAD_COUNTS, 2):
        with threads(count):
            got = _weight_gradients(EXACT, dtype, bonus)
        assert sum(g.numel() for g in got) > 0
        assert [differing(g, w) for g, w in zip(got, wanted, strict=True)] == [0] * len(wanted)


@both_dtypes
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 70])
def test_token_logprobs_are_the_samplers_for_any_row_blocking(dtype, tokens, monkeypatch):
    hidden, head = random(tokens, 257, dtype=dtype) / 4, random(301, 257, seed=1, dtype=dtype)
    targets, heat = integers(300, tokens), temperatures(tokens)
    logits = EXACT.scaled_logits(hidden, head, heat, 300)
    wanted = EXACT.select_logprobs(logits, targets)
    assert logits[:, 300].eq(float("-inf")).all()
    blocks = {}
    for limit in (1, 301 * 16, 301 * 40, 1 << 24):
        monkeypatch.setattr(logprob_reference, "LOGITS_LIMIT", limit)
        got, entropy = EXACT.token_logprobs(hidden, head, targets, heat, 300)
        assert differing(got, wanted) == 0
        blocks[limit] = entropy
    assert all(differing(entropy, blocks[1]) == 0 for entropy in blocks.values())


def test_a_lone_row_wide_enough_for_two_threads():
    """torch.sum gives each of two threads half of a lone row above 32,768 values."""
    logits, tokens = 3 * random(6, 40_003), integers(40_003, 6)
    with threads(1):
        wanted = EXACT.select_logprobs(logits, tokens)
        plain = logits.exp().sum(-1)
    with threads(2):
        lone = [EXACT.select_logprobs(logits[i : i + 1], tokens[i : i + 1]) for i in range(6)]
        control = [logits[i : i + 1].exp().sum(-1) for i in range(6)]
    assert differing(torch.cat(lone), wanted) == 0
    assert differing_in_control(torch.cat(control), plain) > 0


def test_a_bfloat16_product_is_the_float32_product_of_the_same_values():
    x, w = (random(n, 600, seed=n, dtype=torch.bfloat16) for n in (33, 97))
    wanted = fixed_product(x.float(), w.float().T)
    assert differing(fixed_product(x, w.T), wanted) == 0
    assert differing(EXACT.linear(x, w), wanted.to(torch.bfloat16)) == 0


@named([case for case in CASES if case.name.split()[0] not in ("draw", "select_logprobs")])
def test_no_rows_give_no_rows(case: Case):
    rows = case.rows(torch.float32)
    shape = case.call(EXACT, *rows).shape
    assert case.call(EXACT, *(x[:0] for x in rows)).shape == (0, *shape[1:])
