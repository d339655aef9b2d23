"""Run the notebooks from top to bottom: `python -m notebooks.execute` writes the outputs back.

Needs nbclient, nbformat and ipykernel (`pip install -e .[dev]`).
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
CELL_SECONDS = 300
# tqdm asks for widgets that nothing here shows, with a path of this machine in its text.
QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found"}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebooks() -> list[Path]:
    """Every notebook, in the order of their numbers."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run in a kernel of its own, in the project's root.

    Nothing that changes from run to run is kept: no times, versions or machine.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; it holds the traceback.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER.parent)}},
    )
    client.execute(env=os.environ | QUIET)
    notebook.metadata = nbformat.from_dict(METADATA)
    for index, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{index}", {}
    return notebook


def main(names: Sequence[str]) -> int:
    import nbformat

    chosen = [path for path in notebooks() if not names or path.name.startswith(tuple(names))]
    for path in chosen:
        notebook = executed(path)
        nbformat.validate(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1000:,.0f} kB")
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
