"""Notebooks run from the first cell to the last."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
  "notebook", sorted((_ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem
)
def test_notebook_runs(notebook, tmp_path, monkeypatch):
  monkeypatch.setenv("QUICKSTART_SCALE", "0.01")
  monkeypatch.setenv("QUICKSTART_WORKDIR", str(tmp_path / "run"))
  monkeypatch.setenv("CUSTOM_LOSS_FOLDER", str(tmp_path))
  monkeypatch.setenv("KV_PACKETS_FOLDER", str(tmp_path))
  book = nbformat.read(notebook, as_version=4)
  client = NotebookClient(
    book, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(_ROOT)}}
  )
  client.execute()
  assert (tmp_path / "run" / "metrics.jsonl").exists()
  assert any("image/png" in o.get("data", {}) for c in book.cells for o in c.get("outputs", []))
