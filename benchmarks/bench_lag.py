"""Lag against learning, with the proof: one run of the main job for every --max-lag.

    python -m benchmarks.bench_lag                        lag 0, 1, 2, 4, 8 and the controls
    python -m benchmarks.bench_lag --lags 0 2 --steps 10 --seeds 0 1

Every stale token is scored again under the weights that drew it. Controls: the synchronous run,
whose weights lag 0 has to equal, and a run in which one completion a step claims another version
than the one that drew it, which has to stop. Writes benchmarks/results/lag_cpu.json.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_scenarios import commit
from recipes import job
from recipes.command_line import parse
from recipes.durable import read_lines
from recipes.grpo_gsm8k import run
from shared_ops.attest_cache import processor_name
from trainer.parity import ParityError

RESULTS = Path(__file__).resolve().parent / "results" / "lag_cpu.json"
COLUMNS = {
    "tokens": 8,
    "stale": 8,
    "rescored": 9,
    "differing": 10,
    "across": 7,
    "refreshed": 10,
    "mean_lag": 9,
    "kl_mismatch": 12,
    "kl_lag": 10,
    "clipped": 8,
    "seconds": 8,
}


def one_run(words: list[str], folder: Path) -> dict[str, Any]:
    """A row of the table, of a whole run into a folder that is new."""
    began = time.perf_counter()
    run(parse([*words, "--out", str(folder)]))
    rows = list(read_lines(folder / "metrics.jsonl"))
    after = list(read_lines(folder / "evaluations.jsonl"))[-1]
    seconds = time.perf_counter() - began

    def total(name: str) -> int:
        return int(sum(row.get(name, 0) for row in rows))

    def mean(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows) / len(rows)

    ages = {int(k.rsplit("/", 1)[1]) for row in rows for k in row if k.startswith("lag/tokens/")}
    rescored = total("parity/lag_rescored_compared")
    return {
        "tokens": total("parity/tokens_compared") + rescored,
        "stale": sum(total(f"lag/tokens/{age}") for age in ages if age),
        "rescored": rescored,
        "differing": total("parity/lag_rescored_differing") + total("parity/tokens_differing"),
        "across": total("async/completions_across_updates"),
        "refreshed": total("async/groups_refreshed"),
        "mean_lag": mean("lag/versions_mean"),
        "kl_mismatch": max(row["kl/mismatch"] for row in rows),
        "kl_lag": mean("kl/lag"),
        "clipped": mean("clip_ratio/region_mean"),
        "seconds": seconds,
        "steps_seconds": sum(row["step_time"] for row in rows),
        "lag_tokens": {age: total(f"lag/tokens/{age}") for age in sorted(ages)},
        "eval": {k: v for k, v in after.items() if k.startswith("eval/")},
        "digest": _weights_digest(folder),
    }


def _weights_digest(folder: Path) -> str:
    last = sorted((folder / "checkpoints").iterdir())[-1]
    return json.loads((last / "digests.json").read_text())["training.safetensors"]


def wrong_tag(words: list[str], folder: Path) -> str:
    """What stops a run in which one stale completion claims another version; "" if nothing did."""
    real = job.Job.samples

    def mistagged(self: job.Job, step: int, drawn: Any) -> list[Any]:
        samples, version = real(self, step, drawn), self.sides.trainer.version()
        for place, one in enumerate(samples):
            drawn_by = set(one.policy_versions)
            other = {version - 1, version - 2} - drawn_by
            if step >= 2 and len(drawn_by) == 1 and drawn_by < {version - 1, version - 2}:
                tags = [*other] * len(one.policy_versions)
                samples[place] = dataclasses.replace(one, policy_versions=tags)
                break
        return samples

    job.Job.samples = mistagged
    try:
        run(parse([*words, "--out", str(folder)]))
    except ParityError as error:
        return str(error)
    finally:
        job.Job.samples = real
    return ""


def shown(row: dict[str, Any]) -> str:
    forms = {float: "{:.3g}", int: "{:,}"}
    cells = [f"{forms[type(row[name])].format(row[name]):>{w}}" for name, w in COLUMNS.items()]
    greedy = "{:.1%} ({:.1%} to {:.1%})".format(
        *(row["eval"][f"eval/sampled_strict{end}"] for end in ("", "/low", "/high"))
    )
    return "".join(cells) + f"  {greedy}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runtime", default="inline")
    given = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "commit": commit(),
        "device": processor_name(),
        "torch": torch.__version__,
        "settings": {"steps": given.steps, "runtime": given.runtime, "lag_share": 1.0},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        for seed in given.seeds:
            _one_seed(given, seed, Path(scratch) / str(seed), result)
        words = ["--steps", "8", "--evaluation.problems", "0", *_common(given), "--max-lag", "2"]
        result["wrong_tag"] = wrong_tag(words, Path(scratch) / "wrong-tag")
    print(f"wrong tag: {result['wrong_tag'] or 'NOT CAUGHT'}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    right = all(row["differing"] == 0 for row in result["rows"])
    return 0 if right and result["lag_0_is_synchronous"] and result["wrong_tag"] else 1


def _common(given: argparse.Namespace) -> list[str]:
    return ["--runtime", given.runtime, "--lag-share", "1", "--device", "cpu"]


def _one_seed(given: argparse.Namespace, seed: int, scratch: Path, result: dict) -> None:
    words = ["--steps", str(given.steps), "--seed", str(seed), *_common(given)]
    synchronous = one_run(words, scratch / "synchronous")
    result["rows"].append({"seed": seed, "lag": None, **synchronous})
    lines = [f"{'synchronous':<14}{shown(synchronous)}"]
    for lag in given.lags:
        row = one_run([*words, "--max-lag", str(lag)], scratch / f"lag-{lag}")
        result["rows"].append({"seed": seed, "lag": lag, **row})
        lines.append(f"{f'max-lag {lag}':<14}{shown(row)}")
        if lag == 0:
            equal = row["digest"] == synchronous["digest"]
            result["lag_0_is_synchronous"] = result.get("lag_0_is_synchronous", True) and equal
    head = f"{f'seed {seed}':<14}" + "".join(f"{name:>{w}}" for name, w in COLUMNS.items())
    print("\n".join([f"{head}  sampled accuracy after", *lines]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
