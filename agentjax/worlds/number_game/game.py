"""Guess a hidden number: the smallest environment with state, chance and a reward of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentjax.trajectory.record import Message, Reward, Status, Task
from agentjax.world.cheats import Turns, each
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.games import GameConfig

LOWEST, HIGHEST = 1, 100


@dataclasses.dataclass(unsafe_hash=True)
class NumberGameConfig(GameConfig):
  """A hidden number is guessed; no settings."""

  def game(self) -> Environment:
    return GuessNumber()

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    return [dataclasses.replace(task, id=place["first_id"] + task.id)
            for task in guess_number_tasks(count)]  # fmt: skip

  def cheats(self, task: Task) -> Mapping[str, Turns]:
    """Turns that name every number, or none."""
    every = " ".join(map(str, range(LOWEST, HIGHEST + 1)))
    return each(
      {
        "every_number": every,
        "the_rest_after_a_wrong_one": f"0 {every}",
        "huge": "9" * 10_000,
        "range": f"{LOWEST}-{HIGHEST}",
        "claimed": "found",
        "not_a_number": "nan inf 1e999",
        "other_digits": "\u0661\u0662",
        "surrogate": "\ud800",
      },
      str,
    )

  def solution(self, task: Task) -> Turns:
    """One guess per turn, from 2 on."""
    return tuple(Message("assistant", str(n)) for n in range(LOWEST + 1, HIGHEST + 1))


class GuessNumber(Environment):
  """Find a hidden integer in 1..100; each guess is answered by "higher", "lower" or "found".

  The episode's key hides the number, so one task is a new game every time. Of each turn the first
  integer counts. Reward 1 for finding the number, 0 for every other turn.
  """

  async def reset(self, task: Task, key: int) -> Observation:
    self._target = int(np.random.default_rng(key).integers(LOWEST, HIGHEST + 1))
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    if action.truncated:
      return Step(
        Observation(()), Reward(0.0), truncated=True, status=Status.TRUNCATED, executed=False
      )
    guess = re.search(r"-?\d{1,9}(?!\d)", action.text)
    if guess is None:
      return _reply("Answer with one integer.", executed=False)
    number = int(guess.group())
    if number == self._target:
      return Step(Observation(()), Reward(1.0), terminated=True, answer=str(number))
    return _reply("higher" if number < self._target else "lower")

  def snapshot(self) -> bytes:
    return self._target.to_bytes(2, "big")

  def restore(self, state: bytes) -> None:
    self._target = int.from_bytes(state, "big")


def guess_number_tasks(count: int) -> Sequence[Task]:
  """``count`` tasks with ids 0..count-1 and one prompt; they differ in what their keys hide."""
  prompt = (Message("user", f"I think of a number from {LOWEST} to {HIGHEST}. Guess it."),)
  return [Task(id=i, prompt=prompt, answer="", source="guess_number") for i in range(count)]


def _reply(text: str, *, executed: bool = True) -> Step:
  return Step(Observation((Message("user", text),)), Reward(0.0), executed=executed)
