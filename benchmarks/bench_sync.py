"""Weights from a trainer's process to an engine's, host path beside device path, in one run.

    python -m benchmarks.bench_sync --output benchmarks/results/sync_h200.json

Random weights of the Qwen3 shapes in bf16; every publication changes all of them. The trainer's
side is what its actor publishes, the engine's is `Engine.load_weights` in a second process on the
same GPU. Parts of a publication, each the median:

* publish: the digest, and copies to the host (host path) or the handles (device path).
* load: the copy into the engine's weights, and the digest of what it then holds.
* transfer: all else until the engine's answer is back. The host path writes into shared memory, as
  Ray's object store does, but without its bookkeeping, and into pages that exist already: a bound
  from below.

The first publication of each path is reported apart: it opens the handles, or makes the pages.
"""

import argparse
import json
import multiprocessing
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_ops import commit_of, environment
from benchmarks.random_models import LAYERS, make_folder, random_weights, replace_files
from shared_ops.model.config import ModelConfig
from shared_ops.model.sharing import Opener, Sharer
from shared_ops.model.weights import Leaves, Manifest, digest_of
from trainer.publish import own_storage, publish

MEMORY = Path("/dev/shm")
ALIGNMENT = 64
MIN_RUNS = 5
PARTS = ("publish", "transfer", "load", "total")


class HostMemory:
    """Tensors of a publication in a file that both processes map."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """tensors: for names, shapes and dtypes only."""
        self.path, self._places, at = path, {}, 0
        for name, tensor in tensors.items():
            self._places[name] = at, tensor.nbytes, tensor.dtype, tuple(tensor.shape)
            at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = at

    def views(self) -> dict[str, Tensor]:
        memory_N = torch.from_file(str(self.path), True, self.nbytes, dtype=torch.uint8)
        return {
            name: memory_N[at : at + nbytes].view(dtype).view(shape)
            for name, (at, nbytes, dtype, shape) in self._places.items()
        }


class EngineSide:
    """The second process: an engine, and what it has opened."""

    def __init__(self, name: str, device: str) -> None:
        from rollout import Engine, EngineConfig

        # Without the attestation, which takes no part here.
        config = EngineConfig(device=device, dtype="bfloat16", exact=False, num_pages=64)
        with tempfile.TemporaryDirectory() as base, replace_files():
            self._engine = Engine(make_folder(name, Path(base)), config)
        self._opener = Opener()
        self._mapped: dict[str, Tensor] = {}

    def load(self, manifest: Manifest, given: Any) -> float:
        """Seconds of the load alone."""
        if isinstance(given, HostMemory):
            tensors = self._mapped = self._mapped or given.views()
        else:
            tensors = self._opener.open(given)
        began = time.perf_counter()
        self._engine.load_weights(manifest, tensors)
        return time.perf_counter() - began


def serve(pipe: Any, device: str) -> None:
    """Answers until the pipe ends: a name makes that model's engine, a pair is loaded."""
    side: EngineSide | None = None
    while True:
        try:
            asked = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if isinstance(asked, str):
            side = None
            side = EngineSide(asked, device)
            pipe.send(0.0)
        else:
            assert side is not None
            pipe.send(side.load(*asked))


class Publisher:
    """The first process: weights, and the two ways to publish them."""

    def __init__(self, name: str, device: str, folder: Path) -> None:
        config = ModelConfig.from_folder(make_folder(name, folder))
        self.weights: Leaves = random_weights(None, config, torch.bfloat16, device)
        self.nbytes = sum(leaf.nbytes for leaf in self.weights.leaves())
        room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 1.2 * self.nbytes
        self._scratch = tempfile.TemporaryDirectory(dir=MEMORY if room else None)
        self.host_memory = "shared memory" if room else "a mapped file"
        self._memory = HostMemory(Path(self._scratch.name) / "weights", self.weights.views())
        self._mapped = self._memory.views()
        self._sharer, self._version = Sharer(), 0

    def close(self) -> None:
        self._mapped = {}
        self._scratch.cleanup()

    def by_host(self) -> tuple[Manifest, Callable[[], HostMemory]]:
        manifest, tensors = own_storage(publish(self._version, self.weights))
        return manifest, lambda: self._put(tensors)

    def by_device(self) -> tuple[Manifest, Callable[[], Any]]:
        manifest, tensors = publish(self._version, self.weights)
        shared = self._sharer.share(tensors)
        return manifest, lambda: shared

    def _put(self, tensors: dict[str, Tensor]) -> HostMemory:
        for name, tensor in tensors.items():
            self._mapped[name].copy_(tensor)
        return self._memory

    def change(self) -> None:
        self._version += 1
        for leaf in self.weights.leaves():
            leaf.neg_()
        synchronize()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def publication(publisher: Publisher, pipe: Any, by: Callable) -> dict[str, float]:
    """Seconds of one publication's parts."""
    publisher.change()
    began = time.perf_counter()
    manifest, given = by()
    published = time.perf_counter() - began
    pipe.send_bytes(pickle.dumps((manifest, given())))
    load = pipe.recv()
    total = time.perf_counter() - began
    return dict(zip(PARTS, (published, total - published - load, load, total), strict=True))


def measure(publisher: Publisher, pipe: Any, by: Callable, seconds: float) -> dict[str, Any]:
    """Medians in milliseconds; `MIN_RUNS` or more, fewer only where they would take too long."""
    first, runs = publication(publisher, pipe, by), []
    began = time.perf_counter()
    while len(runs) < MIN_RUNS and (not runs or time.perf_counter() - began < seconds):
        runs.append(publication(publisher, pipe, by))
    medians = {part: statistics.median(run[part] for run in runs) for part in PARTS}
    return {
        **{f"{part}_ms": round(1e3 * value, 2) for part, value in medians.items()},
        "totals_ms": [round(1e3 * run["total"], 2) for run in runs],
        "first_ms": round(1e3 * first["total"], 2),
    }


def digest_ms(weights: Leaves) -> float:
    """Of one digest, median of `MIN_RUNS`."""
    seconds = []
    for _ in range(MIN_RUNS + 1):
        began = time.perf_counter()
        digest_of(weights.views())
        seconds.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(seconds[1:]), 2)


def run(name: str, device: str, pipe: Any, seconds: float) -> list[dict[str, Any]]:
    """One row a path."""
    with tempfile.TemporaryDirectory() as base:
        publisher = Publisher(name, device, Path(base))
    pipe.send_bytes(pickle.dumps(name))
    shared = {
        "model": name,
        "gigabytes": round(publisher.nbytes / 1e9, 2),
        "digest_ms": digest_ms(publisher.weights),
    }
    pipe.recv()
    rows = [{"path": "host", "through": publisher.host_memory}]
    rows[0] |= measure(publisher, pipe, publisher.by_host, seconds)
    if device == "cuda":
        rows.append({"path": "device", **measure(publisher, pipe, publisher.by_device, 1e9)})
    publisher.close()
    return [shared | row for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = f"{'model':<14}{'GB':>7}  {'path':<8}"
    lines = [head + "".join(f"{part + ' ms':>13}" for part in (*PARTS, "first")) + f"{'runs':>6}"]
    for row in rows:
        cells = "".join(f"{row[f'{part}_ms']:>13,.1f}" for part in (*PARTS, "first"))
        start = f"{row['model']:<14}{row['gigabytes']:>7.2f}  {row['path']:<8}"
        lines.append(f"{start}{cells}{len(row['totals_ms']):>6}")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_sync", description=__doc__)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="default: git's HEAD")
    parser.add_argument("--model", choices=list(LAYERS), help="default: both Qwen3")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: host path")
    parser.add_argument("--host-seconds", type=float, default=8.0, help="limit of the host path")
    asked = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, asked.device), daemon=True)
    process.start()
    theirs.close()
    rows: list[dict[str, Any]] = []
    for name in [asked.model] if asked.model else ["Qwen3-0.6B", "Qwen3-8B"]:
        rows += run(name, asked.device, pipe, asked.host_seconds)
    pipe.close()
    process.join(30)
    print("\n".join(table(rows)))
    if asked.output:
        on_gpu = asked.device == "cuda"
        where = environment(asked.commit) if on_gpu else {"commit": commit_of(asked.commit)}
        asked.output.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
