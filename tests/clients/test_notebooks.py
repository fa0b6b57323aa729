"""The notebooks of examples/notebooks run from start to end."""
import os

import nbformat
import pytest
from nbclient import NotebookClient

from serving import EXAMPLES, environment, free_ports

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(binary, path, tmp_path, monkeypatch):
    ports = {f"DOWNBEAT_{name}_PORT": str(port) for name, port in zip(("HTTP", "GRPC", "METRICS"), free_ports(3))}
    # The notebook's process, and the server that it starts, inherit the environment of this process.
    for name, value in {**environment(tmp_path), **ports, "DOWNBEAT_BIN": str(binary), "MPLBACKEND": "agg"}.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}}).execute()
    printed = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert printed, "a notebook shows something"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []
