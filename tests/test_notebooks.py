"""Behaviour of the notebooks: each runs from top to bottom and asserts what it says.

What the committed files hold is looked at as well: a reader sees it without running anything.
"""

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from notebooks.execute import executed, notebooks

NAMES = [path.name for path in notebooks()]
LARGEST = 400_000
# They train for most of their time, as the tests of the recipe do.
SLOW = ("2_", "3_")


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook) -> list:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def committed(name: str):
    (path,) = (path for path in notebooks() if path.name == name)
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * n.startswith(SLOW)) for n in NAMES],
)
def test_a_notebook_runs_and_what_it_asserts_holds(name):
    (path,) = (path for path in notebooks() if path.name == name)
    notebook = executed(path)
    assert sum(cell.source.count("assert ") for cell in code_cells(notebook)) >= 5
    assert [cell.execution_count for cell in code_cells(notebook)] == list(
        range(1, len(code_cells(notebook)) + 1)
    )
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_can_be_read_without_running_it(name):
    notebook = committed(name)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run `make notebooks`"
    kinds = [output.output_type for output in outputs(notebook)]
    assert kinds.count("display_data") >= 1 and kinds.count("stream") >= 3
    assert "error" not in kinds
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    (path,) = (path for path in notebooks() if path.name == name)
    assert path.stat().st_size < LARGEST


def test_a_notebook_whose_claim_does_not_hold_fails(tmp_path):
    path = tmp_path / "wrong.ipynb"
    cells = [nbformat.v4.new_code_cell("assert 0.1 + 0.2 == 0.3")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(CellExecutionError, match="AssertionError"):
        executed(path)


def test_there_are_notebooks():
    assert len(NAMES) >= 3
