"""Attestation on a GPU: counts, the cache, dropped schedules, refusal."""

from __future__ import annotations

import json

import pytest
import torch
from gpu import HALVES, module, needs_gpu
from toy_models import toy_folder

from shared_ops.attest import AttestationError, attest, main
from shared_ops.model.config import ModelConfig, RopeConfig

pytestmark = needs_gpu
SMALL = ModelConfig(
    family="qwen2",
    num_layers=2,
    hidden_size=320,
    intermediate_size=3072,
    num_heads=4,
    num_kv_heads=2,
    head_dim=80,
    vocab_size=5003,
    max_positions=4096,
    norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    rope=RopeConfig("default", 10000.0),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    products = module("products")
    monkeypatch.setattr(products, "_outside", {})
    monkeypatch.setattr(products, "_dropped", set())
    return tmp_path


@HALVES
def test_the_contracts_hold_here(dtype, cache) -> None:
    name = str(dtype).removeprefix("torch.")
    report = attest(SMALL, device="cuda", dtype=name)
    report.raise_if_broken()
    kinds = {check.op.split(",")[0] for check in report.checks}
    assert kinds == {"product", "rmsnorm", "log softmax", "attention"}
    for check in report.checks:
        assert check.values > 100_000
    assert all(check.values >= 1_000_000 for check in report.checks if "softmax" in check.op)
    again = attest(SMALL, device="cuda", dtype=name)
    assert again == report and len(list(cache.rglob("*.json"))) == 1
    assert attest(SMALL, 1, device="cuda", dtype=name).fingerprint != report.fingerprint


def test_a_tile_that_differs_is_dropped_with_a_warning(monkeypatch) -> None:
    products = module("products")
    real, bad = products.tiled, products.tiles()[1]

    def broken(x, w, bias, y, tile):
        real(x, w, bias, y, tile)
        y.mul_(1 + 1e-6 * (tile == bad))

    monkeypatch.setattr(products, "tiled", broken)
    with pytest.warns(UserWarning, match=f"dropped: product, tile {bad.rows}x{bad.columns}"):
        report = attest(SMALL, device="cuda", dtype="bfloat16")
    assert report.dropped and not any(check.differing for check in report.checks)
    shape = products.Shape(3072, 320, torch.bfloat16, torch.bfloat16)
    assert products.choose(bad.rows, shape) not in (None, bad)
    assert products.choose(1, shape) == products.tiles()[0]


def test_a_library_outside_the_contract_is_not_chosen(monkeypatch) -> None:
    products = module("products")
    shape = products.Shape(320, 320, torch.bfloat16, torch.bfloat16)
    assert products.choose(999, shape) is not None, "used without proof"
    real = products.library

    def broken(x, w, bias, y):
        real(x, w, bias, y)
        y.mul_(1.01 if len(x) == 1000 else 1.0)

    monkeypatch.setattr(products, "library", broken)
    report = attest(SMALL, device="cuda", dtype="bfloat16")
    (check,) = (
        check for check in report.checks if check.shape == "320 -> 320" and "lib" in check.op
    )
    assert check.op == "product, library not at 1000 rows"
    assert [products.choose(rows, shape) is None for rows in (999, 1000, 1001)] == [
        True,
        False,
        True,
    ]


def test_a_plain_schedule_that_is_not_reproducible_is_refused(monkeypatch) -> None:
    products = module("products")
    real = products.tiled

    def unstable(x, w, bias, y, tile):
        real(x, w, bias, y, tile)
        y.mul_(1 + 1e-6 * torch.rand(1, device="cuda"))

    monkeypatch.setattr(products, "tiled", unstable)
    with pytest.raises(AttestationError, match=r"^product, plain tile .*cannot be used exactly$"):
        attest(SMALL, device="cuda", dtype="bfloat16")


def test_the_command_line_prints_the_table(tmp_path, capsys) -> None:
    folder = toy_folder(tmp_path / "model")
    assert main([str(folder), "--device", "cuda", "--dtype", "float16"]) == 0
    printed = capsys.readouterr().out
    assert "attention, split decode" in printed and "fingerprint" in printed
    (verdict,) = (json.loads(path.read_text()) for path in tmp_path.rglob("attest/*.json"))
    assert verdict["fingerprint"] in printed
