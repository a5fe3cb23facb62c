"""Prints how large the code is: lines by room, the longest functions, and a config's settings.

  python -m tests.size

A line of code has more on it than a comment; docstrings are not counted. The core is `agentjax`
without `recipes`, `worlds` and `adapters`.
"""

from __future__ import annotations

import ast
import collections
import io
import json
import pathlib
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from agentjax.training.experiment import write_experiment
from configs import quickstart

_ROOT = pathlib.Path(__file__).parents[1]
_OUTSIDE_CORE = ("recipes", "worlds", "adapters")
_LONG = 80  # lines of a function, with its docstring
_SILENT = {
  tokenize.COMMENT,
  tokenize.NL,
  tokenize.NEWLINE,
  tokenize.INDENT,
  tokenize.DEDENT,
  tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
  """Lines with code on them."""
  lines = set()
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type not in _SILENT:
      lines |= set(range(token.start[0], token.end[0] + 1))
  for node in ast.walk(ast.parse(source)):
    if (
      isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
      and ast.get_docstring(node, clean=False) is not None
    ):
      docstring = node.body[0]
      lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
  return len(lines)


def long_functions(source: str) -> Iterator[tuple[int, str]]:
  """(lines, name) of the functions that are longer than they should be."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      lines = (node.end_lineno or node.lineno) - node.lineno + 1
      if lines > _LONG:
        yield lines, node.name


def num_leaves(value: Any) -> int:
  """Settings of a config as JSON: each number, word, None and empty list is one."""
  if isinstance(value, Mapping):
    return sum(map(num_leaves, value.values()))
  if isinstance(value, list | tuple) and value:
    return sum(map(num_leaves, value))
  return 1


def main() -> None:
  """Prints the tables."""
  rooms: collections.Counter[str] = collections.Counter()
  long = []
  for path in sorted(_ROOT.glob("agentjax/**/*.py")):
    source, parts = path.read_text(), path.relative_to(_ROOT / "agentjax").parts
    rooms[parts[0] if len(parts) > 1 else "(commands)"] += code_lines(source)
    long += [(n, f"{path.relative_to(_ROOT)}:{name}") for n, name in long_functions(source)]
  console = Console(highlight=False)
  table = Table("room", "code lines", box=None)
  for room, lines in rooms.most_common():
    table.add_row(room, f"{lines:,}")
  table.add_row("core", f"{sum(n for r, n in rooms.items() if r not in _OUTSIDE_CORE):,}")
  table.add_row("package", f"{rooms.total():,}")
  console.print(table)
  console.print(f"functions above {_LONG} lines: {len(long)}")
  for lines, name in sorted(long, reverse=True):
    console.print(f"  {lines} {name}", soft_wrap=True)
  saved = write_experiment(quickstart.get_config())
  size, settings = len(saved) / 1000, num_leaves(json.loads(saved))
  console.print(f"config of the quickstart: {settings:,} settings, {size:.1f} kB")


if __name__ == "__main__":
  main()
