"""The rule language: what a rule consists of, and its parser.

The grammar is that of AgentSpec (2503.18666) with comments and four additions of ours: predicates
take strings as well as numbers and any number of both, may be named ``module:function``, and
``true`` and ``false`` are values::

    program     := rule*
    rule        := "rule" "@" ID "trigger" ID "check" predicate+ "enforce" enforcement+ "end"
    predicate   := "true" | "false" | "!" predicate | name ("(" literal ("," literal)* ")")?
    name        := ID (":" ID)?
    literal     := STRING | NUMBER
    enforcement := "user_inspection" | "llm_self_reflect" | "stop" | "skip" | "none"
                 | invocation | ID ":" ID ":" ID "=" NUMBER
    invocation  := "invoke_action" "(" ID "," "{" (pair ("," pair)*)? "}" ")"
    pair        := STRING ":" value
    value       := STRING | NUMBER | "true" | "false" | invocation | ID ("[" STRING "]")?

    ID      := a letter or "_", then letters, digits, "_", "." and "-"
    NUMBER  := an optional "-", digits, an optional fraction, an optional exponent
    STRING  := a JSON string
    comment := "//" to the end of the line

Words of the language are not reserved: ``true``, ``false`` and ``enforce`` are keywords only in the
place of a predicate.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from agentjax.config import ConfigError
from agentjax.rollout.guards.interface import EVENTS

T = TypeVar("T")

ACTIONS = ("user_inspection", "llm_self_reflect", "stop", "skip", "none")
TRIGGERS = (*EVENTS, "any")


@dataclasses.dataclass(frozen=True, order=True)
class Position:
  """A place in the text; both count from 1."""

  line: int
  column: int


def _position() -> Position:
  """Where a rule was read; ignored when rules are compared."""
  return dataclasses.field(default=Position(1, 1), compare=False, repr=False, kw_only=True)


class RuleError(ConfigError):
  """Rules that cannot be used: what is wrong, and where.

  Attributes:
    problems: (position, what is wrong), in the order of the text.
  """

  def __init__(
    self, problems: Sequence[tuple[Position, str]], *, source: str = "rules", text: str = ""
  ):
    self.problems = tuple(sorted(problems, key=lambda problem: problem[0]))
    lines = text.split("\n")
    shown = []
    for position, message in self.problems:
      shown.append(f"{source}:{position.line}:{position.column}: {message}")
      if text and position.line <= len(lines):
        line = lines[position.line - 1].replace("\t", " ")
        shown += [f"  {line}", "  " + " " * (position.column - 1) + "^"]
    super().__init__("\n".join(shown))


@dataclasses.dataclass(frozen=True)
class Constant:
  """``true`` or ``false``."""

  value: bool
  position: Position = _position()


@dataclasses.dataclass(frozen=True)
class Not:
  """``!`` predicate."""

  predicate: Predicate
  position: Position = _position()


@dataclasses.dataclass(frozen=True)
class Test:
  """A registered predicate, or one that is named by its module."""

  __test__ = False  # not one of pytest's

  name: str
  arguments: tuple[str | int | float, ...] = ()
  position: Position = _position()


Predicate = Constant | Not | Test


@dataclasses.dataclass(frozen=True)
class Variable:
  """``user_input``, ``tool_input["path"]``: something of the situation the rule is about."""

  name: str
  key: str | None = None
  position: Position = _position()


@dataclasses.dataclass(frozen=True)
class Invocation:
  """Runs a tool; as a value it is what the tool put out."""

  tool: str
  arguments: tuple[tuple[str, Value], ...] = ()
  position: Position = _position()


Value = str | int | float | bool | Variable | Invocation


@dataclasses.dataclass(frozen=True)
class Act:
  """An enforcement that is one of ``ACTIONS``."""

  action: str
  position: Position = _position()


@dataclasses.dataclass(frozen=True)
class Setting:
  """``scope:component:name=number``."""

  scope: str
  component: str
  name: str
  number: int | float
  position: Position = _position()


Enforcement = Act | Invocation | Setting


@dataclasses.dataclass(frozen=True)
class Rule:
  """If ``trigger`` fits and all predicates hold, all enforcements are carried out."""

  name: str
  trigger: str
  predicates: tuple[Predicate, ...]
  enforcements: tuple[Enforcement, ...]
  position: Position = _position()
  trigger_position: Position = _position()


def parse_rules(text: str, source: str = "rules") -> tuple[Rule, ...]:
  """The rules of ``text`` in its order.

  Args:
    text: as the module's grammar says.
    source: what messages call the text, such as the name of its file.

  Raises:
    RuleError: with the position, what was found there and what may stand there.
  """
  try:
    return _Parser(text, source).program()
  except RecursionError as error:
    raise RuleError([(Position(1, 1), "rules are nested too deeply")], source=source) from error


_TOKEN = re.compile(
  r"""
    (?P<blank>\s+|//[^\n]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<number>-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
  | (?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
  | (?P<mark>[@!():,{}\[\]=])
  """,
  re.VERBOSE,
)


@dataclasses.dataclass(frozen=True)
class _Token:
  kind: str  # "string" | "number" | "name" | "mark" | "end"
  text: str
  position: Position

  def __str__(self) -> str:
    return "the end of the text" if self.kind == "end" else repr(self.text)


class _Parser:
  """Recursive descent; one token decides what comes next."""

  def __init__(self, text: str, source: str):
    self._text, self._source = text, source
    self._tokens = self._split()
    self._next = 0

  def program(self) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    names: set[str] = set()
    while self._peek.kind != "end":
      rule = self._rule()
      if rule.name in names:
        self._fail(rule.position, f"two rules are named @{rule.name}; names must be distinct")
      names.add(rule.name)
      rules.append(rule)
    return tuple(rules)

  def _rule(self) -> Rule:
    position = self._take_text("rule").position
    self._take_text("@")
    name = self._take("name", "the rule's name").text
    self._take_text("trigger")
    trigger = self._take("name", "a tool's name", *TRIGGERS)
    self._take_text("check")
    predicates = [self._predicate()]
    while self._peek.text != "enforce":
      predicates.append(self._predicate("'enforce'"))
    self._take_text("enforce")
    enforcements = [self._enforcement()]
    while not self._at_end():
      enforcements.append(self._enforcement("'end'"))
    self._take_text("end")
    return Rule(
      name,
      trigger.text,
      tuple(predicates),
      tuple(enforcements),
      position=position,
      trigger_position=trigger.position,
    )

  def _at_end(self) -> bool:
    """Whether ``end`` closes the rule, rather than being the first word of a setting."""
    return self._peek.text == "end" and self._tokens[self._next + 1].text != ":"

  def _predicate(self, *other: str) -> Predicate:
    token = self._peek
    position = token.position
    if token.text == "!":
      self._next += 1
      return Not(self._predicate(), position=position)
    if token.text == "enforce":
      self._expected("a predicate", "'true'", "'false'", "'!'")
    name = self._take("name", "a predicate", "'true'", "'false'", "'!'", *other).text
    if name in ("true", "false"):
      return Constant(name == "true", position=position)
    if self._skip(":"):
      name += ":" + self._take("name", "the function of that module").text
    arguments: tuple[str | int | float, ...] = ()
    if self._skip("("):
      arguments = self._list(self._literal, ")")
    return Test(name, arguments, position=position)

  def _literal(self) -> str | int | float:
    if self._peek.kind == "string":
      return self._string()
    return self._number("a string", "a number")

  def _enforcement(self, *other: str) -> Enforcement:
    position = self._peek.position
    word = self._take("name", *ACTIONS, "invoke_action", "scope:component:name=number", *other).text
    if self._skip(":"):
      component = self._take("name", "a component").text
      self._take_text(":")
      name = self._take("name", "the name of a setting").text
      self._take_text("=")
      return Setting(word, component, name, self._number("a number"), position=position)
    if word == "invoke_action":
      return self._invocation(position)
    if word not in ACTIONS:
      self._next -= 1
      self._expected(*ACTIONS, "invoke_action", "scope:component:name=number", *other)
    return Act(word, position=position)

  def _invocation(self, position: Position) -> Invocation:
    self._take_text("(")
    tool = self._take("name", "the name of a tool").text
    self._take_text(",")
    self._take_text("{")
    pairs: tuple[tuple[str, Value], ...] = ()
    if not self._skip("}"):
      pairs = self._list(self._pair, "}")
    self._take_text(")")
    return Invocation(tool, pairs, position=position)

  def _pair(self) -> tuple[str, Value]:
    if self._peek.kind != "string":
      self._expected("an argument's name in quotes")
    key = self._string()
    self._take_text(":")
    return key, self._value()

  def _value(self) -> Value:
    token = self._peek
    if token.kind == "string":
      return self._string()
    if token.kind == "number":
      return self._number()
    name = self._take("name", "a string", "a number", "'true'", "'false'", "a variable").text
    if name in ("true", "false"):
      return name == "true"
    if name == "invoke_action" and self._peek.text == "(":
      return self._invocation(token.position)
    key = None
    if self._skip("["):
      if self._peek.kind != "string":
        self._expected("a key in quotes")
      key = self._string()
      self._take_text("]")
    return Variable(name, key, position=token.position)

  def _list(self, item: Callable[[], T], closing: str) -> tuple[T, ...]:
    """Items with commas between them, and what closes the list."""
    items = [item()]
    while self._skip(","):
      items.append(item())
    if not self._skip(closing):
      self._expected("','", f"'{closing}'")
    return tuple(items)

  def _string(self) -> str:
    token = self._tokens[self._next]
    self._next += 1
    try:
      return json.loads(token.text)
    except json.JSONDecodeError as error:
      self._fail(token.position, f"{token.text} is no JSON string: {error.msg}")

  def _number(self, *expected: str) -> int | float:
    text = self._take("number", *expected).text
    return int(text) if text.lstrip("-").isdigit() else float(text)

  @property
  def _peek(self) -> _Token:
    return self._tokens[self._next]

  def _skip(self, mark: str) -> bool:
    """Whether ``mark`` stood there; then it has been read."""
    found = self._peek.kind == "mark" and self._peek.text == mark
    self._next += found
    return found

  def _take(self, kind: str, *expected: str) -> _Token:
    if self._peek.kind != kind:
      self._expected(*expected)
    self._next += 1
    return self._tokens[self._next - 1]

  def _take_text(self, text: str) -> _Token:
    if self._peek.text != text:
      self._expected(repr(text))
    self._next += 1
    return self._tokens[self._next - 1]

  def _expected(self, *expected: str) -> NoReturn:
    token = self._peek
    options = ", ".join(expected[:-1]) + (" or " if expected[1:] else "") + expected[-1]
    self._fail(token.position, f"expected {options}, got {token}")

  def _fail(self, position: Position, message: str) -> NoReturn:
    raise RuleError([(position, message)], source=self._source, text=self._text)

  def _split(self) -> list[_Token]:
    tokens, place, line, start = [], 0, 1, 0
    while place < len(self._text):
      position = Position(line, place - start + 1)
      match = _TOKEN.match(self._text, place)
      if match is None:
        if self._text[place] == '"':
          self._fail(position, "a string that is not closed on its line")
        self._fail(position, f"unexpected character {self._text[place]!r}")
      assert match.lastgroup is not None
      if match.lastgroup != "blank":
        tokens.append(_Token(match.lastgroup, match.group(), position))
      if newlines := match.group().count("\n"):
        line += newlines
        start = match.start() + match.group().rindex("\n") + 1
      place = match.end()
    return [*tokens, _Token("end", "", Position(line, place - start + 1))]
