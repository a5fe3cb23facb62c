"""Base of games played in text: turns of named actions, a board that is shown, chance by key.

A game's tasks are made by its ``..._tasks`` function from a seed. The hash of a level's content
decides whether it is for training or tests, for any seed, so the two never share a level.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from agentjax.config import Config, ConfigError, NonNegativeFloat, PositiveInt
from agentjax.text.answers import read_tagged_answer
from agentjax.trajectory.record import Message, Reward, Status, Task
from agentjax.world.environment import Action, Environment, Observation, Step

Split = Literal["train", "test"]

_TEST_SHARE = 0.2  # of all contents; a constant, since it decides which side a level is on
_MOST_TRIES = 5000  # in a row: levels of the other side, known already or not fit


@dataclasses.dataclass(unsafe_hash=True)
class TurnConfig(Config):
  """How a game is played in turns of the policy; the defaults are RAGEN's (2504.20073).

  Attributes:
    max_turns: of the policy; then the game is over.
    max_actions: in the whole game.
    actions_per_turn: further actions of a turn are ignored.
    tags: whether actions are written in ``<answer>...</answer>``; else the whole turn is read.
    format_penalty: subtracted in a turn without any action that could be read.
  """

  max_turns: PositiveInt = 5
  max_actions: PositiveInt = 10
  actions_per_turn: PositiveInt = 5
  tags: bool = True
  format_penalty: NonNegativeFloat = 0.1


class TextGame(Environment):
  """A game of actions. Subclasses hold the rules; the reward of a turn is that of its actions.

  The episode's key seeds all chance; a snapshot holds the state of the generator.

  Args:
    turns: how it is played.
  """

  actions: Sequence[str]  # their names, of which none begins another

  def __init__(self, turns: TurnConfig):
    self.turns = turns
    self._task: Task | None = None

  # Rules.

  @abc.abstractmethod
  def start(self, task: Task) -> None:
    """Sets the game up."""

  @abc.abstractmethod
  def act(self, action: str, random: np.random.Generator) -> float:
    """Does one action and returns its reward."""

  @property
  @abc.abstractmethod
  def ended(self) -> bool:
    """Whether the game is won or lost."""

  @abc.abstractmethod
  def board(self) -> str:
    """What the policy sees after a turn."""

  @abc.abstractmethod
  def get_state(self) -> Any:
    """The state of the game in plain JSON."""

  @abc.abstractmethod
  def set_state(self, state: Any) -> None:
    """Returns to a state."""

  # Environment.

  @property
  def least_return(self) -> float:
    """A penalty for every turn; games in which actions cost something subtract that too."""
    return -self.turns.format_penalty * self.turns.max_turns

  async def reset(self, task: Task, key: int) -> Observation:
    self._task, self._random = task, np.random.default_rng(key)
    self._turn = self._done = 0
    self.start(task)
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    if self._task is None:
      raise RuntimeError("step() before reset(task, key)")
    self._turn += 1
    if action.truncated:
      return self._over(Reward(-self.turns.format_penalty), Status.TRUNCATED, executed=False)
    named = read_actions(action.text, self.actions, tags=self.turns.tags)
    total = 0.0 if named else -self.turns.format_penalty
    done: list[str] = []
    for name in named[: self.turns.actions_per_turn]:
      if self.ended or self._done >= self.turns.max_actions:
        break
      total += self.act(name, self._random)
      self._done += 1
      done.append(name)
    if self.ended:
      answer = ", ".join(done)
      return Step(
        Observation(()), Reward(total), terminated=True, executed=bool(done), answer=answer
      )
    if self._turn >= self.turns.max_turns or self._done >= self.turns.max_actions:
      return self._over(Reward(total), Status.OK, executed=bool(done))
    said = (
      f"Done: {', '.join(done)}." if done else f"No action read. Use {', '.join(self.actions)}."
    )
    shown = Observation((Message("user", f"{said}\n{self.board()}"),))
    return Step(shown, Reward(total), executed=bool(done))

  def snapshot(self) -> bytes:
    values = {
      "game": self.get_state(),
      "turn": self._turn,
      "done": self._done,
      "random": self._random.bit_generator.state,
    }
    return json.dumps(values).encode()

  def restore(self, state: bytes) -> None:
    values = json.loads(state)
    self.set_state(values["game"])
    self._turn, self._done = values["turn"], values["done"]
    self._random = np.random.default_rng(0)
    self._random.bit_generator.state = values["random"]

  def _over(self, reward: Reward, status: Status, *, executed: bool) -> Step:
    cut = status is Status.TRUNCATED
    return Step(
      Observation(()),
      reward,
      terminated=not cut,
      truncated=cut,
      status=status,
      executed=executed,
    )


def read_actions(text: str, names: Sequence[str], *, tags: bool) -> list[str]:
  """The actions in a turn, in their order, with any separators.

  Args:
    text: of the turn.
    names: of actions; letter case does not matter.
    tags: reads only the last ``<answer>...</answer>``, and nothing without one.
  """
  if tags:
    tagged = read_tagged_answer(text)
    if tagged is None:
      return []
    text = tagged
  pattern = "|".join(rf"\b{re.escape(name)}\b" for name in names)
  known = {name.lower(): name for name in names}
  return [known[word.lower()] for word in re.findall(pattern, text, re.IGNORECASE)]


def how_to_answer(names: Sequence[str], turns: TurnConfig) -> str:
  """The line of a prompt that says what may be done."""
  where = " in <answer></answer> after your reasoning in <think></think>" if turns.tags else ""
  several = "" if turns.actions_per_turn == 1 else f", up to {turns.actions_per_turn} a turn"
  return f"Actions: {', '.join(names)}. Write them{where}{several}, separated by ||."


def written(names: Sequence[str], turns: TurnConfig) -> str:
  """A turn that does these actions, for demonstrations."""
  text = " || ".join(names)
  return f"<answer>{text}</answer>" if turns.tags else text


def make_tasks(
  draw: Callable[[np.random.Generator], tuple[str, Task] | None],
  count: int,
  *,
  split: Split,
  seed: int,
  first_id: int,
  source: str,
  distinct: bool = True,
) -> list[Task]:
  """``count`` tasks of one side, with ids from ``first_id`` on.

  Args:
    draw: returns content (which identifies the level) and a task with any id; None if nothing fits.
    count, split, seed, first_id: which.
    source: name of the game, part of the hash.
    distinct: whether all contents must differ.

  Raises:
    ConfigError: the game has too few levels.
  """
  random = np.random.default_rng([seed, split == "test"])
  tasks: list[Task] = []
  known: set[str] = set()
  tries = 0
  while len(tasks) < count and tries < _MOST_TRIES:
    tries += 1
    drawn = draw(random)
    if drawn is None or (distinct and drawn[0] in known):
      continue
    if _in_test(f"{source}/{drawn[0]}") != (split == "test"):
      continue
    tries = 0
    known.add(drawn[0])
    tasks.append(dataclasses.replace(drawn[1], id=first_id + len(tasks)))
  if len(tasks) < count:
    raise ConfigError(
      f"{source} has only {len(tasks)} {split} tasks of this kind and {count} are asked for; lower "
      "the number, or make the levels larger."
    )
  return tasks


def _in_test(content: str) -> bool:
  digest = hashlib.sha256(content.encode()).digest()
  return int.from_bytes(digest[:8], "big") / 2**64 < _TEST_SHARE
