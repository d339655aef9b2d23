"""Starts a test file as the processes of a data-parallel group, gloo on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_group(script: str, count: int, *arguments: object) -> list:
    """What each rank of `script` prints last, read as JSON."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    processes = [
        subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            env=os.environ
            | group
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def own_place() -> tuple[int, int]:
    """Rank and number of ranks of this process."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
