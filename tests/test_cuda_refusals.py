"""A machine that cannot run the CUDA schedules is refused in one line that names the mend."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from shared_ops import cuda
from shared_ops.cuda import DeviceError


def test_an_old_gpu_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(DeviceError, match=r"Tesla T4 is sm_75 .* need sm_80 .* use device .cpu.$"):
        cuda.require_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    cuda.require_device(torch.device("cuda", 0))


def test_a_gpu_of_another_make_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="no NVIDIA GPU"):
        cuda.require_device(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r'needs triton 3\.4 or newer: pip install "triton>=3\.4"'),
        ("3.3.1", r"triton 3\.3\.1 is too old"),
        ("2.9.0", r"triton 2\.9\.0 is too old"),
    ],
)
def test_a_missing_or_old_triton_is_refused(monkeypatch, found, message) -> None:
    module = None if found is None else SimpleNamespace(__version__=found)
    monkeypatch.setitem(sys.modules, "triton", module)
    with pytest.raises(DeviceError, match=message) as caught:
        cuda.require_triton()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", ["3.4.0", "3.10.0+git1234", "4.0"])
def test_a_new_triton_is_taken(monkeypatch, version) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    assert cuda.require_triton() == version


def test_a_dtype_without_a_schedule_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"^linear: dtype float64 has no CUDA schedule"):
        cuda.kernels("linear", torch.empty(0, dtype=torch.float64))


def test_a_cpu_run_never_imports_triton() -> None:
    script = (
        "import sys, torch; from shared_ops.opset import EXACT; import shared_ops.attest;"
        " EXACT.linear(torch.ones(2, 4), torch.ones(3, 4)); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
