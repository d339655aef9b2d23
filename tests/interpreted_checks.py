"""Runs under TRITON_INTERPRET=1: every kernel in float32 against plain torch, at odd sizes.

The interpreter's arithmetic is numpy's, so this proves masks and indices, not bits. Run by
test_interpreted_kernels.py, one check a process argument.
"""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise

import torch
from poison import poisoned_memory
from torch import Tensor

from shared_ops import cuda, unconstrained
from shared_ops.attention import kernels as attention_kernels
from shared_ops.attention import reference as attention_reference
from shared_ops.attention.op import PagedLayout
from shared_ops.checksum import kernels as checksum_kernels
from shared_ops.checksum import reference as checksum_reference
from shared_ops.embedding import kernels as embedding_kernels
from shared_ops.embedding import reference as embedding_reference
from shared_ops.fused import kernels as fused_kernels
from shared_ops.linear import kernels as linear_kernels
from shared_ops.linear import reference as linear_reference
from shared_ops.logprob import kernels as logprob_kernels
from shared_ops.logprob import reference as logprob_reference
from shared_ops.lora import kernels as lora_kernels
from shared_ops.lora import reference as lora_reference
from shared_ops.model.adapters import NO_ADAPTERS, Adapters
from shared_ops.model.config import ModelConfig, RopeConfig
from shared_ops.model.lora_config import LoraConfig
from shared_ops.model.trained_layer import Around, trained_layer
from shared_ops.model.weights import Weights
from shared_ops.products import PLAIN, run, tiles
from shared_ops.rmsnorm import kernels as rmsnorm_kernels
from shared_ops.rmsnorm import reference as rmsnorm_reference
from shared_ops.rope import kernels as rope_kernels
from shared_ops.rope import reference as rope_reference
from shared_ops.sample import kernels as sample_kernels
from shared_ops.sample import reference as sample_reference
from shared_ops.schedules import Schedules
from shared_ops.swiglu import kernels as swiglu_kernels
from shared_ops.swiglu import reference as swiglu_reference
from trainer.config import TrainerConfig
from trainer.optimizer import AdamW
from trainer.optimizer_kernels import adamw, square_sums


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def all_close(got, wanted) -> None:
    for one, other in zip(got, wanted, strict=True):
        close(one, other)


def check_linear() -> None:
    for rows, depth, columns in ((1, 40, 70), (33, 72, 65)):
        x_TK, w_NK = torch.randn(rows, depth), torch.randn(columns, depth)
        dy_TN, bias_N = torch.randn(rows, columns), torch.randn(columns)
        close(
            linear_kernels.forward(x_TK, w_NK, bias_N), linear_reference.forward(x_TK, w_NK, bias_N)
        )
        needs = (True, True, True)
        all_close(
            linear_kernels.backward(dy_TN, x_TK, w_NK, needs),
            linear_reference.backward(dy_TN, x_TK, w_NK, needs),
        )


def check_lora() -> None:
    """Ranks below a tile's depth, and columns of y that no adapter writes."""
    for rows, width, rank, spans in (
        (1, 40, 1, ((0, 70),)),
        (33, 72, 8, ((3, 20), (20, 65))),
    ):
        columns = sum(end - first for first, end in spans)
        y_TN, x_TK = torch.randn(rows, 80), torch.randn(rows, width)
        a_QK, b_MR = torch.randn(rank * len(spans), width), torch.randn(columns, rank)
        before, got = y_TN.clone(), lora_kernels.forward(y_TN, x_TK, a_QK, b_MR, spans, 0.7)
        assert torch.equal(y_TN, before)
        wanted = lora_reference.forward(y_TN, x_TK, a_QK, b_MR, spans, 0.7)
        all_close(got, wanted)
        rest = (torch.randn(rows, 80), x_TK, wanted[1], a_QK, b_MR, spans, 0.7, True)
        all_close(lora_kernels.backward(*rest), lora_reference.backward(*rest))


def check_tiles() -> None:
    x_TK, w_NK = torch.randn(19, 72), torch.randn(70, 72)
    for tile in (PLAIN, *tiles()):
        close(run(x_TK, w_NK, torch.float32, tile), x_TK @ w_NK.T)


def check_rmsnorm() -> None:
    for view in (torch.randn(5, 100), torch.randn(5, 7, 32)[:, 1:4], torch.randn(3, 5, 24)[:, 1:]):
        w_D, dy_RD = torch.randn(view.shape[-1]), torch.randn(view.shape)
        close(rmsnorm_kernels.forward(view, w_D, 1e-5), rmsnorm_reference.forward(view, w_D, 1e-5))
        all_close(
            rmsnorm_kernels.backward(dy_RD, view, w_D, 1e-5),
            rmsnorm_reference.backward(dy_RD, view, w_D, 1e-5),
        )
    check_rmsnorm_into_a_view()


def check_rmsnorm_into_a_view() -> None:
    """A gradient put among other heads, and the residual stream's added."""
    for width in (32, 24):
        x_THE, dy_THE, more_THE = torch.randn(3, 5, 4, width).half()
        w_E, whole_THE = torch.randn(width).half(), torch.full((5, 9, width), 7.0).half()
        out_THE = whole_THE[:, 2:6]
        for residual in (None, more_THE):
            dx_THE, dw_E = rmsnorm_kernels.backward(dy_THE, x_THE, w_E, 1e-5, residual, out_THE)
            wanted = rmsnorm_reference.backward(dy_THE, x_THE, w_E, 1e-5, residual)
            assert dx_THE is out_THE
            for got, other in zip((out_THE, dw_E), wanted, strict=True):
                torch.testing.assert_close(got, other, rtol=3e-3, atol=3e-3)
        assert (whole_THE[:, :2] == 7).all() and (whole_THE[:, 6:] == 7).all()


def check_elementwise() -> None:
    x_THE, angles_TR = torch.randn(5, 7, 20)[:, 2:5], torch.randn(5, 10)
    cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
    close(
        rope_kernels.forward(x_THE, cos_TR, sin_TR), rope_reference.forward(x_THE, cos_TR, sin_TR)
    )
    close(
        rope_kernels.backward(x_THE, cos_TR, sin_TR), rope_reference.backward(x_THE, cos_TR, sin_TR)
    )
    whole_THE = torch.full((5, 6, 20), 7.0)
    rope_kernels.backward(x_THE, cos_TR, sin_TR, whole_THE[:, 1:4])
    close(whole_THE[:, 1:4], rope_reference.backward(x_THE, cos_TR, sin_TR))
    assert (whole_THE[:, 0] == 7).all() and (whole_THE[:, 4:] == 7).all()
    gate_up_T2F, dy_TF = torch.randn(3, 2 * 1050), torch.randn(3, 1050)
    close(swiglu_kernels.forward(gate_up_T2F), swiglu_reference.forward(gate_up_T2F))
    close(
        swiglu_kernels.backward(dy_TF, gate_up_T2F), swiglu_reference.backward(dy_TF, gate_up_T2F)
    )


def check_embedding() -> None:
    token_ids_T, dy_TD = torch.tensor([4, 0, 4, 10, 4, 0]), torch.randn(6, 300)
    close(
        embedding_kernels.backward(dy_TD, token_ids_T, 11),
        embedding_reference.backward(dy_TD, token_ids_T, 11),
    )


def check_logprob() -> None:
    vocabulary, limit = 4100, 4097
    hidden_TD, head_VD = torch.randn(3, 16), torch.randn(vocabulary, 16)
    targets_T, temperature_T = torch.tensor([0, 4096, 17]), torch.tensor([1.0, 0.7, 2.0])
    given = (hidden_TD, head_VD, targets_T, temperature_T)
    got = logprob_kernels.token_logprobs(*given, limit)
    all_close(got[:2], logprob_reference.token_logprobs(*given, limit)[:2])
    logits_BV = logprob_kernels.scaled_logits(hidden_TD, head_VD, temperature_T, limit)
    assert torch.equal(logprob_kernels.select_logprobs(logits_BV, targets_T), got[0])
    grad_T = torch.randn(3)
    all_close(
        logprob_kernels.token_logprobs_backward(grad_T, *given, got[2], limit),
        logprob_reference.token_logprobs_backward(grad_T, *given, None, limit),
    )
    all_close(
        logprob_kernels.token_logprobs_backward(grad_T, *given, got[2], limit, 3 * grad_T.flip(0)),
        logprob_reference.token_logprobs_backward(grad_T, *given, None, limit, 3 * grad_T.flip(0)),
    )


def check_sample() -> None:
    keys_B2 = torch.tensor([[1, 2], [0xFFFFFFFF, 0x80000001], [77, 0]])
    positions_B, vocabulary = torch.tensor([0, 5, 3000]), 4099
    zeros_1W = torch.zeros(1, -(-vocabulary // 4), dtype=torch.int64)
    blocks = zeros_1W + torch.arange(zeros_1W.shape[1])
    counters = (blocks, positions_B.unsqueeze(1) + zeros_1W, zeros_1W, zeros_1W)
    words = sample_reference.philox(counters, (keys_B2[:, :1], keys_B2[:, 1:]))
    words_BV = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :vocabulary]
    assert torch.equal(sample_kernels.philox_words(keys_B2, positions_B, vocabulary), words_BV)
    logits_BV = torch.randn(3, vocabulary)
    logits_BV[:, 4097:] = float("-inf")
    wanted = sample_reference.draw(logits_BV, keys_B2, positions_B)
    assert torch.equal(sample_kernels.draw(logits_BV, keys_B2, positions_B), wanted)
    logits_BV[:, 9] = logits_BV[:, 4096] = 50.0
    assert sample_kernels.first_argmax(logits_BV).tolist() == [9, 9, 9]


def check_checksum() -> None:
    """Pieces, blocks and words past the end, in memory that holds other words around."""
    memory_W = torch.randint(-(1 << 62), 1 << 62, (9000,))
    spans = ((0, 1), (3, 3), (5, 1029), (1029, 4101), (7, 8999))
    words = [memory_W[first:end] for first, end in spans]
    wanted = [checksum_reference.sums(each) for each in words]
    for piece in (1000, 2048, 1 << 16):
        assert checksum_kernels.sums(words, piece) == wanted
    assert len(set(wanted)) == len(words) and checksum_kernels.sums([memory_W[:0]]) == [(0, 0)]


def check_optimizer() -> None:
    """Tensors of less than a block, of whole blocks, and one that begins off every boundary."""
    shapes = ((1,), (4, 256), (1025,), (5, 500))
    for copies, decay, scale in ((False, 0.0, 1.0), (True, 0.1, 0.3)):
        masters = [torch.randn(shape) for shape in shapes] + [torch.randn(778)[1:]]
        sides = []
        for _ in range(2):
            own, config = [x.clone() for x in masters], TrainerConfig(weight_decay=decay)
            sides.append(AdamW(own, config, [x.half() for x in own] if copies else None))
        plain, fused = sides
        for step in range(2):
            gradients = [torch.randn(x.shape) for x in masters]
            norms = [x.double().square().sum() for x in gradients]
            close(square_sums(gradients).sum(), torch.stack(norms).sum())
            fused.steps = step + 1
            each = fused.masters, gradients, fused.first, fused.second, fused.copies
            decays = [fused._decays(x) for x in masters]
            adamw([*zip(*each, strict=True)], decays, fused._numbers(1e-2, scale))
            plain.step([x.clone() for x in gradients], 1e-2, scale)
        for name in ("masters", "first", "second"):
            all_close(getattr(fused, name), getattr(plain, name))
        for got, master in zip(fused.copies if copies else (), fused.masters, strict=False):
            assert torch.equal(got, master.half())


def check_draw_scored() -> None:
    """Against the ops one by one; a chunk without a token below the limit, ties, a greedy row."""
    rows, vocabulary, limit = 4, 8200, 8190
    keys_B2, positions_B = torch.arange(2 * rows).view(rows, 2) * 77, torch.tensor([0, 5, 9, 11])
    greedy_B, heat_B = torch.tensor([False, True, False, True]), torch.tensor([1, 0.7, 2, 1.3])
    logits_BV = torch.randn(rows, vocabulary)
    logits_BV[:, limit:] = 1e9
    logits_BV[3, 4095] = logits_BV[3, 4096] = 50.0
    given = heat_B, greedy_B, keys_B2, positions_B
    tokens_B, logprobs_B = fused_kernels.draw_scored(logits_BV, *given, limit)
    logits_BV.div_(heat_B.unsqueeze(1))[:, limit:] = float("-inf")
    drawn_B = sample_kernels.draw(logits_BV, keys_B2, positions_B)
    wanted_B = torch.where(greedy_B, sample_kernels.first_argmax(logits_BV), drawn_B)
    assert torch.equal(tokens_B, wanted_B) and tokens_B[3] == 4095
    close(logprobs_B, logits_BV.log_softmax(-1).gather(1, wanted_B.unsqueeze(1))[:, 0])


def check_gated_linear() -> None:
    """Both tiles: K below and above the first one's limit, neither a multiple of its depth."""
    for rows, depth, columns in ((17, 40, 70), (3, 1030, 66)):
        x_TD, w_2FD = torch.randn(rows, depth), torch.randn(2 * columns, depth) * depth**-0.5
        wanted = swiglu_reference.forward(x_TD @ w_2FD.T)
        close(fused_kernels.gated_linear(x_TD, w_2FD), wanted)


def check_trained_layer() -> None:
    """A whole layer by the kernels: what it gives and every gradient, adapters' too."""
    rope = RopeConfig("default", 1e4)
    shape = (1, 24, 40, 4, 2, 8, 9, 64, 1e-5, True)
    for qk_norm, lora in ((True, LoraConfig()), (False, LoraConfig(rank=2))):
        config = ModelConfig("qwen3", *shape, not qk_norm, qk_norm, rope)
        layer, adapters = Weights(config, torch.float32, "cpu").layers[0], NO_ADAPTERS
        trained = [leaf for _, leaf in layer.leaves()]
        if lora.rank:
            both = Adapters(config, lora, torch.float32, "cpu")
            trained += both.leaves()
            adapters = both.layers[0]
        for leaf in trained:
            leaf.normal_().mul_(0.3).requires_grad_()
        x_TD, angles_TR = torch.randn(7, 24, requires_grad=True), torch.randn(7, 4)
        angles, found = (angles_TR.cos(), angles_TR.sin()), []
        weight_TD = torch.randn(7, 24)
        for kind in ("kernels", "reference"):
            ops = [importlib.import_module(f"shared_ops.{op}.{kind}") for op in Schedules._fields]
            for input_only in (False, True):
                around = Around(config, Schedules(*ops), angles, [0, 3, 7], input_only, False)
                out_TD = trained_layer(around, adapters, layer, x_TD)
                gradients = torch.autograd.grad((out_TD * weight_TD).sum(), [x_TD, *trained])
                found.append((out_TD, *gradients))
        for each in found[:-1]:
            for got, wanted in zip(each, found[-1], strict=True):
                close(got / wanted.abs().max(), wanted / wanted.abs().max())


def check_packed_attention() -> None:
    for heads, kv_heads, width in ((6, 2, 16), (2, 2, 24)):
        starts = [0, 1, 66, 66, 96]
        q, do = (torch.randn(starts[-1], heads, width) for _ in range(2))
        kv = torch.randn(starts[-1], 2 * kv_heads + 1, width)
        k, v = kv[:, :kv_heads], kv[:, kv_heads : 2 * kv_heads]
        o_THE, lse_TH = attention_kernels.packed_forward(q, k, v, starts)
        wanted = attention_reference.packed_forward(q, k.contiguous(), v.contiguous(), starts)
        all_close((o_THE, lse_TH / attention_kernels.LOG2_E), wanted)
        all_close(
            attention_kernels.packed_backward(do, q, k, v, o_THE, lse_TH, starts),
            attention_reference.packed_backward(do, q, k, v, *wanted, starts),
        )


def paged_case() -> tuple[tuple[Tensor, Tensor, Tensor], PagedLayout]:
    lens, contexts, page = [1, 40, 1, 3], [200, 300, 129, 64], 4
    heads, kv_heads, width = 6, 2, 16
    order = torch.randperm(sum(-(-c // page) for c in contexts) + 3)
    k_pages, v_pages = torch.randn(2, len(order), page, kv_heads, width).unbind(0)
    table_BP, first = torch.zeros(4, 300 // page, dtype=torch.int64), 0
    for row, context in enumerate(contexts):
        count = -(-context // page)
        table_BP[row, :count] = order[first : first + count]
        first += count
    starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
    q = torch.randn(starts[-1], heads, width)
    return (q, k_pages, v_pages), PagedLayout(starts, contexts, table_BP)


def check_paged_attention() -> None:
    attention_kernels.CHUNK = 128
    (q, k_pages, v_pages), layout = paged_case()
    wanted = attention_reference.paged_forward(q, k_pages, v_pages, layout)
    for programs in (0, 1 << 30):
        attention_kernels.SPLIT_PROGRAMS = programs
        close(attention_kernels.paged_forward(q, k_pages, v_pages, layout), wanted)
    table_BP, contexts = layout.page_table_BP, layout.context_lens
    for row, (begin, end) in enumerate(pairwise(layout.query_starts)):
        alone = PagedLayout([0, end - begin], [contexts[row]], table_BP[row : row + 1])
        close(
            attention_kernels.paged_forward(q[begin:end], k_pages, v_pages, alone),
            wanted[begin:end],
        )


def check_unconstrained() -> None:
    """What an engine without contracts has of its own; chunks shorter than the contract's."""
    cuda.kernels = lambda op, x: importlib.import_module(f"shared_ops.{op}.kernels")
    ops = unconstrained.UNCONSTRAINED
    inputs, layout = paged_case()
    wanted = attention_reference.paged_forward(*inputs, layout)
    for chunk, wave in ((64, 1 << 30), (128, 1 << 30), (128, 0)):
        unconstrained.SHORT_CHUNK, unconstrained.ONE_WAVE = chunk, wave
        close(ops.paged_attention(*inputs, layout), wanted)
    hidden_BD, head_VD, heat_B = torch.randn(5, 40), torch.randn(70, 40), torch.rand(5) + 0.5
    logits = [
        call(hidden_BD, head_VD, heat_B, 61)
        for call in (ops.scaled_logits, logprob_reference.scaled_logits)
    ]
    close(*logits)
    assert logits[0][:, 61:].isinf().all()


if __name__ == "__main__":
    torch.manual_seed(3)
    with poisoned_memory():
        globals()[f"check_{sys.argv[1]}"]()
