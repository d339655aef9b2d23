"""Proof, on the machine in use, that the schedules obey their contracts.

A contract rests on facts about libraries that another processor, thread count or version may
break. `attest` checks every fact that a model of the given shape relies on, bit for bit in
float32 on random data, before the first token, and leaves out the schedules that differ. It also
returns digests of the results: a sampler and a trainer whose digests differ do not compute the same
function (two kinds of processor in one cluster, say), and must not start so.

`python -m shared_ops.attest FOLDER [--device cuda --dtype bfloat16]` prints the table. What is
checked is in `attest_cpu.py` and `attest_cuda.py`; what was found is kept (`attest_cache.py`).
"""

import argparse
import sys

import torch

from shared_ops.attest_cache import processor_name
from shared_ops.attest_report import AttestationError, Report
from shared_ops.model.config import ModelConfig
from shared_ops.model.lora_config import LoraConfig
from shared_ops.numerics import NumericsError


def attest(
    config: ModelConfig,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    lora: LoraConfig | None = None,
) -> Report:
    """Check every fact that a decoder of this shape relies on, on the device in use.

    Args:
        config: the model's shape.
        seed: of the random data; both sides of a run must use the same one.
        device: "cpu" or "cuda" (the current one).
        dtype: on CUDA, of weights and activations; a CPU computes in float32 whatever it is.
        lora: settled settings of adapters; their products are checked as well.

    Returns:
        The checks and their digests; call `raise_if_broken` on it.

    Raises:
        DeviceError: the GPU is too old, or triton is missing or too old.
        NumericsError: on a CPU, a global setting of torch under which no contract holds.
        AttestationError: the plain schedule of an op is not reproducible.
    """
    if torch.device(device).type == "cuda":
        from shared_ops.attest_cuda import attest_cuda

        return attest_cuda(config, getattr(torch, dtype), seed, lora)
    from shared_ops.attest_cpu import attest_cpu

    return attest_cpu(config, seed, lora)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m shared_ops.attest")
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args(arguments)
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    try:
        report = attest(ModelConfig.from_folder(options.model), 0, options.device, dtype)
    except (ValueError, AttestationError, NumericsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'op':<32} {'shape':<24} {'values':>14} {'differing':>10}")
    for check in (*report.checks, *report.dropped):
        print(f"{check.op:<32} {check.shape:<24} {check.values:>14,} {check.differing:>10,}")
    where = processor_name() if options.device == "cpu" else torch.cuda.get_device_name()
    threads = f"{torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, {threads}, {report.seconds:.2f} s")
    print(f"fingerprint {report.fingerprint}")
    return int(any(check.differing for check in report.checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
