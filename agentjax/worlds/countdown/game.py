"""Countdown: reach a number with given numbers, each used once. One turn."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

import numpy as np

from agentjax.config import AtLeastTwo, Range
from agentjax.text.answers import read_tagged_answer
from agentjax.trajectory.record import Message, Reward, Status, Task
from agentjax.world.cheats import Turns
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.games import GameConfig
from agentjax.world.text_game import Split, make_tasks
from agentjax.worlds.countdown.cheats import countdown_cheats

_LONGEST = 200  # characters of an answer


@dataclasses.dataclass(unsafe_hash=True)
class CountdownConfig(GameConfig):
  """Attributes:
  numbers: how many are given.
  largest: of them, from 1 on.
  largest_target: of what is to be reached, from 1 on.
  tags: whether the answer must be in ``<answer>...</answer>``; else the whole turn is it.
  format_reward: for an expression that can be read and does not reach the target, or not with the
    numbers given; .1 in the task's usual form.
  """

  numbers: Annotated[int, Range(2, 6)] = 3
  largest: AtLeastTwo = 20
  largest_target: AtLeastTwo = 100
  tags: bool = True
  format_reward: Annotated[float, Range(0, 1, below=True)] = 0.1

  def game(self) -> Environment:
    return Countdown(self)

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    return countdown_tasks(self, count, **place)

  def cheats(self, task: Task) -> Mapping[str, Turns]:
    return countdown_cheats(task, self.tags)


class Countdown(Environment):
  """Reward 1 for an expression of all the numbers, each used once, that equals the target."""

  def __init__(self, config: CountdownConfig):
    self.config = config

  async def reset(self, task: Task, key: int) -> Observation:
    del key  # nothing is left to chance
    self._numbers, self._target = task.metadata["numbers"], task.metadata["target"]
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    if action.truncated:
      return Step(Observation(()), Reward(0.0), truncated=True, status=Status.TRUNCATED)
    text = read_expression(action.text, tags=self.config.tags)
    right = None if text is None else solves(text, self._numbers, self._target)
    reward = 0.0 if right is None else 1.0 if right else self.config.format_reward
    return Step(Observation(()), Reward(reward), terminated=True, answer=text)

  def snapshot(self) -> bytes:
    return b""

  def restore(self, state: bytes) -> None:
    del state  # nothing changes between turns


def read_expression(text: str, *, tags: bool) -> str | None:
  """What is in the last ``<answer>...</answer>``, or the text, up to an equals sign."""
  if tags:
    tagged = read_tagged_answer(text)
    if tagged is None:
      return None
    text = tagged
  return text.split("=")[0].strip()


def solves(text: str, numbers: Sequence[int], target: int) -> bool | None:
  """Whether an expression uses every number once and equals the target; None if it is none.

  Accepts whole numbers, ``+ - * /`` and brackets; computes in exact fractions.
  """
  if len(text) > _LONGEST:
    return None
  try:
    tree = ast.parse(text, mode="eval").body
    used: list[int] = []
    value = _value(tree, used)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None
  except ZeroDivisionError:
    return False
  return sorted(used) == sorted(numbers) and value == target


def _value(node: ast.AST, used: list[int]) -> Fraction:
  if isinstance(node, ast.Constant) and type(node.value) is int:
    used.append(node.value)
    return Fraction(node.value)
  if isinstance(node, ast.BinOp):
    left, right = _value(node.left, used), _value(node.right, used)
    match node.op:
      case ast.Add():
        return left + right
      case ast.Sub():
        return left - right
      case ast.Mult():
        return left * right
      case ast.Div():
        return left / right
  raise ValueError(f"{type(node).__name__} is no part of an expression here")


def countdown_tasks(
  config: CountdownConfig, count: int, *, split: Split, seed: int, first_id: int = 0
) -> list[Task]:
  """Tasks that can be solved, each with one solution as its demonstration."""

  def draw(random: np.random.Generator) -> tuple[str, Task] | None:
    numbers = [int(n) for n in random.integers(1, config.largest + 1, config.numbers)]
    parts = [(Fraction(n), str(n)) for n in numbers]
    while len(parts) > 1:
      one, other = (parts.pop(int(random.integers(len(parts)))) for _ in range(2))
      sign = "+-*/"[int(random.integers(4))]
      if sign == "/" and (other[0] == 0 or (one[0] / other[0]).denominator != 1):
        return None
      value = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
      }[sign](one[0], other[0])
      parts.append((value, f"({one[1]} {sign} {other[1]})"))
    value, text = parts[0]
    if value.denominator != 1 or not 1 <= value <= config.largest_target:
      return None
    text, target = text[1:-1], int(value)
    where = (
      " Reason in <think></think> and write the expression in <answer></answer>."
      if config.tags
      else " Write the expression alone."
    )
    given = ", ".join(map(str, numbers))
    task = Task(
      id=0,
      prompt=(
        Message(
          "user",
          f"Reach {target} with the numbers {given}, each used once, by + - * / and brackets."
          + where,
        ),
      ),
      answer=text,
      source="countdown",
      demonstration=(Message("assistant", f"<answer>{text}</answer>" if config.tags else text),),
      metadata={"numbers": numbers, "target": target},
    )
    return f"{sorted(numbers)}={target}", task

  return make_tasks(draw, count, split=split, seed=seed, first_id=first_id, source="countdown")
