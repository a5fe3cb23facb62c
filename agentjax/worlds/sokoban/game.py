"""Sokoban: push boxes onto targets. Rules, a solver, levels made from a seed or read from files."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from agentjax.config import Range, check
from agentjax.data.text_file import read_text
from agentjax.trajectory.record import Message, Task
from agentjax.world.environment import Environment
from agentjax.world.games import TurnGameConfig
from agentjax.world.text_game import (
  Split,
  TextGame,
  how_to_answer,
  make_tasks,
  written,
)

_STEPS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
_ACTIONS = tuple(_STEPS)
_LEGEND = "P you, S you on a target, X box, * box on a target, O target, # wall, _ floor."

Place = tuple[int, int]


@dataclasses.dataclass(unsafe_hash=True)
class SokobanConfig(TurnGameConfig):
  """Attributes:
  size: rows and columns of a level that is made, walls around it included. RAGEN has 6.
  boxes: of such a level; RAGEN has 1.
  walls: share of inner places that are walls. Ours.
  least_steps, most_steps: of the shortest solution of such a level. Ours.
  levels: file of levels (as those of boxoban, perhaps gzipped) in the place of such.
  per_box: reward for a box that comes onto a target, and minus it for one that leaves; 1 in RAGEN.
  solved: reward for the last box; 10 in RAGEN.
  cost: of an action; .1 in RAGEN.
  turns: see TurnConfig.
  """

  size: Annotated[int, Range(4)] = 6
  boxes: Annotated[int, Range(1, 4)] = 1
  walls: Annotated[float, Range(0, 1, below=True)] = 0.2
  least_steps: int = 1
  most_steps: int = 10
  levels: str | None = None
  per_box: float = 1.0
  solved: float = 10.0
  cost: float = 0.1

  def validate(self, path: str = "sokoban") -> None:
    super().validate(path)
    most = self.most_steps
    check(1 <= self.least_steps <= most, f"{path}.least_steps", self.least_steps, f"1 to {most}")

  def game(self) -> Environment:
    return Sokoban(self)

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    return sokoban_tasks(self, count, **place)

  def idle_action(self, task: Task) -> str | None:
    level = Level.parse(task.metadata["level"])
    return next((a for a in ("Up", "Down", "Left", "Right") if level.moved(a) == level), None)


@dataclasses.dataclass(frozen=True)
class Level:
  """Walls and targets, which do not change; boxes and the player, which do."""

  walls: frozenset[Place]
  targets: frozenset[Place]
  boxes: frozenset[Place]
  player: Place
  shape: tuple[int, int]

  @classmethod
  def parse(cls, rows: Sequence[str]) -> Level:
    """Reads ``#`` wall, ``$`` box, ``.`` target, ``@`` player, ``*`` and ``+`` on a target.

    Raises:
      ValueError: not one player, or not as many boxes as targets.
    """
    found: dict[str, set[Place]] = collections.defaultdict(set)
    for r, row in enumerate(rows):
      for c, sign in enumerate(row):
        found[sign].add((r, c))
    players = found["@"] | found["+"]
    boxes, targets = found["$"] | found["*"], found["."] | found["*"] | found["+"]
    if len(players) != 1 or len(boxes) != len(targets) or not boxes:
      raise ValueError(
        f"a level has one player and as many boxes as targets, got {len(players)} players, "
        f"{len(boxes)} boxes, {len(targets)} targets"
      )
    shape = (len(rows), max(map(len, rows)))
    return cls(frozenset(found["#"]), frozenset(targets), frozenset(boxes), min(players), shape)

  @property
  def is_solved(self) -> bool:
    return self.boxes == self.targets

  def moved(self, action: str) -> Level:
    """The level after an action; unchanged if a wall or a second box is in the way."""
    dr, dc = _STEPS[action]
    place = (self.player[0] + dr, self.player[1] + dc)
    if place in self.walls:
      return self
    if place not in self.boxes:
      return dataclasses.replace(self, player=place)
    behind = (place[0] + dr, place[1] + dc)
    if behind in self.walls or behind in self.boxes:
      return self
    boxes = self.boxes - {place} | {behind}
    return dataclasses.replace(self, boxes=boxes, player=place)

  def draw(self) -> str:
    """The board as the policy sees it."""

    def sign(place: Place) -> str:
      target = place in self.targets
      if place == self.player:
        return "S" if target else "P"
      if place in self.boxes:
        return "*" if target else "X"
      return "#" if place in self.walls else "O" if target else "_"

    rows, columns = self.shape
    return "\n".join("".join(sign((r, c)) for c in range(columns)) for r in range(rows))


class Sokoban(TextGame):
  """The reward of an action: boxes onto targets less boxes off them, a cost, a bonus at the end."""

  actions = _ACTIONS

  def __init__(self, config: SokobanConfig):
    super().__init__(config.turns)
    self.config = config
    self._placed = 0  # boxes on targets at the start

  def start(self, task: Task) -> None:
    self._level = Level.parse(task.metadata["level"])
    self._placed = len(self._level.boxes & self._level.targets)

  def act(self, action: str, random: np.random.Generator) -> float:
    del random  # nothing is left to chance
    before = len(self._level.boxes & self._level.targets)
    self._level = self._level.moved(action)
    gained = len(self._level.boxes & self._level.targets) - before
    bonus = self.config.solved if self._level.is_solved else 0.0
    return self.config.per_box * gained - self.config.cost + bonus

  @property
  def ended(self) -> bool:
    return self._level.is_solved

  @property
  def least_return(self) -> float:
    """The cost of all actions without success, and all boxes pushed off their targets."""
    pushed_off = max(self.config.per_box, 0.0) * self._placed
    return super().least_return - self.config.cost * self.turns.max_actions - pushed_off

  def board(self) -> str:
    return self._level.draw()

  def get_state(self) -> Any:
    return [sorted(self._level.boxes), self._level.player]

  def set_state(self, state: Any) -> None:
    boxes, player = state
    self._level = dataclasses.replace(
      self._level, boxes=frozenset(tuple(b) for b in boxes), player=tuple(player)
    )


def solve(level: Level, most_steps: int) -> list[str] | None:
  """The shortest solution, breadth first; None if none has at most that many steps."""
  queue: collections.deque[tuple[Level, tuple[str, ...]]] = collections.deque([(level, ())])
  seen = {(level.boxes, level.player)}
  while queue:
    now, way = queue.popleft()
    if now.is_solved:
      return list(way)
    if len(way) == most_steps:
      continue
    for action in _ACTIONS:
      then = now.moved(action)
      state = (then.boxes, then.player)
      if state not in seen:
        seen.add(state)
        queue.append((then, (*way, action)))
  return None


def sokoban_tasks(
  config: SokobanConfig, count: int, *, split: Split, seed: int, first_id: int = 0
) -> list[Task]:
  """Levels that can be solved in ``most_steps``, or the levels of a file, shuffled by the seed.

  The demonstration of a level that was made is the first turn of a shortest solution; levels of a
  file are not solved and have none.

  Raises:
    ConfigError: too few levels.
    DataError: the file cannot be read.
  """
  if config.levels is not None:
    known = list(read_levels(config.levels))
    order = iter(np.random.default_rng([seed, split == "test", 1]).permutation(len(known)))

    def draw(random: np.random.Generator) -> tuple[str, Task] | None:
      del random
      index = next(order, None)
      return None if index is None else _task(config, known[index], None)

  else:

    def draw(random: np.random.Generator) -> tuple[str, Task] | None:
      rows = _random_rows(config, random)
      way = solve(Level.parse(rows), config.most_steps)
      if way is None or len(way) < config.least_steps:
        return None
      return _task(config, rows, way)

  return make_tasks(draw, count, split=split, seed=seed, first_id=first_id, source="sokoban")


def read_levels(path: str | os.PathLike[str]) -> Iterator[list[str]]:
  """Levels of a file: rows of signs, each level after a line that begins with ``;``.

  Raises:
    DataError: the file cannot be read.
  """
  rows: list[str] = []
  for line in (*read_text(path).splitlines(), ";"):
    if line.startswith(";"):
      if rows:
        yield rows
      rows = []
    elif line.strip():
      rows.append(line)


def _random_rows(config: SokobanConfig, random: np.random.Generator) -> list[str]:
  size = config.size
  inner = [(r, c) for r in range(1, size - 1) for c in range(1, size - 1)]
  signs = {place: " " for place in inner}
  for place in inner:
    if random.random() < config.walls:
      signs[place] = "#"
  free = [place for place in inner if signs[place] == " "]
  if len(free) < 2 * config.boxes + 1:
    return _random_rows(config, random)
  chosen = [free[i] for i in random.choice(len(free), 2 * config.boxes + 1, replace=False)]
  for i, place in enumerate(chosen):
    signs[place] = "@" if i == 0 else "$" if i <= config.boxes else "."
  return ["".join(signs.get((r, c), "#") for c in range(size)) for r in range(size)]


def _task(config: SokobanConfig, rows: Sequence[str], way: list[str] | None) -> tuple[str, Task]:
  text = "\n".join(
    [
      f"Push every box onto a target. {_LEGEND}",
      how_to_answer(_ACTIONS, config.turns),
      Level.parse(rows).draw(),
    ]
  )
  shown: tuple[Message, ...] = ()
  if way:
    first = way[: config.turns.actions_per_turn]
    shown = (Message("assistant", written(first, config.turns)),)
  task = Task(
    id=0,
    prompt=(Message("user", text),),
    answer=", ".join(way or ()),
    source="sokoban",
    demonstration=shown,
    metadata={"level": list(rows)},
  )
  return "\n".join(rows), task
