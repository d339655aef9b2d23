"""Attestation: passes here, counts what it compares, catches what breaks, and keeps its verdict."""

from __future__ import annotations

import json
import time

import pytest
import torch
from bits import threads
from toy_models import toy_folder

from recipes.runtime import RuntimeSetupError, Sides
from shared_ops import attest_cache, attest_cpu, cpu_products, elementary
from shared_ops.attest import attest, main
from shared_ops.attest_report import AttestationError, Check, Report, product_shapes
from shared_ops.model.config import ModelConfig, RopeConfig
from shared_ops.model.lora_config import LoraConfig

OPS = {
    *(f"IEEE 754 {name}" for name in ("+", "*", "/", "reciprocal", "square root")),
    *elementary.FUNCTIONS,
    *("linear", "linear, dx", "linear, dw and dbias"),
    "row sum",
    *("attention", "attention, gradients"),
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
NARROW_HEADS = config(24, 50, (3, 1, 10), 40)
WIDE_HEADS = config(128, 256, (2, 1, 256), 131)
SHAPES = {"toy": TOY, "larger": LARGER, "narrow heads": NARROW_HEADS, "wide heads": WIDE_HEADS}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing known from before: no file, nothing in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(elementary, "_plain", set())
    return tmp_path


def check(report: Report, op: str) -> Check:
    return next(check for check in report.checks if check.op == op)


def files(cache) -> list:
    return list(cache.rglob("*.json"))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_contracts_hold_here(shape):
    with threads(2):
        report = attest(shape)
    report.raise_if_broken()
    assert {check.op for check in report.checks} >= OPS
    assert all(check.values > 0 for check in report.checks)
    assert sum(check.op == "linear" for check in report.checks) == len(product_shapes(shape))
    assert set(report.facts) == {"sums", *elementary.FUNCTIONS}


def test_the_products_of_adapters_are_checked():
    lora = LoraConfig(rank=8).settled()
    with threads(3):
        checks = attest(TOY, lora=lora).checks
    shapes = {check.shape for check in checks if check.op == "linear"}
    assert {"64 -> 24", "8 -> 64", "160 -> 8"} <= shapes
    assert not any(check.differing for check in checks)


BROKEN = {
    "linear": ("fixed_product", lambda real: lambda x, w: real(x, w) * (1 + 1e-6 * (len(x) < 4))),
    "linear, dw and dbias": ("token_product", lambda real: lambda *xs: _by_threads(real(*xs))),
    "row sum": ("row_sum", lambda real: lambda x: real(x) * (1 + 1e-6 * (len(x) == 1))),
    "attention": ("packed_forward", lambda real: lambda *xs: _by_companions(real, *xs)),
}


def _by_threads(x: torch.Tensor) -> torch.Tensor:
    return x + 1e-3 * (torch.get_num_threads() - 1)


def _by_companions(real, *given):
    o_THE, lse_TH = real(*given)
    return o_THE + 1e-3 * (len(given[-1]) > 2), lse_TH


@pytest.mark.parametrize("op", BROKEN)
def test_a_broken_op_is_caught_and_named(op, monkeypatch):
    name, breaks = BROKEN[op]
    monkeypatch.setattr(attest_cpu, name, breaks(getattr(attest_cpu, name)))
    with threads(2):
        report = attest(TOY)
    assert check(report, op).differing > 0
    of_threads = name == "token_product"
    what = "with the number of threads here: use --threads 1" if of_threads else "with batch size"
    with pytest.raises(AttestationError, match=f"^{op} .* values change {what}"):
        report.raise_if_broken()


def test_a_nan_is_a_difference(monkeypatch):
    monkeypatch.setattr(attest_cpu, "row_sum", lambda x: x[..., :1] * float("nan"))
    broken = check(attest(TOY), "row sum")
    assert broken.differing == broken.values > 0


def test_arithmetic_that_is_not_ieee_is_refused(monkeypatch):
    monkeypatch.setattr(attest_cpu, "square_root", torch.rsqrt)
    with pytest.raises(AttestationError, match="square root of float32 is not IEEE 754's here"):
        attest(TOY)


def test_a_function_that_depends_on_the_place_is_replaced(monkeypatch):
    def exp(x):
        y = real(x)
        y.view(-1)[-1:] *= 1 + 2.0**-20
        return y

    real = torch.exp
    monkeypatch.setattr(torch, "exp", exp)
    with pytest.warns(
        UserWarning, match="the library's exp depends on an element's place on .*: a plain"
    ):
        report = attest(TOY)
    report.raise_if_broken()
    assert elementary.in_plain_use() == {"exp"}
    assert [check.op for check in report.dropped if check.differing] == ["the library's exp"]


def test_the_digests_depend_on_the_values_only(cache, monkeypatch):
    with threads(1):
        one = attest(TOY)
    with threads(2):
        two = attest(TOY)
    assert len(files(cache)) == 2
    assert one.facts == two.facts and one.fingerprint == two.fingerprint
    assert attest(TOY, seed=1).fingerprint != one.fingerprint
    real = attest_cpu.fixed_product
    monkeypatch.setattr(attest_cpu, "fixed_product", lambda x, w: real(x, w) * (1 + 1e-6))
    monkeypatch.setattr(attest_cache, "processor", lambda: "another processor")
    monkeypatch.setattr(attest_cpu, "processor", lambda: "another processor")
    elsewhere = attest(TOY)
    elsewhere.raise_if_broken()
    assert elsewhere.facts["sums"] != one.facts["sums"]
    assert elsewhere.facts["exp"] == one.facts["exp"]


def test_a_verdict_is_kept_and_taken_up_quickly(cache, monkeypatch):
    first = attest(LARGER)
    monkeypatch.setattr(cpu_products, "_found", {})
    monkeypatch.setattr(cpu_products, "_chosen", {})
    monkeypatch.setattr(attest_cpu, "_measure", None)
    start = time.perf_counter()
    assert attest(LARGER) == first and len(files(cache)) == 1
    assert time.perf_counter() - start < 2
    assert cpu_products._chosen, "the schedules that were proved are to be proved again"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"verdict": {}, "digest": ""}', "flipped"], ids=lambda text: text[:8]
)
def test_a_damaged_verdict_is_measured_again(cache, text):
    first = attest(TOY)
    (path,) = files(cache)
    if text == "flipped":
        text = path.read_text().replace('"differing": 0', '"differing": 9', 1)
    path.write_text(text)
    with pytest.warns(UserWarning, match=f"attested anew, since {path} is damaged"):
        again = attest(TOY)
    assert (again.checks, again.facts) == (first.checks, first.facts)
    assert json.loads(path.read_text())["verdict"]["facts"] == first.facts


def test_a_cache_that_cannot_be_written_costs_a_line(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.warns(UserWarning, match="verdict is not kept"):
        attest(TOY).raise_if_broken()


@pytest.mark.parametrize(
    "name", ["MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE"]
)
def test_another_setting_is_another_verdict(cache, monkeypatch, name):
    attest(TOY)
    monkeypatch.setenv(name, "AVX2")
    attest(TOY)
    assert len(files(cache)) == 2


class _Side:
    """A side on a machine of its own, whose facts are given."""

    def __init__(self, **facts: str) -> None:
        self.facts, self.plain = facts, set()

    def attest(self) -> Report:
        facts = {name: "plain" if name in self.plain else x for name, x in self.facts.items()}
        return Report((Check("linear", "2 -> 2", 8, 0),), facts, 0.0)

    def use_plain(self, functions) -> None:
        self.plain |= set(functions)


def test_two_machines_whose_libraries_round_otherwise_both_take_the_plain_function():
    one, two = _Side(sums="a", exp="b", log="c"), _Side(sums="a", exp="d", log="c")
    line = Sides(one, two).attest()
    assert one.plain == two.plain == {"exp"}
    assert line == (
        "attested: 16 float32 values, 0 differ, both sides agree"
        " (the machines' exp differ: plain ones on all sides)"
    )


def test_two_machines_that_sum_otherwise_are_refused():
    one, two = _Side(sums="a", exp="b"), _Side(sums="z", exp="d")
    with pytest.raises(
        RuntimeSetupError, match=r"compute different bits \(exp, sums\): place both"
    ):
        Sides(one, two).attest()
    assert not one.plain


def test_the_command_line_prints_the_table(tmp_path, capsys):
    assert main([str(toy_folder(tmp_path / "model"))]) == 0
    printed = capsys.readouterr().out
    assert all(op in printed for op in OPS)
    assert attest_cache.processor_name() in printed
    fingerprint = attest(ModelConfig.from_folder(tmp_path / "model")).fingerprint
    assert f"fingerprint {fingerprint}" in printed
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err
