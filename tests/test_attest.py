"""Attestation: passes here, counts what it compares, and catches a primitive that breaks."""

from __future__ import annotations

import pytest
import torch
from bits import threads
from toy_models import toy_folder

from shared_ops import attest as attest_module
from shared_ops.attest import AttestationError, Report, attest, main, product_shapes
from shared_ops.model.config import ModelConfig, RopeConfig

OPS = {
    "linear",
    "linear backward",
    "row sum",
    "exp",
    "log",
    "log of float64",
    "attention scores",
    "attention values",
}


def config(hidden: int, inner: int, heads: tuple[int, int, int], vocabulary: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        num_layers=2,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocabulary,
        max_positions=512,
        norm_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=False,
        qk_norm=True,
        rope=RopeConfig("default", 10000.0),
    )


TOY = config(64, 160, (4, 2, 16), 97)
LARGER = config(600, 1000, (7, 1, 80), 1501)
WIDE_HEADS = config(128, 256, (2, 1, 256), 131)


def check(report: Report, op: str) -> attest_module.Check:
    return next(check for check in report.checks if check.op == op)


@pytest.mark.parametrize("shape", [TOY, LARGER, WIDE_HEADS], ids=["toy", "larger", "wide heads"])
def test_the_contracts_hold_here(shape):
    with threads(2):
        report = attest(shape)
    report.raise_if_broken()
    assert {check.op for check in report.checks} == OPS
    assert all(check.values > 0 for check in report.checks)
    assert sum(check.op == "linear" for check in report.checks) == len(product_shapes(shape))


def _tail(x: torch.Tensor, error: float = 1e-3) -> torch.Tensor:
    """A vector tail that rounds otherwise than the body."""
    x = x.clone()
    x.view(-1)[-1] += error
    return x


BROKEN = {
    "linear": ("fixed_product", lambda real: lambda x, w: real(x, w) * (1 + 1e-6 * (len(x) < 4))),
    "linear backward": ("token_product", lambda real: lambda *xs: _by_threads(real(*xs))),
    "row sum": ("row_sum", lambda real: lambda x: real(x) * (1 + 1e-6 * (len(x) == 7))),
    "attention scores": ("tile_scores", lambda real: lambda q, k: _tail(real(q, k))),
}


def _by_threads(x: torch.Tensor) -> torch.Tensor:
    return x + 1e-3 * (torch.get_num_threads() - 1)


@pytest.mark.parametrize("op", BROKEN)
def test_a_broken_primitive_is_caught_and_named(op, monkeypatch):
    name, breaks = BROKEN[op]
    monkeypatch.setattr(attest_module, name, breaks(getattr(attest_module, name)))
    with threads(2):
        report = attest(TOY)
    assert check(report, op).differing > 0
    with pytest.raises(AttestationError, match=f"^{op} .*OMP_NUM_THREADS=1"):
        report.raise_if_broken()


def test_a_nan_is_a_difference(monkeypatch):
    monkeypatch.setattr(attest_module, "row_sum", lambda x: x[..., :1] * float("nan"))
    broken = check(attest(TOY), "row sum")
    assert broken.differing == broken.values > 0


def test_the_fingerprint_depends_on_the_values_only(monkeypatch):
    with threads(1):
        one = attest(TOY)
    with threads(2):
        two = attest(TOY)
    assert one.fingerprint == two.fingerprint
    assert attest(TOY, seed=1).fingerprint != one.fingerprint
    real = attest_module.fixed_product
    monkeypatch.setattr(attest_module, "fixed_product", lambda x, w: real(x, w) * (1 + 1e-6))
    elsewhere = attest(TOY)
    elsewhere.raise_if_broken()
    assert elsewhere.fingerprint != one.fingerprint


def test_the_command_line_prints_the_table(tmp_path, capsys):
    assert main([str(toy_folder(tmp_path / "model"))]) == 0
    printed = capsys.readouterr().out
    assert all(op in printed for op in OPS)
    assert (
        f"fingerprint {attest(ModelConfig.from_folder(tmp_path / 'model')).fingerprint}" in printed
    )
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err
