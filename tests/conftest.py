"""One torch thread unless a test asks for more: toy ops are too short to share.

Set before torch is imported, so that processes which tests start inherit it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import tally
from hypothesis import settings

settings.register_profile("thorough", max_examples=1000)
settings.register_profile("short", max_examples=40)


@pytest.fixture
def reordered():
    """Torch's own ops with sums whose order follows from the batch, for controls."""
    from reordered import reordered_ops

    with reordered_ops():
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """No more than eight, for their memory; one where the tests of a GPU share it."""
    gpu = os.path.exists("/dev/nvidia0") or os.path.exists("/proc/driver/nvidia/version")
    if hasattr(os, "sched_getaffinity"):
        return 1 if gpu else min(8, len(os.sched_getaffinity(0)))
    return min(8, os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file stays in one process, for what its tests share; all Ray clusters stay in one too."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.partition("::")[0].rpartition("/")[2]
            return "ray" if name.startswith("test_ray_") else name

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    """The Ray clusters first: of what stays in one process they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


def pytest_sessionfinish(session):
    """A worker of pytest-xdist sends what it compared with its other results."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["bits"] = tuple(tally.total())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    tally.add(*getattr(node, "workeroutput", {}).get("bits", tally.Tally()))


def pytest_terminal_summary(terminalreporter):
    if tally.total().compared:
        terminalreporter.write_line(str(tally.total()))
