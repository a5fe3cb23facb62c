"""Private attributes are private: only the class that has one, and helpers beside it, use it."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_FOREIGN = {  # of libraries, and public there in spite of the name
  *("_replace", "_asdict", "_fields"),
  *("_exit", "_shutdown", "_run_exitfuncs"),
}


def intrusions(source: str) -> Iterator[tuple[int, str]]:
  """(line, expression) of every ``x._y`` outside the class that has a ``_y``.

  Functions of a module may use what the module's own classes have, as ``__eq__`` may use what the
  other operand has.
  """
  tree = ast.parse(source)
  classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
  owned = {node: _names(node) for node in classes}
  for node in tree.body:
    own = owned.get(node) or set().union(*owned.values())
    for use in ast.walk(node):
      private = isinstance(use, ast.Attribute) and use.attr[0] == "_" and use.attr[:2] != "__"
      if not private or use.attr in own | _FOREIGN or _is_own(use.value):
        continue
      yield use.lineno, ast.unparse(use)
    for use in ast.walk(node):
      if isinstance(use, ast.ImportFrom):
        private = [a.name for a in use.names if a.name[0] == "_" and a.name[:2] != "__"]
        yield from ((use.lineno, name) for name in private)


def _is_own(value: ast.expr) -> bool:
  """``self``, ``cls`` or ``super()``."""
  called = value.func if isinstance(value, ast.Call) else value
  return isinstance(called, ast.Name) and called.id in ("self", "cls", "super")


def _names(cls: ast.ClassDef) -> set[str]:
  """What a class defines: methods, fields, slots, and what its methods set on ``self``."""
  found: set[str] = set()
  for node in ast.walk(cls):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      found.add(node.name)
    elif isinstance(node, ast.Attribute) and _is_own(node.value):
      found.add(node.attr)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      found.add(node.target.id)
    elif isinstance(node, ast.Assign):
      found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
  return found


def test_nothing_reaches_into_the_private_attributes_of_another_object():
  files = [p for room in ("agentjax", "pallas_kernels") for p in _ROOT.glob(f"{room}/**/*.py")]
  found = [
    f"{path.relative_to(_ROOT)}:{line} {words}"
    for path in sorted(files)
    for line, words in intrusions(path.read_text())
  ]
  assert not found, "\n".join(found)


@pytest.mark.parametrize(
  ("source", "count"),
  [
    ("class A:\n  def f(self, other):\n    return self._x + other._x", 0),
    ("class A:\n  _x = 1\ndef f(a):\n  return a._x", 0),
    ("class A:\n  def f(self):\n    return self._b._x", 1),
    ("class A:\n  def f(self):\n    self._x = 1\nclass B:\n  def f(self, a):\n    return a._x", 1),
    ("import os\nos._exit(0)\nprint(os._secret)", 1),
    ("from os import _secret", 1),
  ],
)
def test_what_counts(source, count):
  assert len(list(intrusions(source))) == count
