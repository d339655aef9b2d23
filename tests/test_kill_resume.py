"""Behaviour of a run killed with SIGKILL: some places of the matrix of benchmarks.bench_resume."""

import pytest

from benchmarks import bench_resume
from benchmarks.bench_resume import KILLS, compare, outcome

CHOSEN = (
    "inside an optimiser step",
    pytest.param("evaluation, before its line", marks=pytest.mark.slow),
    pytest.param("while an old checkpoint goes", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("kills")
    bench_resume.write_data(scratch / "data")
    return scratch, bench_resume.reference_run(scratch)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_killed_run_ends_as_one_left_alone(name, left_alone):
    scratch, wanted = left_alone
    (kill,) = [kill for kill in KILLS if kill.name == name]
    assert compare(scratch, kill, wanted, name.replace(" ", "_")) == []


def test_every_target_is_there_on_either_device():
    """A GPU's kernels are looked for in the source: their modules need triton."""
    for kill in KILLS:
        for device in ("cpu", "cuda"):
            module, _, path = kill.on(device).target.partition(":")
            name = path.split(".")[-1]
            source = bench_resume.PROJECT / f"{module.replace('.', '/')}.py"
            assert name in source.read_text(), path
    assert KILLS[7].on("cuda").target == "shared_ops.logprob.kernels:token_logprobs_backward"


def test_the_comparison_sees_one_bit_of_the_weights(left_alone):
    scratch, wanted = left_alone
    checkpoint = max((scratch / "reference/checkpoints").glob("step-*"))
    digests = checkpoint / "digests.json"
    whole = digests.read_text()
    digests.write_text(whole.replace(wanted["last checkpoint"]["model.safetensors"], "0" * 64))
    assert outcome(scratch / "reference") != wanted
    digests.write_text(whole)
    assert outcome(scratch / "reference") == wanted
