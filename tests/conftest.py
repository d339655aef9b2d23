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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """For pytest-xdist: a file stays in one process, for what its tests share; so do all that start
    a Ray cluster, and all that need the GPU. The clusters first: they take longest."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        alone = [name for name in ("gpu", "ray") if item.get_closest_marker(name)]
        item.add_marker(pytest.mark.xdist_group(alone[0] if alone else item.path.name))
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
