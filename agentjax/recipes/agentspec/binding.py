"""Binds rules to the tools and predicates of a run, and finds all errors in them.

``agentspec.episode`` carries the rules out.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np

from agentjax.config import ConfigError
from agentjax.names import load
from agentjax.recipes.agentspec.predicates import PREDICATES
from agentjax.recipes.agentspec.syntax import (
  TRIGGERS,
  Constant,
  Invocation,
  Not,
  Position,
  Predicate,
  Rule,
  RuleError,
  Setting,
  Test,
  Variable,
)
from agentjax.rollout.guards.interface import EVENTS, Situation

VARIABLES: Mapping[str, Callable[[Situation], Any]] = {
  "user_input": lambda s: s.user_input,
  "tool_name": lambda s: s.tool_name,
  "tool_input": lambda s: dict(s.tool_input),
  "observation": lambda s: s.observation,
  "turn": lambda s: s.turn,
}
SETTINGS = {"timeout": "seconds > 0", "calls": "an integer >= 0"}  # of the scope "tool"

_Check = Callable[[Situation], bool]


@dataclasses.dataclass(frozen=True)
class BoundRule:
  """A rule whose predicates are functions."""

  rule: Rule
  checks: tuple[_Check, ...]

  @functools.cached_property
  def phrase(self) -> str:
    """The beginning of an input that triggers the rule."""
    return self.rule.trigger.replace("_", " ")

  def holds(self, situation: Situation) -> bool:
    """Whether all predicates hold; stops at the first that does not.

    Raises:
      Exception: whatever a predicate raises.
      TypeError: one answered something else than True or False.
    """
    return all(check(situation) for check in self.checks)


class RuleSet:
  """The rules of a run, in their order."""

  def __init__(self, rules: Sequence[BoundRule]):
    self.rules = tuple(rules)
    self._by_event = {
      event: [r for r in rules if r.rule.trigger in (event, "any")] for event in EVENTS
    }
    # Tools and phrases trigger before the action.
    self._by_event["before_action"] = [
      r
      for r in rules
      if r.rule.trigger not in TRIGGERS or r.rule.trigger in ("before_action", "any")
    ]

  def __bool__(self) -> bool:
    return bool(self.rules)

  def listens_to(self, event: str) -> bool:
    """Whether a rule might be triggered by ``event``."""
    return bool(self._by_event[event])

  def triggered(self, situation: Situation) -> Iterator[BoundRule]:
    """Rules that this event triggers: by its name, the tool's name, or the beginning of an
    input."""
    for bound in self._by_event[situation.event]:
      trigger = bound.rule.trigger
      if trigger in TRIGGERS or trigger == situation.tool_name:
        yield bound
      elif any(text.lstrip().startswith(bound.phrase) for text in situation.texts):
        yield bound


def bind_rules(
  rules: Sequence[Rule],
  *,
  tools: Mapping[str, Mapping[str, Any]],
  triggers: Collection[str] = (),
  source: str = "rules",
  text: str = "",
) -> RuleSet:
  """Checks rules against what a run has, and binds them to it.

  Args:
    rules: of ``parse_rules``.
    tools: parameters (JSON schema) by tool name.
    triggers: further names that may trigger a rule: tools that environments bring along, beginnings
      of inputs.
    source, text: what the rules were read from, for messages.

  Raises:
    RuleError: all that is wrong: unknown events, predicates, tools, variables and settings;
      arguments of a wrong number or type.
  """
  binder = _Binder(tools, triggers)
  bound = [binder.rule(rule) for rule in rules]
  if binder.problems:
    raise RuleError(binder.problems, source=source, text=text)
  return RuleSet(bound)


class _Binder:
  def __init__(self, tools: Mapping[str, Mapping[str, Any]], triggers: Collection[str]):
    self._tools = tools
    self._triggers = [*TRIGGERS, *tools, *triggers]
    self.problems: list[tuple[Position, str]] = []

  def rule(self, rule: Rule) -> BoundRule:
    if rule.trigger not in self._triggers:
      self._unknown(
        rule.trigger_position,
        "trigger",
        rule.trigger,
        self._triggers,
        "; name tools that environments bring and beginnings of inputs in guards.rules.triggers",
      )
    for enforcement in rule.enforcements:
      if isinstance(enforcement, Invocation):
        self._invocation(enforcement)
      elif isinstance(enforcement, Setting):
        self._setting(enforcement)
    return BoundRule(rule, tuple(self._predicate(p) for p in rule.predicates))

  def _unknown(
    self, position: Position, what: str, got: str, known: Collection[str], more: str = ""
  ) -> None:
    close = difflib.get_close_matches(got, known, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    allowed = ", ".join(known) or "none"
    self.problems.append((position, f"unknown {what} {got!r}{hint}; allowed: {allowed}{more}"))

  def _predicate(self, predicate: Predicate) -> _Check:
    if isinstance(predicate, Constant):
      value = predicate.value
      return lambda situation: value
    if isinstance(predicate, Not):
      check = self._predicate(predicate.predicate)
      return lambda situation: not check(situation)
    function = self._function(predicate)
    if function is None:
      return lambda situation: False  # never asked: there are problems
    arguments = self._arguments(predicate, function)
    name = predicate.name

    def ask(situation: Situation) -> bool:
      answer = function(situation, *arguments)
      if not isinstance(answer, bool | np.bool_):
        raise TypeError(f"{name} answered {answer!r} instead of True or False")
      return bool(answer)

    return ask

  def _function(self, test: Test) -> Callable[..., Any] | None:
    if ":" in test.name:
      try:
        found = load(test.name, "predicate", "a function")
      except ConfigError as error:
        self.problems.append((test.position, str(error)))
        return None
      if not callable(found) or inspect.iscoroutinefunction(found):
        self.problems.append((test.position, f"{test.name} is no function, or an async one"))
        return None
      return found
    if test.name not in PREDICATES:
      self._unknown(
        test.position, "predicate", test.name, sorted(PREDICATES), ", or module:function"
      )
    return PREDICATES.get(test.name)

  def _arguments(self, test: Test, function: Callable[..., Any]) -> tuple[Any, ...]:
    """The literals as the function's annotations want them."""
    try:
      signature = inspect.signature(function)
      hints = typing.get_type_hints(function)
      bound = signature.bind(None, *test.arguments)
    except (TypeError, ValueError, NameError) as error:
      wanted = ", ".join(str(p) for p in list(inspect.signature(function).parameters.values())[1:])
      self.problems.append((test.position, f"{test.name} takes ({wanted}): {error}"))
      return ()
    converted = []
    names = list(bound.arguments)[1:]
    starred = signature.parameters[names[-1]] if names else None
    if starred is not None and starred.kind is inspect.Parameter.VAR_POSITIONAL:
      names += names[-1:] * (len(test.arguments) - len(names))
    for name, literal in zip(names, test.arguments, strict=True):
      try:
        converted.append(_convert(literal, hints.get(name, Any)))
      except ValueError as error:
        self.problems.append((test.position, f"{test.name}: {name}={literal!r}; allowed: {error}"))
    return tuple(converted)

  def _invocation(self, invocation: Invocation) -> None:
    schema = self._tools.get(invocation.tool)
    if schema is None:
      self._unknown(invocation.position, "tool", invocation.tool, list(self._tools))
    keys = [key for key, _ in invocation.arguments]
    if repeated := {key for key in keys if keys.count(key) > 1}:
      self.problems.append(
        (invocation.position, f"argument {min(repeated)!r} of {invocation.tool} is given twice")
      )
    instance: dict[str, Any] = {}
    open_keys = set()  # known at run time only
    for key, value in invocation.arguments:
      if isinstance(value, Variable | Invocation):
        open_keys.add(key)
        instance[key] = None
        self._value(value)
      else:
        instance[key] = value
    if schema is not None:
      for error in jsonschema.Draft202012Validator(schema).iter_errors(instance):
        if not error.absolute_path or error.absolute_path[0] not in open_keys:
          where = error.json_path.removeprefix("$").removeprefix(".")
          shown = f"{where}: {error.message}" if where else error.message
          self.problems.append(
            (invocation.position, f"invalid arguments of {invocation.tool}: {shown}")
          )

  def _value(self, value: Variable | Invocation) -> None:
    if isinstance(value, Invocation):
      self._invocation(value)
    elif value.name not in VARIABLES:
      self._unknown(value.position, "variable", value.name, list(VARIABLES))
    elif value.key is not None and value.name != "tool_input":
      self.problems.append((value.position, f"{value.name} has no keys; tool_input has"))

  def _setting(self, setting: Setting) -> None:
    if setting.scope != "tool":
      self._unknown(setting.position, "scope", setting.scope, ["tool"])
    elif setting.component not in (known := [t for t in self._triggers if t not in TRIGGERS]):
      self._unknown(setting.position, "tool", setting.component, known)
    elif setting.name not in SETTINGS:
      self._unknown(setting.position, "setting", setting.name, list(SETTINGS))
    elif setting.number < 0 or (
      not setting.number if setting.name == "timeout" else not isinstance(setting.number, int)
    ):
      self.problems.append(
        (
          setting.position,
          f"{setting.name}={setting.number!r}; allowed: {SETTINGS[setting.name]}",
        )
      )


def _convert(literal: str | int | float, hint: Any) -> Any:
  """``literal`` for a parameter; ValueError says what is allowed there."""
  if re.Pattern in (hint, typing.get_origin(hint)):
    if not isinstance(literal, str):
      raise ValueError("a regular expression in quotes")
    try:
      return re.compile(literal)
    except re.error as error:
      raise ValueError(f"a regular expression ({error})") from error
  wanted: Mapping[Any, tuple[str, tuple[type, ...]]] = {
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
    str: ("a string", (str,)),
  }
  if hint in wanted and not isinstance(literal, wanted[hint][1]):
    raise ValueError(wanted[hint][0])
  return literal
