"""A bandit with two arms: a small sure reward, or a large one by chance. RAGEN, 2504.20073."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np

from agentjax.config import Share
from agentjax.trajectory.record import Message, Task
from agentjax.world.environment import Environment
from agentjax.world.games import TurnGameConfig
from agentjax.world.text_game import (
  Split,
  TextGame,
  TurnConfig,
  how_to_answer,
  make_tasks,
  written,
)

_NAMES = (
  ("Phoenix", "a bird that burns and rises again"),
  ("Dragon", "a beast that guards a treasure"),
  ("Tortoise", "a slow walker that always arrives"),
  ("Falcon", "a hunter that strikes or misses"),
  ("Librarian", "a keeper of an orderly house"),
  ("Gambler", "a player who stakes everything"),
  ("Mason", "a builder who lays stone on stone"),
  ("Comet", "a visitor that few ever see"),
)


@dataclasses.dataclass(unsafe_hash=True)
class BanditConfig(TurnGameConfig):
  """Attributes:
  low: reward of the sure arm.
  high, chance: the other arm pays ``high`` with probability ``chance``, else nothing. RAGEN has
    .15 against a Bernoulli of .25, so that the risky arm is the better one.
  turns: see TurnConfig; one turn with one action.
  """

  low: float = 0.15
  high: float = 1.0
  chance: Share = 0.25
  turns: TurnConfig = dataclasses.field(
    default_factory=lambda: TurnConfig(max_turns=1, max_actions=1, actions_per_turn=1)
  )

  def game(self) -> Environment:
    return Bandit(self)

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    return bandit_tasks(self, count, **place)

  def idle_action(self, task: Task) -> str | None:
    return next(arm for arm in task.metadata["arms"] if arm != task.metadata["risky"])

  def without_chance(self) -> Self:
    """The better arm pays 1, the other nothing."""
    return dataclasses.replace(self, low=0.0, high=1.0, chance=1.0)


class Bandit(TextGame):
  """One choice between two names; only their stories say which one is risky."""

  def __init__(self, config: BanditConfig):
    super().__init__(config.turns)
    self.config = config

  def start(self, task: Task) -> None:
    self._risky, self._pulled = task.metadata["risky"], False
    self.actions = tuple(task.metadata["arms"])

  def act(self, action: str, random: np.random.Generator) -> float:
    self._pulled = True
    if action != self._risky:
      return self.config.low
    return self.config.high if random.random() < self.config.chance else 0.0

  @property
  def ended(self) -> bool:
    return self._pulled

  @property
  def least_return(self) -> float:
    """The worse arm after a penalty for every turn."""
    return super().least_return + min(self.config.low, self.config.high, 0.0)

  def board(self) -> str:
    return f"Choose {' or '.join(self.actions)}."

  def get_state(self) -> Any:
    return self._pulled

  def set_state(self, state: Any) -> None:
    self._pulled = state


def bandit_tasks(
  config: BanditConfig, count: int, *, split: Split, seed: int, first_id: int = 0
) -> list[Task]:
  """Tasks with two arms each; as there are few pairs of names, they come again and again.

  The demonstration chooses either arm, by chance: it shows the form and not the answer.
  """

  def draw(random: np.random.Generator) -> tuple[str, Task]:
    chosen = random.choice(len(_NAMES), 2, replace=False)
    (one, first), (other, second) = (_NAMES[i] for i in chosen)
    arms = (one, other)
    risky = arms[int(random.integers(2))]
    stories = {one: first, other: second}
    lines = [
      f"{name}, {stories[name]}: " + (_risky(config) if name == risky else "pays the same always.")
      for name in arms
    ]
    shown = arms[int(random.integers(2))]
    text = "\n".join(["Two machines.", *lines, how_to_answer(arms, config.turns)])
    task = Task(
      id=0,
      prompt=(Message("user", text),),
      answer=risky,
      source="bandit",
      demonstration=(Message("assistant", written([shown], config.turns)),),
      metadata={"arms": list(arms), "risky": risky},
    )
    return "/".join(sorted(arms)), task

  return make_tasks(
    draw, count, split=split, seed=seed, first_id=first_id, source="bandit", distinct=False
  )


def _risky(config: BanditConfig) -> str:
  del config  # the odds are to be learnt
  return "pays much, or nothing."
