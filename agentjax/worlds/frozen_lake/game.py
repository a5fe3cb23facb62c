"""Cross a slippery frozen lake: gymnasium's FrozenLake in text. RAGEN, 2504.20073."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from agentjax.config import AtLeastTwo, ConfigError, PositiveShare
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

_ACTIONS = ("Left", "Down", "Right", "Up")  # gymnasium's 0 to 3
_SIGNS = {"S": "_", "F": "_", "H": "O", "G": "G"}
_LEGEND = "P you, _ ice, O hole, G goal, X you in a hole."


@dataclasses.dataclass(unsafe_hash=True)
class FrozenLakeConfig(TurnGameConfig):
  """Attributes:
  size: rows and columns of the lake.
  frozen: chance of a place to be ice.
  slippery: whether an action succeeds with ``success`` only, and else goes to either side.
  success: RAGEN and gymnasium have 1/3.
  turns: see TurnConfig.
  """

  size: AtLeastTwo = 4
  frozen: PositiveShare = 0.8
  slippery: bool = True
  success: PositiveShare = 1.0 / 3.0

  def game(self) -> Environment:
    return FrozenLake(self)

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    return frozen_lake_tasks(self, count, **place)

  def idle_action(self, task: Task) -> str | None:
    rows = task.metadata["map"]
    row = next(r for r, text in enumerate(rows) if "S" in text)
    edges = {"Up": row == 0, "Left": rows[row].index("S") == 0, "Down": row == len(rows) - 1}
    return next((name for name, at_edge in edges.items() if at_edge), None)

  def without_chance(self) -> Self:
    """The same world without slipping."""
    return dataclasses.replace(self, slippery=False)


class FrozenLake(TextGame):
  """Reward 1 for reaching the goal; a hole ends the game.

  The transitions are those of gymnasium's environment; the draws are the episode's own, so that a
  snapshot is small and two episodes with one key see the same slips.

  Raises:
    ConfigError: gymnasium, of the extra [envs], is missing.
  """

  actions = _ACTIONS

  def __init__(self, config: FrozenLakeConfig):
    super().__init__(config.turns)
    self.config = config
    self._lake = _gymnasium()

  def start(self, task: Task) -> None:
    self._map: list[str] = list(task.metadata["map"])
    world = self._lake.FrozenLakeEnv(
      desc=self._map, is_slippery=self.config.slippery, success_rate=self.config.success
    )
    self._moves = world.P
    places = "".join(self._map)
    self._place, self._finished = places.index("S"), False

  def act(self, action: str, random: np.random.Generator) -> float:
    moves = self._moves[self._place][_ACTIONS.index(action)]
    chances = np.cumsum([move[0] for move in moves])
    drawn = min(int(np.searchsorted(chances, random.random() * chances[-1])), len(moves) - 1)
    _, self._place, reward, self._finished = moves[drawn]
    self._place, self._finished = int(self._place), bool(self._finished)
    return float(reward)

  @property
  def ended(self) -> bool:
    return self._finished

  def board(self) -> str:
    return _draw(self._map, self._place)

  def get_state(self) -> Any:
    return [self._place, self._finished]

  def set_state(self, state: Any) -> None:
    self._place, self._finished = state


def frozen_lake_tasks(
  config: FrozenLakeConfig, count: int, *, split: Split, seed: int, first_id: int = 0
) -> list[Task]:
  """Lakes with a way to the goal of at most ``turns.max_actions`` actions without slipping.

  The demonstration goes the shortest way, ``actions_per_turn`` at a time, as far as the first turn.
  Small lakes are few: they may come again.
  """
  lake = _gymnasium()

  def draw(random: np.random.Generator) -> tuple[str, Task] | None:
    rows = lake.generate_random_map(config.size, config.frozen, seed=int(random.integers(2**31)))
    rows = [str(row) for row in rows]
    way = shortest_way(rows)
    if way is None or len(way) > config.turns.max_actions:
      return None
    text = "\n".join(
      [
        "Walk over the frozen lake to the goal. "
        + ("The ice is slippery: you may slide to either side. " if config.slippery else "")
        + _LEGEND,
        how_to_answer(_ACTIONS, config.turns),
        _draw(rows, "".join(rows).index("S")),
      ]
    )
    first = way[: config.turns.actions_per_turn]
    task = Task(
      id=0,
      prompt=(Message("user", text),),
      answer=", ".join(way),
      source="frozen_lake",
      demonstration=(Message("assistant", written(first, config.turns)),),
      metadata={"map": rows},
    )
    return "/".join(rows), task

  return make_tasks(
    draw, count, split=split, seed=seed, first_id=first_id, source="frozen_lake", distinct=False
  )


def shortest_way(rows: Sequence[str]) -> list[str] | None:
  """Actions from S to G around all holes; None where there is no way."""
  size = len(rows)
  start = next((r, row.index("S")) for r, row in enumerate(rows) if "S" in row)
  steps = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
  queue, seen = collections.deque([(start, [])]), {start}  # type: ignore[var-annotated]
  while queue:
    (r, c), way = queue.popleft()
    if rows[r][c] == "G":
      return way
    for name, (dr, dc) in steps.items():
      place = (r + dr, c + dc)
      inside = 0 <= place[0] < size and 0 <= place[1] < len(rows[0])
      if inside and rows[place[0]][place[1]] != "H" and place not in seen:
        seen.add(place)
        queue.append((place, [*way, name]))
  return None


def _draw(rows: Sequence[str], place: int) -> str:
  width = len(rows[0])
  signs = [_SIGNS[sign] for sign in "".join(rows)]
  signs[place] = "X" if signs[place] == "O" else "P"
  return "\n".join("".join(signs[i : i + width]) for i in range(0, len(signs), width))


def _gymnasium() -> Any:
  try:
    from gymnasium.envs.toy_text import frozen_lake
  except ImportError as error:
    raise ConfigError(
      "the environment 'frozen_lake' needs gymnasium; install the extra: pip install "
      "'agentjax[envs]'"
    ) from error
  return frozen_lake
