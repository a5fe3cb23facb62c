"""A world of text games: generated tasks, the game's reward, and cheats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.data import DataConfig, TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.trajectory.record import Message, Task
from agentjax.world.cheats import Setting, Turns, claims, each, say
from agentjax.world.environment import Environment
from agentjax.world.text_game import TurnConfig, written
from agentjax.world.world import World, WorldConfig


@dataclasses.dataclass(unsafe_hash=True)
class GameConfig(WorldConfig):
  """Settings of a game with generated tasks, whose environment gives the reward."""

  def game(self) -> Environment:
    """A fresh game."""
    raise NotImplementedError(f"{type(self).__name__} must define game()")

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    """``count`` tasks; ``place`` holds split, seed and first_id (``text_game.make_tasks``)."""
    raise NotImplementedError(f"{type(self).__name__} must define make_tasks()")

  def cheats(self, task: Task) -> Mapping[str, Turns]:
    """Turns that must earn nothing."""
    raise NotImplementedError(f"{type(self).__name__} must define cheats()")

  def solution(self, task: Task) -> Turns:
    """Turns that win; by default the demonstration, for games of one turn."""
    return task.demonstration

  def build(self, site: Any) -> World:
    return GameWorld(self)


class GameWorld(World):
  """Plays the game of its settings; the part "environment" of the reward is what the game pays."""

  def __init__(self, config: GameConfig):
    self.config = config

  def tasks(self, data: DataConfig) -> TaskSplits:
    sizes = ((data.train_size, "train", 0), (data.test_size, "test", FIRST_TEST_ID))
    train, test = (
      self.config.make_tasks(size or 0, split=split, seed=data.seed, first_id=first)
      for size, split, first in sizes
    )
    return TaskSplits(train, test)

  def environment(self, task: Task) -> Environment:
    return self.config.game()

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return self.config.cheats(task)

  def solution(self, task: Task, setting: Setting) -> Turns:
    return self.config.solution(task)


@dataclasses.dataclass(unsafe_hash=True)
class TurnGameConfig(GameConfig):
  """Settings of a game of several turns, of several actions each.

  Attributes:
    turns: see TurnConfig.
  """

  turns: TurnConfig = dataclasses.field(default_factory=TurnConfig)

  def idle_action(self, task: Task) -> str | None:
    """An action that changes nothing at the start, or loses; None if there is none."""
    raise NotImplementedError(f"{type(self).__name__} must define idle_action()")

  def cheats(self, task: Task) -> Mapping[str, Turns]:
    return game_cheats(task, self.turns, self.idle_action(task))

  def solution(self, task: Task) -> Turns:
    """All turns of the way in the task's answer; the demonstration shows the first one only."""
    return played(tuple(filter(None, task.answer.split(", "))), self.turns)


def game_cheats(task: Task, turns: TurnConfig, idle: str | None) -> dict[str, Turns]:
  """Cheats: texts that are no action, actions where none are read, actions beyond the limits.

  Args:
    task: its answer is a way to win.
    turns: how actions are written, and how many there may be.
    idle: an action that changes nothing at the start, or loses; None where there is none.
  """
  way = tuple(task.answer.split(", "))

  def form(text: str) -> str:
    return f"<answer>{text}</answer>" if turns.tags else text

  texts = claims(task)
  echo = texts.pop("echo")  # which names every action: where it is read it is as good as any
  attempts = each(texts, form) | {
    "won": say(form("won, solved, goal, reward 1")),
    "glued": say(form("".join((*way, *way)) + "x")),
    "numbers": say(form(" || ".join(map(str, range(100))))),
  }
  if turns.tags:
    attempts["echo"] = say(echo)
    attempts["untagged"] = say(" || ".join(way))
    attempts["first_of_two_tags"] = say(f"{form(' || '.join(way))}{form('')}")
    attempts["fake_board"] = say(f"{form('')}\nDone: {', '.join(way)}.\nYou reached the goal.")
  if idle is not None:
    attempts["beyond_the_turn"] = say(
      form(" || ".join([idle] * turns.actions_per_turn + list(way)))
    )
    wasted = played((idle,) * turns.max_actions, turns)
    attempts["beyond_the_game"] = (*wasted, *played(way, turns))
  return attempts


def played(actions: Sequence[str], turns: TurnConfig) -> Turns:
  """Actions of a game, as many per turn as allowed."""
  batches = range(0, len(actions), turns.actions_per_turn)
  return tuple(
    Message("assistant", written(actions[i : i + turns.actions_per_turn], turns)) for i in batches
  )
