"""Behaviour of `exact=False`: which ops each device gets. What needs a GPU is in
test_gpu_unconstrained.py, masks and indices are in interpreted_checks.py."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_models import toy_folder

from rollout import Engine, EngineConfig
from shared_ops import ordinary
from shared_ops.fused.op import Widths, allow, is_allowed
from shared_ops.opset import EXACT
from shared_ops.ordinary import ORDINARY
from shared_ops.unconstrained import UNCONSTRAINED, library_product, sampler_ops
from trainer import Trainer, TrainerConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_each_device_gets_its_ops():
    assert sampler_ops(True, CPU) is sampler_ops(True, CUDA) is EXACT
    assert sampler_ops(False, CPU) is ORDINARY
    assert sampler_ops(False, CUDA) is UNCONSTRAINED


def test_an_engine_and_a_trainer_without_contracts_run_torchs_ops_on_a_cpu(tmp_path):
    folder = toy_folder(tmp_path / "model")
    engine = Engine(folder, EngineConfig(exact=False))
    assert engine.ops is engine.model.ops is engine.kv.ops is ORDINARY
    assert engine.graphs is None
    trainer = Trainer(folder, TrainerConfig(exact=False, mode="none"))
    assert trainer._held.scorer.model.ops is ORDINARY


def test_only_products_and_the_split_differ_from_exact():
    others = {
        name for name in EXACT._fields if getattr(UNCONSTRAINED, name) is not getattr(EXACT, name)
    }
    wanted = {"linear", "lora", "paged_attention", "head_logits", "scaled_logits", "needs_proof"}
    assert others == wanted
    assert UNCONSTRAINED.fuses and not UNCONSTRAINED.needs_proof


@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_as_accurate_as_the_contracts(with_bias):
    torch.manual_seed(5)
    x_TK, w_NK, bias_N = torch.randn(7, 300), torch.randn(90, 300), torch.randn(90)
    bias_N = bias_N if with_bias else None
    wanted_TN = torch.nn.functional.linear(
        x_TK.double(), w_NK.double(), None if bias_N is None else bias_N.double()
    )
    errors = [
        (ops.linear(x_TK, w_NK, bias_N) - wanted_TN).abs().max() for ops in (UNCONSTRAINED, EXACT)
    ]
    assert errors[0] <= 2 * errors[1]
    assert torch.equal(library_product(x_TK, w_NK, torch.float32), ORDINARY.linear(x_TK, w_NK))


def test_many_sequences_padded_into_one_call_are_those_one_by_one(monkeypatch):
    torch.manual_seed(3)
    lengths = [5, 9, 1, 12, 7] * 4
    starts = [0, *itertools.accumulate(lengths)]
    sizes = ((starts[-1], heads, 64) for heads in (9, 3, 3))
    leaves = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]

    def run() -> list[torch.Tensor]:
        out = ordinary.packed_attention(*leaves, starts)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    padded = run()
    monkeypatch.setattr(ordinary, "_attend_padded", None)
    with pytest.raises(TypeError):
        run()
    monkeypatch.setattr(ordinary, "MANY", len(lengths) + 1)
    for one, other in zip(padded, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_fused_launches_wait_for_proof_only_where_bits_are_promised():
    x_TD: Any = SimpleNamespace(is_cuda=True, shape=(3, 4096 + 16), dtype=torch.bfloat16)
    widths = Widths(4096 + 16, 48, torch.bfloat16)
    with torch.inference_mode():
        assert not is_allowed(x_TD, 48)
        assert is_allowed(x_TD, 48, needs_proof=False)
        assert not is_allowed(x_TD, 40, needs_proof=False), "its layout is not rmsnorm's"
        allow(widths, True)
        assert is_allowed(x_TD, 48)
        allow(widths, False)
    assert not is_allowed(x_TD, 48, needs_proof=False), "gradients are enabled"
