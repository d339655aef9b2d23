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
