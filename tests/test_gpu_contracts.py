"""Bits: every schedule of every op gives a row the same float32 values. No tolerance, no rerun."""

from __future__ import annotations

import pytest
import torch
from gpu import HALVES, layout_of, module, needs_gpu, pages_of, prove_library, randn, same_bits
from poison import poisoned_memory

from shared_ops.embedding.op import embedding
from shared_ops.linear.op import linear
from shared_ops.logprob.op import scaled_logits, select_logprobs, token_logprobs
from shared_ops.rmsnorm.op import rmsnorm
from shared_ops.rope.op import rope
from shared_ops.sample.op import draw, greedy
from shared_ops.swiglu.op import swiglu

pytestmark = needs_gpu
MILLION = 1_000_000
ROWS = (1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 513)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(module("products"), "_outside", {})
    with poisoned_memory():
        yield


@HALVES
@pytest.mark.parametrize(("depth", "columns"), [(1024, 1032), (576, 1000), (3080, 1096)])
def test_every_tile_gives_the_plain_products_bits(dtype, depth, columns) -> None:
    products, compared = module("products"), 0
    x_TK, w_NK = randn(513, depth, dtype=dtype), randn(columns, depth, dtype=dtype, scale=0.02)
    wanted = products.run(x_TK, w_NK, torch.float32, products.PLAIN)
    for tile in (products.PLAIN, *products.tiles()):
        for rows in ROWS:
            got = products.run(x_TK[:rows], w_NK, torch.float32, tile)
            compared += same_bits(got, wanted[:rows])
        if not tile.bulk:
            transposed = w_NK.T.contiguous().T
            same_bits(products.run(x_TK, transposed, torch.float32, tile), wanted)
    assert compared > MILLION


@HALVES
@pytest.mark.parametrize(
    ("depth", "columns"), [(1024, 4096), (3072, 1024), (576, 960), (4864, 896), (1024, 49152)]
)
def test_the_chosen_schedule_gives_the_plain_products_bits(dtype, depth, columns) -> None:
    products, compared = module("products"), 0
    prove_library(depth, columns, dtype, torch.float32)
    x_TK, w_NK = randn(1500, depth, dtype=dtype), randn(columns, depth, dtype=dtype, scale=0.02)
    wanted = products.run(x_TK, w_NK, torch.float32, products.PLAIN)
    for rows in (*ROWS, 777, 1500):
        got = products.product(x_TK[:rows], w_NK, out_dtype=torch.float32)
        compared += same_bits(got, wanted[:rows])
        same_bits(
            products.product(x_TK[1500 - rows :], w_NK, out_dtype=torch.float32),
            wanted[1500 - rows :],
        )
    assert compared > MILLION


@HALVES
@pytest.mark.parametrize(("depth", "columns"), [(1024, 4096), (3072, 1024), (896, 1152)])
def test_rounded_products_where_rounding_hides_nothing(dtype, depth, columns) -> None:
    """The exact product is 0: what is left is the order of the sum, at full relative size."""
    products, compared = module("products"), 0
    cancelling = module("attest_cuda").cancelling
    prove_library(depth, columns, dtype, dtype)
    x_TK, w_NK = cancelling(1500, columns, depth, dtype, seed=3)
    wanted = products.run(x_TK, w_NK, torch.float32, products.PLAIN)
    assert (wanted != 0).float().mean() > 0.9
    for rows in (*ROWS, 777, 1500):
        compared += same_bits(products.product(x_TK[:rows], w_NK), wanted[:rows].to(dtype))
    assert compared > MILLION


def test_a_split_sum_is_seen() -> None:
    """The negative control: K in two halves is another order, and most values show it."""
    products = module("products")
    x_TK, w_NK = randn(256, 4096, dtype=torch.bfloat16), randn(1024, 4096, dtype=torch.bfloat16)
    halves = [
        products.run(x, w, torch.float32, products.PLAIN)
        for x, w in zip(x_TK.split(2048, 1), w_NK.split(2048, 1), strict=True)
    ]
    whole = products.run(x_TK, w_NK, torch.float32, products.PLAIN)
    assert (halves[0] + halves[1] != whole).float().mean() > 0.3


@HALVES
@pytest.mark.parametrize("is_proved", [True, False])
def test_linear_rows_do_not_know_their_batch(dtype, is_proved) -> None:
    for depth, columns in ((896, 1152), (4864, 896), (40, 120)):
        if is_proved:
            prove_library(depth, columns, dtype, torch.float32)
        x_TK, w_NK = randn(600, depth, dtype=dtype), randn(columns, depth, dtype=dtype, scale=0.05)
        bias_N = randn(columns, dtype=dtype)
        wanted = linear(x_TK, w_NK, bias_N)
        for rows in ROWS:
            same_bits(linear(x_TK[:rows], w_NK, bias_N), wanted[:rows])


@HALVES
@pytest.mark.parametrize("width", [128, 64, 100, 1024, 896, 4096])
def test_rmsnorm_rows_do_not_know_their_batch(dtype, width) -> None:
    forward, compared = module("rmsnorm.kernels").forward, 0
    x_RD, w_D = randn(1111, width, dtype=dtype), randn(width, dtype=dtype)
    wanted = forward(x_RD, w_D, 1e-6, torch.float32)
    for first, rows in ((0, 1), (5, 1), (3, 31), (1, 700), (110, 1000)):
        got = forward(x_RD[first : first + rows], w_D, 1e-6, torch.float32)
        compared += same_bits(got, wanted[first : first + rows])
    wide = randn(37, 5, width, dtype=dtype)
    heads = forward(wide[:, 1:4], w_D, 1e-6, torch.float32)
    same_bits(heads, forward(wide[:, 1:4].contiguous(), w_D, 1e-6, torch.float32))
    same_bits(rmsnorm(x_RD, w_D, 1e-6), wanted.to(dtype))


@HALVES
def test_elementwise_ops_do_not_know_their_batch(dtype) -> None:
    x_THE, cos_TR = randn(300, 7, 64, dtype=dtype), randn(300, 32, dtype=torch.float32)
    sin_TR = randn(300, 32, dtype=torch.float32, seed=1)
    wanted = rope(x_THE, cos_TR, sin_TR)
    same_bits(rope(x_THE[7:20, 1:4], cos_TR[7:20], sin_TR[7:20]), wanted[7:20, 1:4])
    gate_up_T2F = randn(300, 2 * 1100, dtype=dtype)
    wanted = swiglu(gate_up_T2F)
    for first, rows in ((0, 1), (5, 77), (299, 1)):
        same_bits(swiglu(gate_up_T2F[first : first + rows]), wanted[first : first + rows])
    ids_T = torch.randint(0, 300, (50,), device="cuda")
    same_bits(embedding(ids_T, gate_up_T2F), gate_up_T2F[ids_T])


def test_rope_rounds_each_operation() -> None:
    """No fused multiply-add: the same bits as separate float32 operations."""
    x_THE, cos_TR = randn(99, 3, 128, dtype=torch.float32), randn(99, 64, dtype=torch.float32)
    sin_TR = randn(99, 64, dtype=torch.float32, seed=5)
    products = [x[:, :, None] for x in (cos_TR[:, None], sin_TR[:, None])]
    cos, sin = (product.squeeze(2) for product in products)
    first, second = x_THE.chunk(2, -1)
    halves = (first * cos - second * sin, second * cos + first * sin)
    same_bits(rope(x_THE, cos_TR, sin_TR), torch.cat(halves, -1))


def test_embedding_gradient_adds_tokens_in_order() -> None:
    """Bit-equal to a loop in token order on the CPU."""
    ids_T = torch.randint(0, 40, (700,), device="cuda")
    dy_TD = randn(700, 300, dtype=torch.float32)
    got = module("embedding.kernels").backward(dy_TD, ids_T, 50)
    same_bits(got.cpu(), module("embedding.reference").backward(dy_TD.cpu(), ids_T.cpu(), 50))


@HALVES
@pytest.mark.parametrize(("width", "vocabulary"), [(576, 49152), (64, 120), (3080, 5003)])
def test_logprobs_of_sampler_and_trainer(dtype, width, vocabulary) -> None:
    hidden_TD = randn(300, width, dtype=dtype)
    head_VD = randn(vocabulary, width, dtype=dtype, scale=0.1)
    limit = vocabulary - 7
    targets_T = torch.randint(0, limit, (300,), device="cuda")
    temperature_T = torch.rand(300, device="cuda") + 0.5
    wanted, entropy_T = token_logprobs(hidden_TD, head_VD, targets_T, temperature_T, limit)
    assert (entropy_T > 0).all()
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(40, 299), slice(0, 300)):
        logits_BV = scaled_logits(hidden_TD[rows], head_VD, temperature_T[rows], limit)
        assert (logits_BV[:, limit:] == float("-inf")).all()
        same_bits(select_logprobs(logits_BV, targets_T[rows]), wanted[rows])
    unaligned = logits_BV.flatten()[vocabulary * 3 :].view(-1, vocabulary)
    same_bits(select_logprobs(unaligned, targets_T[3:]), wanted[3:])
    logprob = module("logprob.kernels")
    before, logprob.LOGITS_LIMIT = logprob.LOGITS_LIMIT, 1
    try:
        blocks = token_logprobs(hidden_TD, head_VD, targets_T, temperature_T, limit)
    finally:
        logprob.LOGITS_LIMIT = before
    same_bits(blocks[0], wanted)
    same_bits(blocks[1], entropy_T)


def test_philox_words_are_those_of_the_cpu() -> None:
    reference, vocabulary = module("sample.reference"), 49152 + 3
    keys_B2 = torch.randint(0, 1 << 32, (9, 2))
    positions_B = torch.randint(0, 1 << 20, (9,))
    blocks_1W = torch.arange(-(-vocabulary // 4)).unsqueeze(0)
    zeros_1W = torch.zeros_like(blocks_1W)
    counters = (blocks_1W, positions_B.unsqueeze(1) + zeros_1W, zeros_1W, zeros_1W)
    words = reference.philox(counters, (keys_B2[:, :1], keys_B2[:, 1:]))
    words_BV = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :vocabulary]
    got = module("sample.kernels").philox_words(keys_B2.cuda(), positions_B.cuda(), vocabulary)
    same_bits(got.cpu(), words_BV)


def test_draws_do_not_know_their_batch() -> None:
    logits_BV = randn(64, 49157, dtype=torch.float32, scale=3.0)
    logits_BV[:, 49153:] = float("-inf")
    keys_B2 = torch.randint(0, 1 << 32, (64, 2), device="cuda")
    positions_B = torch.arange(64, device="cuda")
    tokens_B = draw(logits_BV, keys_B2, positions_B)
    assert len(set(tokens_B.tolist())) > 32
    for rows in (slice(0, 1), slice(9, 40)):
        same_bits(draw(logits_BV[rows], keys_B2[rows], positions_B[rows]), tokens_B[rows])
    same_bits(greedy(logits_BV), logits_BV.argmax(-1))
    logits_BV[:, 49000] = logits_BV[:, 17] = 99.0
    assert greedy(logits_BV).tolist() == [17] * 64


HEADS = [(8, 4, 128), (9, 3, 64), (14, 2, 64), (8, 4, 16), (6, 2, 96), (20, 1, 64), (2, 1, 256)]


def _packed(heads: int, kv_heads: int, width: int, dtype, lens: list[int]):
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    fused = randn(starts[-1], heads + 2 * kv_heads, width, dtype=dtype)
    return starts, *fused.split((heads, kv_heads, kv_heads), 1)


@HALVES
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_attention_schedules_agree(dtype, heads, kv_heads, width) -> None:
    """Packed rows in tiles of 16, 64 and 128 with 1 to 8 warps: outputs and log sums in float32."""
    attention = module("attention.kernels")
    lens = [1, 63, 64, 65, 127, 129, 1025, 1500]
    starts, q_THE, k_TKE, v_TKE = _packed(heads, kv_heads, width, dtype, lens)
    begin = torch.tensor(starts, dtype=torch.int32, device="cuda")
    source = attention.Source(k_TKE, v_TKE, begin, begin, begin, 0)
    rows = tuple(length * heads // kv_heads for length in lens)
    results, compared = [], 0
    large = attention.large_schedule(width, dtype)
    others = ((64, 4, 2), (16, 4, 2), (16, 1, 2), (32, 4, 2), (16, 4, 3, True), (64, 4, 2, True))
    for schedule in (large, *(attention.Schedule(*each) for each in others)):
        o_THE = torch.empty(q_THE.shape, dtype=torch.float32, device="cuda")
        lse_TH = torch.empty(q_THE.shape[:2], dtype=torch.float32, device="cuda")
        tiles = attention._tiles(rows, schedule.rows, 0, 1 << 40, q_THE.device)
        attention.attend(q_THE, source, tiles, schedule, o_THE, lse_TH)
        results.append((o_THE, lse_TH))
    for o_THE, lse_TH in results[1:]:
        compared += same_bits(o_THE, results[0][0]) + same_bits(lse_TH, results[0][1])
    assert compared > MILLION


@HALVES
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
@pytest.mark.parametrize("page_size", [16, 24, 128])
def test_prefill_chunks_and_decode_give_the_packed_bits(
    dtype, heads, kv_heads, width, page_size
) -> None:
    attention = module("attention.kernels")
    starts, q_THE, k_TKE, v_TKE = _packed(heads, kv_heads, width, dtype, [5, 200, 1030, 2100])
    wide_o = torch.float32
    k_pages, v_pages, table_BP = pages_of(k_TKE, v_TKE, starts, page_size)
    wanted = _forward(attention, q_THE, k_TKE, v_TKE, starts, wide_o)
    for lens in ([1, 1, 1, 1], [5, 1, 130, 1], [1, 72, 1, 600]):
        for ends in ([5, 200, 1030, 2100], [5, 129, 1025, 1024], [5, 73, 641, 2049]):
            layout = layout_of(lens, ends, table_BP)
            rows_T = torch.cat(
                [
                    torch.arange(start + end - length, start + end)
                    for start, end, length in zip(starts, ends, lens, strict=False)
                ]
            ).cuda()
            for split in (False, True):
                got = attention.paged_forward(
                    q_THE[rows_T], k_pages, v_pages, layout, wide_o, split
                )
                same_bits(got, wanted[rows_T])


def _forward(attention, q_THE, k_TKE, v_TKE, starts, dtype):
    return attention.packed_forward(q_THE, k_TKE, v_TKE, starts, dtype)[0]


@HALVES
def test_decode_at_every_length_gives_the_packed_bits(dtype) -> None:
    """One sequence of 1100 positions, all its prefixes decoded as one batch."""
    attention, length = module("attention.kernels"), 1100
    starts, q_THE, k_TKE, v_TKE = _packed(8, 2, 64, dtype, [length])
    k_pages, v_pages, table_BP = pages_of(k_TKE, v_TKE, starts, 16)
    wanted = _forward(attention, q_THE, k_TKE, v_TKE, starts, torch.float32)
    table = table_BP.expand(length, -1)
    layout = layout_of([1] * length, list(range(1, length + 1)), table)
    same_bits(attention.paged_forward(q_THE, k_pages, v_pages, layout, torch.float32), wanted)


@HALVES
def test_gradients_are_equal_from_run_to_run(dtype) -> None:
    starts, q_THE, k_TKE, v_TKE = _packed(8, 2, 64, dtype, [1, 65, 700, 129])
    attention = module("attention.kernels")
    do_THE = randn(*q_THE.shape, dtype=dtype, seed=9)
    o_THE, lse_TH = attention.packed_forward(q_THE, k_TKE, v_TKE, starts)
    given = (do_THE, q_THE, k_TKE, v_TKE, o_THE, lse_TH, starts)
    x_TD, w_VD = randn(895, 512, dtype=dtype), randn(5000, 512, dtype=dtype, scale=0.1)
    ids_T = torch.randint(0, 50, (895,), device="cuda")
    ones_T = torch.ones(895, device="cuda")

    def gradients() -> list[torch.Tensor]:
        leaves = [x_TD.clone().requires_grad_(), w_VD.clone().requires_grad_()]
        hidden = rmsnorm(linear(leaves[0], leaves[1][:512]), leaves[1][512], 1e-6)
        hidden = hidden + embedding(ids_T, leaves[1]) + swiglu(torch.cat((hidden, hidden), 1))
        token_logprobs(hidden, leaves[1], ids_T, ones_T, 4990)[0].sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    first = [*attention.packed_backward(*given), *gradients()]
    assert len(first) == 5
    for _ in range(3):
        for got, wanted in zip(
            [*attention.packed_backward(*given), *gradients()], first, strict=True
        ):
            same_bits(got, wanted)
