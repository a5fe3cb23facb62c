"""Small faults put into Python source: one node of the syntax tree is changed, its text replaced.

The rest of the text stays as it is, comments and blanks included. The operators are the customary
ones of mutation testing (DeMillo, Lipton and Sayward, 1978).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Iterator, Sequence

OPERATORS = ("comparison", "arithmetic", "logic", "constant", "branch", "call", "loop")

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
  ast.Lt: (ast.LtE, ast.Gt),
  ast.LtE: (ast.Lt,),
  ast.Gt: (ast.GtE, ast.Lt),
  ast.GtE: (ast.Gt,),
  ast.Eq: (ast.NotEq,),
  ast.NotEq: (ast.Eq,),
  ast.In: (ast.NotIn,),
  ast.NotIn: (ast.In,),
  ast.Is: (ast.IsNot,),
  ast.IsNot: (ast.Is,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.Add,
  ast.FloorDiv: ast.Mult,
  ast.Div: ast.Mult,
  ast.Mod: ast.FloorDiv,
}
_CHANGED = (
  ast.Compare, ast.BinOp, ast.AugAssign, ast.BoolOp, ast.UnaryOp, ast.Constant, ast.IfExp, ast.Name,
  ast.Attribute,
)  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "find": "rfind", "rfind": "find"}


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One fault.

  Attributes:
    operator: one of OPERATORS.
    line: of the fault, from 1.
    source: the whole text with it.
  """

  operator: str
  line: int
  source: str


def mutations(source: str, operators: tuple[str, ...] = OPERATORS) -> list[Mutation]:
  """Every fault that some operator puts into ``source``, by place; all of them parse."""
  tree = ast.parse(source)
  documentation = {
    id(node.body[0].value)
    for node in ast.walk(tree)
    if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
    and node.body
    and isinstance(node.body[0], ast.Expr)
  }
  raw = source.encode()
  starts = [0]
  for line in source.splitlines(keepends=True):
    starts.append(starts[-1] + len(line.encode()))
  found = []
  for place in list(_places(tree)):
    node = place.get()
    if id(node) in documentation:
      continue
    for operator, changed in _changes(node):
      if operator not in operators:
        continue
      text = _replaced(raw, starts, tree, place, changed)
      if text is not None:
        found.append(Mutation(operator, node.lineno, text))  # type: ignore[attr-defined]
  return sorted(found, key=lambda m: (m.line, m.operator, m.source))


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
  """The node with a fault, each time anew."""
  twin = copy.deepcopy(node) if isinstance(node, _CHANGED) else node
  if isinstance(twin, ast.Compare) and len(twin.ops) == 1:
    for other in _COMPARISONS.get(type(twin.ops[0]), ()):
      yield (
        "comparison",
        ast.copy_location(ast.Compare(twin.left, [other()], twin.comparators), node),
      )
  elif isinstance(twin, ast.BinOp) and type(twin.op) in _ARITHMETIC:
    yield "arithmetic", ast.BinOp(twin.left, _ARITHMETIC[type(twin.op)](), twin.right)
  elif isinstance(twin, ast.AugAssign) and type(twin.op) in _ARITHMETIC:
    yield "arithmetic", ast.AugAssign(twin.target, _ARITHMETIC[type(twin.op)](), twin.value)
  elif isinstance(twin, ast.BoolOp):
    other_op = ast.Or() if isinstance(twin.op, ast.And) else ast.And()
    yield "logic", ast.BoolOp(other_op, twin.values)
  elif isinstance(twin, ast.UnaryOp) and isinstance(twin.op, ast.Not):
    yield "logic", twin.operand
  elif isinstance(twin, ast.Constant) and isinstance(twin.value, bool):
    yield "constant", ast.Constant(not twin.value)
  elif isinstance(twin, ast.Constant) and isinstance(twin.value, int):
    yield "constant", ast.Constant(twin.value + 1)
    if twin.value > 0:
      yield "constant", ast.Constant(twin.value - 1)
  elif isinstance(twin, ast.IfExp):
    yield "branch", ast.IfExp(twin.test, twin.orelse, twin.body)
  elif isinstance(twin, ast.Name) and twin.id in _CALLS and isinstance(twin.ctx, ast.Load):
    yield "call", ast.Name(_CALLS[twin.id], twin.ctx)
  elif isinstance(twin, ast.Attribute) and twin.attr in _CALLS:
    yield "call", ast.Attribute(twin.value, _CALLS[twin.attr], twin.ctx)
  elif isinstance(twin, ast.Continue):
    yield "loop", ast.Break()
  elif isinstance(twin, ast.Break):
    yield "loop", ast.Continue()


def _replaced(
  raw: bytes, starts: Sequence[int], tree: ast.Module, place: _Place, changed: ast.AST
) -> str | None:
  """The source with the text of a node replaced; None where its place in the text is not known."""
  node = place.get()
  place.set(changed)
  wanted = ast.dump(tree)
  place.set(node)
  start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
  end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
  text = ast.unparse(ast.fix_missing_locations(changed))
  for form in (text, f"({text})"):
    candidate = (raw[:start] + form.encode() + raw[end:]).decode("utf-8", "replace")
    try:
      parsed = ast.parse(candidate)
    except SyntaxError:
      continue
    if ast.dump(parsed) == wanted:
      return candidate
  return None  # within an f-string, whose parts Python 3.11 gives no true places


@dataclasses.dataclass(frozen=True)
class _Place:
  """Where a node hangs in the tree."""

  parent: ast.AST
  field: str
  index: int | None

  def get(self) -> ast.AST:
    value = getattr(self.parent, self.field)
    return value if self.index is None else value[self.index]

  def set(self, node: ast.AST) -> None:
    if self.index is None:
      setattr(self.parent, self.field, node)
    else:
      getattr(self.parent, self.field)[self.index] = node


def _places(tree: ast.Module) -> Iterator[_Place]:
  for parent in ast.walk(tree):
    for field, value in ast.iter_fields(parent):
      if isinstance(value, ast.AST):
        yield _Place(parent, field, None)
      elif isinstance(value, list):
        for index, item in enumerate(value):
          if isinstance(item, ast.AST):
            yield _Place(parent, field, index)
