"""Behaviour of a sampler with rounded weights: the grid, the digests, and runs that use it."""

import json
from dataclasses import replace

import pytest
import torch

from recipes.audit import ProofError, require_known_policy
from recipes.command_line import parse
from recipes.grpo_gsm8k import main
from recipes.models import local_folder
from recipes.precision import RoundingTrainerActor, plan_line, rounded
from recipes.runtime import start
from recipes.settings import EMBEDDED, SettingError
from shared_ops.model.weights import digest_of

SMALL = [
    *("--preset", "tiny", "--runtime", "inline", "--steps", "1", "--prompts-per-step", "3"),
    *("--group-size", "4", "--max-tokens", "24", "--evaluation.problems", "0", "--device", "cpu"),
]
PRECISIONS = ("bfloat16", "float8_e4m3fn", "float4_e2m1fn")


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    rows_R1 = torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    return {
        "model.layers.0.mlp.up_proj.weight": torch.randn(4, 96) * rows_R1,
        "model.embed_tokens.weight": torch.randn(5, 96),
        "model.norm.weight": torch.randn(96),
    }


def test_bfloat16_rounds_every_tensor_and_keeps_the_dtype():
    before = weights()
    for name, after in rounded(before, "bfloat16").items():
        assert after.dtype == torch.float32
        assert not torch.equal(after, before[name])
        assert torch.equal(after, before[name].bfloat16().float())


def test_float8_rounds_layer_matrices_by_rows_and_nothing_else():
    before = weights()
    after = rounded(before, "float8_e4m3fn")
    (matrix, *others) = before
    assert all(torch.equal(after[name], before[name]) for name in others)
    w_NK, rounded_NK = before[matrix], after[matrix]
    largest_N1 = w_NK.abs().amax(1, keepdim=True)
    # 3 bits of mantissa: half a step is 2^-4 of the value, and 2^-10 / 448 of the row's largest
    # value among the subnormal numbers.
    allowed_NK = torch.maximum(w_NK.abs() * 2**-4, largest_N1 * 2**-10 / 448) * 1.0001
    assert ((rounded_NK - w_NK).abs() <= allowed_NK).all()
    assert (rounded_NK != w_NK).float().mean() > 0.5
    assert torch.equal(rounded_NK[3], torch.zeros(96))
    for row_K in rounded_NK[:3]:
        assert len(row_K.abs().unique()) <= 96 * 0.9


def test_float4_rounds_layer_matrices_to_the_nearest_of_fifteen_values_a_block():
    before = weights() | {"model.layers.0.mlp.down_proj.weight": torch.randn(3, 20)}
    after = rounded(before, "float4_e2m1fn")
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = 0
    for name, w_NK in before.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(after[name], w_NK)
            continue
        for first in range(0, w_NK.shape[1], 16):
            span = slice(first, first + 16)
            for block, near in zip(w_NK[:, span], after[name][:, span], strict=True):
                values = grid * (block.abs().max() / 6)
                distance = (block.abs().unsqueeze(1) - values).abs().min(1).values
                torch.testing.assert_close((block - near).abs(), distance, rtol=1e-3, atol=1e-7)
                assert len(near.abs().unique()) <= 8
                blocks += 1
    assert blocks == 4 * 6 + 3 * 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_engine_holds_the_rounded_weights_and_the_digests_say_so(precision):
    config = parse([*SMALL, "--mode", "none", "--sampler-precision", precision])
    with start(config, local_folder(EMBEDDED, None)) as sides:
        sides.sync_weights()
        whole = sides.trainer.trainer.publish()[1]
        held = sides.rollout.engine.weights.views()
        assert sides.rollout.weights_digest() == digest_of(rounded(whole, precision))
        assert sides.rollout.weights_digest() != digest_of(whole)
        assert any(not torch.equal(held[name], whole[name]) for name in whole)
        assert all(torch.equal(held[n], x) for n, x in rounded(whole, precision).items())
        assert require_known_policy(sides, [], 0, 0)


def test_an_engine_with_whole_weights_is_caught():
    config = parse([*SMALL, "--mode", "none", "--sampler-precision", "float8_e4m3fn"])
    with start(config, local_folder(EMBEDDED, None)) as sides:
        assert isinstance(sides.trainer, RoundingTrainerActor)
        sides.rollout.load_weights(*sides.trainer.trainer.publish())
        with pytest.raises(ProofError, match="are not the trainer's"):
            require_known_policy(sides, [], 0, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "bitwise", "--sampler-precision", "bfloat16"], "--mode none, tis or mis"),
        (
            ["--mode", "tis", "--dtype", "bfloat16", "--sampler-precision", "bfloat16"],
            "--dtype float32",
        ),
    ],
)
def test_what_would_be_no_comparison_is_refused_in_one_line(words, message, capsys):
    with pytest.raises(SettingError):
        parse([*SMALL, *words])
    assert main([*SMALL, *words]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_plan_says_what_the_sampler_runs():
    assert "nothing rounded" in plan_line(parse(SMALL))
    line = plan_line(parse([*SMALL, "--mode", "mis", "--sampler-precision", "float8_e4m3fn"]))
    assert "ordinary ops in float32" in line and "float8_e4m3fn" in line
    on_gpu = replace(parse([*SMALL, "--mode", "none"]), device="cuda:0", dtype="bfloat16")
    assert "vendor library likes, attention split by load, in bfloat16" in plan_line(on_gpu)


@pytest.mark.usefixtures("reordered")
def test_arms_ask_the_same_first_prompts_and_rounding_widens_the_gap(tmp_path, capsys):
    arms = {
        "bitwise": [],
        "none": ["--mode", "none"],
        "float8": ["--mode", "none", "--sampler-precision", "float8_e4m3fn"],
        "tis": ["--mode", "tis", "--sampler-precision", "float8_e4m3fn"],
    }
    prompts, rows = {}, {}
    for arm, words in arms.items():
        assert main([*SMALL, *words, "--out", str(tmp_path / arm)]) == 0
        completions = (tmp_path / arm / "completions.jsonl").read_text().splitlines()
        prompts[arm] = [json.loads(line)["prompt"] for line in completions]
        rows[arm] = json.loads((tmp_path / arm / "metrics.jsonl").read_text())
    assert "rounded to float8_e4m3fn" in capsys.readouterr().out
    assert all(asked == prompts["bitwise"] for asked in prompts.values())
    kl = {arm: row["kl/sampler_trainer"] for arm, row in rows.items()}
    assert kl["bitwise"] == 0.0 < kl["none"] < kl["float8"] / 10
    assert rows["tis"]["sampling/effective_sample_size"] < 1.0
