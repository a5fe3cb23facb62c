"""Benchmarks run as scripts: ``python benchmarks/NAME.py``."""

import ast
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_finds_its_neighbours(path):
  modules = {
    name
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Import | ast.ImportFrom)
    for name in (
      [node.module or ""] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
    )
  }
  # A script has its own folder on the path, not the one above.
  assert not {name for name in modules if name.partition(".")[0] == "benchmarks"}
