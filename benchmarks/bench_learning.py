"""A named model learns a task it can learn, on-policy to the bit and in the comparison modes.

    python -m benchmarks.bench_learning --model FOLDER [--arms bitwise none ...] [--seconds 500]

Every arm runs the recipe with the same preset, data, seed and number of steps, one after the other
in this process. In the arms other than `bitwise` both sides are ordinary programs (the sampler's
products are the vendor library's on a GPU, the trainer is torch's own ops), and a name that ends in
`-fp8` or `-fp4` rounds the sampler's weights too. Rewards and accuracies are those of the arm's own
sampler.

Arms that the results already hold with the same settings are not repeated, and none is started that
would not end within --seconds, as long as the slowest before it. Writes the JSON after each arm, a
picture beside it, and prints a table.
"""

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bench_ops import commit_of
from benchmarks.bench_ops import environment as gpu_environment
from recipes.command_line import is_ours, parse
from recipes.durable import read_lines, write_text
from recipes.settings import RunConfig
from shared_ops.attest_cache import processor_name

RESULTS = Path(__file__).resolve().parent / "results"
PRESET = "smollm2-135m-arithmetic"
PRECISIONS = {"fp8": "float8_e4m3fn", "fp4": "float4_e2m1fn"}
ARMS = ("bitwise", "none", "tis", "mis")
ARMS += tuple(f"{mode}-{name}" for name in PRECISIONS for mode in ARMS[1:])
KEPT = {
    "reward": "reward",
    "tokens_compared": "parity/tokens_compared",
    "tokens_differing": "parity/tokens_differing",
    "kl": "kl/sampler_trainer",
    "largest_difference": "sampling/sampling_logp_difference/max",
    "effective_sample_size": "sampling/effective_sample_size",
    "limited": "sampling/limited_share",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "length": "completions/mean_length",
    "cut": "completions/clipped_ratio",
    "equal_groups": "frac_reward_zero_std",
    "seconds": "step_time",
    "rollout_seconds": "time/rollout",
    "train_seconds": "time/train",
    "sync_seconds": "time/sync",
}
# Not part of what an arm is: places, and the names of the same files on another machine.
PLACES = ("out", "resume", "model")


def run_config(arm: str, model: str, out: str, words: Sequence[str]) -> RunConfig:
    """The run of an arm. words: further settings of every arm."""
    mode, _, precision = arm.partition("-")
    more = [] if mode == "bitwise" else ["--mode", mode, "--trainer.no-exact"]
    more += ["--sampler-precision", PRECISIONS[precision]] if precision else []
    common = ["--preset", PRESET, "--model", model, "--runtime", "inline", "--save-every", "100000"]
    return parse([*common, *words, *more, "--out", out])


def settings_of(config: RunConfig) -> dict[str, Any]:
    """What must be equal for a measured arm to count, as JSON holds it."""
    values = {name: value for name, value in asdict(config).items() if name not in PLACES}
    return json.loads(json.dumps(values))


def measure(config: RunConfig) -> dict[str, Any]:
    """Run one arm: its steps' numbers, evaluations, seconds, and why it stopped early, if it did.

    Raises:
        ParityError: a bit differs in mode bitwise.
    """
    from recipes.grpo_gsm8k import run

    began, stopped = time.perf_counter(), None
    try:
        run(config)
    except Exception as error:
        if config.mode == "bitwise" or not is_ours(error):
            raise
        stopped = f"{type(error).__name__}: {error}"
    out = Path(config.out or "")
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    rows = list(read_lines(out / "metrics.jsonl"))
    return {
        "stopped": stopped,
        "wall_seconds": round(time.perf_counter() - began, 1),
        "evaluations": list(read_lines(out / "evaluations.jsonl")),
        "steps": {short: [_short(row.get(name)) for row in rows] for short, name in KEPT.items()},
    }


def _short(value: Any) -> Any:
    """Five significant digits; 0 stays 0."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def table(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line an arm."""
    head = (
        f"{'arm':<10}{'steps':>6}{'compared':>11}{'differing':>11}{'largest kl':>12}"
        f"{'first 10':>10}{'last 10':>9}{'lowest of last half':>21}{'sampled':>16}{'greedy':>16}"
        f"{'s/step':>8}{'seconds':>9}"
    )
    return [head, *(_line(arm, found) for arm, found in arms.items())]


def _line(arm: str, found: Mapping[str, Any]) -> str:
    steps = found["steps"]
    rewards = steps["reward"]
    if not rewards:
        return f"{arm:<10} stopped before its first step: {found['stopped']}"
    numbers = (
        f"{arm:<10}{len(rewards):>6}{sum(steps['tokens_compared']):>11,}"
        f"{sum(steps['tokens_differing']):>11,}{max(map(_or_zero, steps['kl'])):>12.3g}"
        f"{_mean(rewards[:10]):>10.3f}{_mean(rewards[-10:]):>9.3f}"
        f"{min(rewards[len(rewards) // 2 :]):>21.3f}"
    )
    shares = "".join(f"{_ends(found, kind):>16}" for kind in ("sampled", "greedy"))
    median = sorted(steps["seconds"])[len(rewards) // 2]
    why = f"  stopped: {found['stopped']}" if found["stopped"] else ""
    return f"{numbers}{shares}{median:>8.2f}{found['wall_seconds']:>9.0f}{why}"


def _or_zero(value: float | None) -> float:
    return value or 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ends(found: Mapping[str, Any], kind: str) -> str:
    """Lenient accuracy before and after."""
    shares = [row[f"eval/{kind}_lenient"] for row in found["evaluations"]]
    return " -> ".join(f"{share:.1%}" for share in (shares[:1] + shares[1:][-1:]))


def draw(path: Path, arms: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Reward, KL between sampler and trainer, and entropy by step, all arms beside each other."""
    from matplotlib.figure import Figure

    from recipes.report_charts import styles

    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    reward, kl, entropy = figure.subplots(1, 3)
    reward.set_title("reward (mean of 5 steps)")
    kl.set_title("KL(sampler || trainer), k3 estimate")
    entropy.set_title("entropy, nats a token")
    for (arm, found), style in zip(arms.items(), styles(len(arms)), strict=True):
        look = {"color": style.colour, "linestyle": style.dash, "linewidth": 1.4}
        steps = found["steps"]
        _plot(reward, _smooth(steps["reward"], 5), arm, look)
        values = [value if value else None for value in steps["kl"]]
        _plot(kl, values, arm if any(values) else f"{arm}: exactly 0.0 at every step", look)
        _plot(entropy, steps["entropy"], arm, look)
    kl.set_yscale("log")
    for axes in (reward, kl, entropy):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def _plot(axes: Any, values: Sequence[float | None], label: str, look: Mapping[str, Any]) -> None:
    numbers = [float("nan") if value is None else value for value in values]
    axes.plot(range(1, len(numbers) + 1), numbers, label=label, **look)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    return [_mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def environment(device: str, commit: str | None) -> dict[str, str]:
    """The machine and the versions."""
    import torch

    if device.startswith("cuda"):
        return gpu_environment(commit)
    machine = processor_name()
    return {"device": machine, "torch": torch.__version__, "commit": commit_of(commit)}


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_arms(given: argparse.Namespace, words: Sequence[str], runs: Path) -> dict[str, Any]:
    """Every arm that is wanted, lacking and affordable; the report, written after each."""
    began, slowest, output = time.perf_counter(), 0.0, Path(given.output)
    report = json.loads(output.read_text()) if output.exists() else {"arms": {}}
    for arm in given.arms:
        config = run_config(arm, given.model, str(runs / arm), words)
        settings = settings_of(config)
        if report["arms"].get(arm, {}).get("settings") == settings:
            continue
        if time.perf_counter() - began + slowest > given.seconds:
            print(f"{arm}: left out, --seconds {given.seconds:g} would not hold it", flush=True)
            continue
        print(f"\n== {arm}", flush=True)
        shutil.rmtree(runs / arm, ignore_errors=True)  # an attempt that was not finished
        where = environment(config.device, given.commit)
        found = {"environment": where, "settings": settings, **measure(config)}
        slowest = max(slowest, found["wall_seconds"])
        report["arms"][arm] = found
        write_text(output, json.dumps(report, separators=(",", ":")) + "\n")
        _free_memory()
    return report


def parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own flags, and words for the recipe; flags that are not ours are the recipe's."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_learning",
        description=(__doc__ or "").split("\n")[0],
        epilog="Other flags are settings of every run, as of recipes.grpo_gsm8k.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder, or a GGUF file")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS[:4]))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no arm beyond this")
    parser.add_argument("--output", default=str(RESULTS / "learning.json"))
    parser.add_argument(
        "--runs",
        help="keep the arms' folders here; else temporary",
    )
    parser.add_argument("--commit", help="default: git's HEAD")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str]) -> int:
    given, words = parsed(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        report = run_arms(given, words, Path(given.runs or temporary))
    arms = report["arms"]
    print("\n".join(table(arms)))
    if arms:
        first = next(iter(arms.values()))
        title = f"{PRESET}, {first['settings']['steps']} steps, {first['environment']['device']}"
        draw(Path(given.output).with_suffix(".png"), arms, title)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
