"""The notebook in examples/ runs as it stands, in a kernel as a reader would run it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "token_dropping.ipynb"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    node: nbformat.NotebookNode = nbformat.read(  # type: ignore[no-untyped-call]
        NOTEBOOK, as_version=4
    )
    return node


def test_no_outputs_are_committed(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


def test_the_notebook_runs(notebook: nbformat.NotebookNode, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "IPYTHONDIR": str(tmp_path / "ipython"),  # not the user's settings and history
        "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
    }
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=environment)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "1024 of 1028 tokens are cached" in printed
    assert "unedited        0.00  KL  0.000  agree 100%" in printed
