"""The rules of a TextWorld game, read from its JSON file, and the states that they lead through.

A state is a set of facts such as ``("on", "o_0", "s_1")``. A rule has facts that must hold, of
which those without ``$`` are taken away, and facts that it adds; its variables are named after
types (``o``, ``r'``). The file holds rules, types and the wording of commands as text in
TextWorld's own notation. Quests are paid once, when one of their events holds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Fact = tuple[str, ...]  # predicate, ids


class GameFileError(ValueError):
  """A game file that cannot be read; says what is missing."""


class Condition(NamedTuple):
  """A predicate over variables; ``kept`` where applying the rule leaves it."""

  predicate: str
  variables: tuple[str, ...]
  kept: bool


@dataclasses.dataclass(frozen=True)
class Rule:
  """A kind of action.

  Attributes:
    name: such as "take/c".
    needs, adds: conditions before and after it.
    wording: the command, with variables in braces.
  """

  name: str
  needs: tuple[Condition, ...]
  adds: tuple[Condition, ...]
  wording: str


@dataclasses.dataclass(frozen=True)
class Action:
  """A rule whose variables are bound to things."""

  command: str
  takes: frozenset[Fact]
  adds: frozenset[Fact]
  things: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Quest:
  """Points for a state: one of ``events`` holds; lost where one of ``failures`` does."""

  reward: float
  events: tuple[frozenset[Fact], ...]
  failures: tuple[frozenset[Fact], ...]


@dataclasses.dataclass(frozen=True)
class Logic:
  """Types and rules, which all games of one kind share."""

  parents: Mapping[str, str]
  rules: tuple[Rule, ...]

  def is_a(self, kind: str, wanted: str) -> bool:
    """Whether a type is another or below it."""
    while kind != wanted and kind in self.parents:
      kind = self.parents[kind]
    return kind == wanted


@dataclasses.dataclass(frozen=True)
class Game:
  """A game as its file has it.

  Attributes:
    logic: types and rules.
    names, kinds: of things, by id.
    facts: of the first state.
    quests: what is paid.
    goal: the goal in words, as the player reads it.
  """

  logic: Logic
  names: Mapping[str, str]
  kinds: Mapping[str, str]
  facts: frozenset[Fact]
  quests: tuple[Quest, ...]
  goal: str

  def actions(self, facts: frozenset[Fact]) -> dict[str, Action]:
    """What can be done in a state, by command in alphabetical order."""
    known = _by_predicate(facts)
    found: dict[str, Action] = {}
    for rule in self.logic.rules:
      for bound in self._bindings(rule.needs, known, {}):
        command = rule.wording
        for variable, thing in bound.items():
          command = command.replace(f"{{{variable}}}", self.names[thing])
        takes = frozenset(_fact(c, bound) for c in rule.needs if not c.kept)
        adds = frozenset(_fact(c, bound) for c in rule.adds)
        things = frozenset(bound.values())
        # The first of several that read alike, such as those that use another free hand.
        found.setdefault(command, Action(command, takes, adds, things))
    return dict(sorted(found.items()))

  def _bindings(
    self, needs: tuple[Condition, ...], known: Mapping[str, list[Fact]], bound: dict[str, str]
  ) -> Iterator[dict[str, str]]:
    if not needs:
      yield bound
      return
    first, *rest = needs
    for fact in known.get(first.predicate, ()):
      more = self._match(first, fact, bound)
      if more is not None:
        yield from self._bindings(tuple(rest), known, more)

  def _match(
    self, condition: Condition, fact: Fact, bound: dict[str, str]
  ) -> dict[str, str] | None:
    if len(fact) != len(condition.variables) + 1:
      return None
    more = dict(bound)
    for variable, thing in zip(condition.variables, fact[1:], strict=True):
      if variable not in more:
        if not self.logic.is_a(self.kinds[thing], variable.rstrip("'")):
          return None
        more[variable] = thing
      elif more[variable] != thing:
        return None
    return more

  def find_way(self, facts: frozenset[Fact], wanted: frozenset[Fact]) -> list[Action] | None:
    """The fewest actions to a state in which ``wanted`` holds; None where there are none.

    Only what moves the player or is about the things of ``wanted`` is tried.
    """
    things = {thing for fact in wanted for thing in fact[1:]}
    queue: collections.deque[tuple[frozenset[Fact], list[Action]]] = collections.deque()
    queue.append((facts, []))
    seen = {facts}
    while queue:
      state, way = queue.popleft()
      if wanted <= state:
        return way
      for action in self.actions(state).values():
        moved = apply(action, state)
        portable = {t for t in action.things if self.logic.is_a(self.kinds[t], "o")}
        if moved not in seen and portable <= things:
          seen.add(moved)
          queue.append((moved, [*way, action]))
    return None

  def solve(self) -> list[str]:
    """Commands that complete all quests, one after the other.

    Raises:
      GameFileError: a quest has no way.
    """
    facts, commands = self.facts, []
    for i, quest in enumerate(self.quests):
      ways = [self.find_way(facts, event) for event in quest.events]
      known = [way for way in ways if way is not None]
      if not known:
        raise GameFileError(f"quest {i} cannot be completed")
      for action in min(known, key=len):
        facts = apply(action, facts)
        commands.append(action.command)
    return commands


def apply(action: Action, facts: frozenset[Fact]) -> frozenset[Fact]:
  """The state after an action."""
  return (facts - action.takes) | action.adds


def _by_predicate(facts: frozenset[Fact]) -> dict[str, list[Fact]]:
  known: dict[str, list[Fact]] = {}
  for fact in sorted(facts):
    known.setdefault(fact[0], []).append(fact)
  return known


def _fact(condition: Condition, bound: Mapping[str, str]) -> Fact:
  # The player P and the hands I are types of one thing each, whose id is the type's name.
  return (condition.predicate, *(bound.get(v, v) for v in condition.variables))


_CONDITION = re.compile(r"(\$?)\s*([\w/]+)\(([^)]*)\)")


@functools.lru_cache(maxsize=16)
def read_logic(text: str) -> Logic:
  """Types, rules and commands of a game file's logic.

  Rules without a wording are left out: nobody can ask for them.

  Raises:
    GameFileError: no rule has one.
  """
  text = re.sub(r"(?m)^\s*#.*$", "", text)
  parents = {}
  for kind, above in re.findall(r"(?m)^\s*type\s+(\w+)\s*:\s*(\w+)\s*\{", text):
    parents[kind] = above
  wordings: dict[str, str] = {}
  for block in re.findall(r'commands\s*\{((?:[^{}"]|"[^"]*")*)\}', text):
    wordings |= dict(re.findall(r'([\w/]+)\s*::\s*"([^"]*)"', block))
  rules = []
  for block in re.findall(r"(?<![\w])rules\s*\{([^{}]*)\}", text):
    for name, before, after in re.findall(r"([\w/]+)\s*::\s*([^;]*?)->([^;]*);", block):
      if name in wordings:
        rules.append(Rule(name, _conditions(before), _conditions(after), wordings[name]))
  if not rules:
    raise GameFileError("KB.logic has no rules with commands")
  return Logic(parents, tuple(rules))


def _conditions(text: str) -> tuple[Condition, ...]:
  return tuple(
    Condition(name, tuple(v.strip() for v in variables.split(",")), bool(kept))
    for kept, name, variables in _CONDITION.findall(text)
  )


def read_game(values: Mapping[str, Any]) -> Game:
  """A game from the JSON of its file.

  Raises:
    GameFileError: what is missing, or a fact about a thing that the file does not describe.
  """
  try:
    logic = read_logic(values["KB"]["logic"])
    infos = {thing: info for thing, info in values["infos"]}
    facts = _facts(values["world"])
    kinds = {thing: info["type"] for thing, info in infos.items()}
    quests = tuple(
      Quest(
        float(quest["reward"]),
        tuple(_facts(event["condition"]["preconditions"]) for event in quest["win_events"]),
        tuple(_facts(event["condition"]["preconditions"]) for event in quest["fail_events"]),
      )
      for quest in values["quests"]
    )
    goal = values["metadata"].get("goal") or values["objective"]
    names = {thing: info["name"] or thing for thing, info in infos.items()}
    things = {a["name"] for f in values["world"] for a in f["arguments"]}
  except (KeyError, TypeError, AttributeError) as error:
    raise GameFileError(f"no {error} where TextWorld's JSON has it") from error
  unknown = sorted(things - set(kinds))
  if unknown:
    raise GameFileError(f"infos does not describe {', '.join(unknown)}")
  if not quests or not all(quest.events for quest in quests):
    raise GameFileError("quests has none that can be won")
  return Game(logic, names, kinds, facts, quests, goal)


def _facts(propositions: Any) -> frozenset[Fact]:
  return frozenset((p["name"], *(a["name"] for a in p["arguments"])) for p in propositions)
