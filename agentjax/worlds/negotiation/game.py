"""Two agents divide things that are worth different amounts to each of them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from agentjax.config import NonNegativeInt, PositiveInt, Range, Share
from agentjax.text.answers import read_tagged_answer
from agentjax.trajectory.record import Message, Reward, Status, Task
from agentjax.world.cheats import Turns, claims, each
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.games import GameConfig
from agentjax.world.text_game import make_tasks

AGENTS = ("first", "second")
ITEMS = ("books", "hats", "balls")
WORTH = 10  # of all things together, to each agent

_MOST = 4  # of one kind
_OFFER = re.compile(r"offer ([0-9]{1,2}) ([0-9]{1,2}) ([0-9]{1,2})")


@dataclasses.dataclass(unsafe_hash=True)
class NegotiationConfig(GameConfig):
  """Deal or no deal: books, hats and balls are divided by offers (1706.05125).

  Attributes:
    rounds: turns of each agent; then there is no deal.
    words: characters of an agent's own words that the other is shown; 0 shows offers alone.
    opened: share of the tasks that begin with an offer of "second".
    penalty: what a turn without a move that can be read costs whoever wrote it; it ends the game
      without a deal. All defaults are ours.
  """

  rounds: PositiveInt = 3
  words: NonNegativeInt = 200
  opened: Share = 0.5
  penalty: Annotated[float, Range(0)] = 0.5

  def game(self) -> Environment:
    return Negotiation(self)

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    return make_tasks(self._draw, count, source="negotiation", **place)

  def cheats(self, task: Task) -> Mapping[str, Turns]:
    """Offers of what is not there, two moves for one, and moves that nobody can read."""
    counts = task.metadata["counts"]
    every = " ".join(map(str, counts))
    texts = claims(task) | {
      "more_than_there_is": _offer([n + 1 for n in counts]),
      "negative": "offer -1 0 0",
      "other_digits": "offer \u0661 \u0661 \u0661",
      "many_digits": f"offer {'9' * 9000} 0 0",
      "two_offers": f"offer {every} offer 0 0 0",
      "offer_and_accept": f"offer {every}\naccept",
      "for_the_other": "second: accept",
    }
    if task.metadata["offer"] is None:
      texts["accepts_nothing"] = "accept"
    return each(texts, _tagged)

  def solution(self, task: Task) -> Turns:
    """Everything for "first", which "second" accepts."""
    moves = (_offer(task.metadata["counts"]), "accept")
    return tuple(Message("assistant", _tagged(move)) for move in moves)

  def _draw(self, random: np.random.Generator) -> tuple[str, Task] | None:
    counts = [int(n) for n in random.integers(1, _MOST + 1, len(ITEMS))]
    values = [draw_values(counts, random) for _ in AGENTS]
    if None in values:
      return None
    offer = None
    if random.random() < self.opened:
      offer = [int(random.integers(n + 1)) for n in counts]  # what "second" wants to keep
    metadata = {"counts": counts, "values": values, "offer": offer}
    worth = [v or [] for v in values]
    left = None if offer is None else _rest(counts, offer)
    if left is not None and _value(left, worth[0]) >= WORTH / 2:
      shown = "accept"
    else:  # half of all, rounded up, of what is worth most a piece
      shown = _offer([-(-n // 2) if v >= max(worth[0]) else n // 2
                      for n, v in zip(counts, worth[0], strict=True)])  # fmt: skip
    prompt = (Message("user", introduce(self, metadata, 0)),)
    demonstration = (Message("assistant", _tagged(shown)),)
    content = json.dumps([counts, values, offer])
    return content, Task(0, prompt, "", "negotiation", demonstration, metadata)


class Negotiation(Environment):
  """Agents move in turns; each knows its own values alone.

  A move is ``offer a b c``, what its author wants to keep, ``accept`` or ``leave``. At a deal each
  is paid the worth of what it gets over ``WORTH``, else both get 0.

  Args:
    config: see NegotiationConfig.
  """

  agents = AGENTS

  def __init__(self, config: NegotiationConfig):
    self.config = config
    self._task: dict[str, Any] | None = None

  @property
  def least_return(self) -> float:
    return -self.config.penalty

  async def reset(self, task: Task, key: int) -> Observation:
    del key  # nothing is left to chance
    self._task = dict(task.metadata)
    self._turn, self._offer = 0, self._task["offer"]
    rules = (Message("user", introduce(self.config, self._task, 1)),)
    return Observation(task.prompt, next=AGENTS[0], others={AGENTS[1]: rules})

  async def step(self, action: Action) -> Step:
    if self._task is None:
      raise RuntimeError("step() before reset(task, key)")
    author = self._turn % 2
    self._turn += 1
    move = None if action.truncated else read_tagged_answer(action.text)
    move = None if move is None else " ".join(move.split())
    if move == "leave":
      return self._over(author, move, None)
    if move == "accept" and self._offer is not None:
      return self._over(author, move, self._offer)
    offer = None if move is None else read_offer(move, self._task["counts"])
    if offer is None:
      return self._unread(author, cut=action.truncated)
    self._offer = offer
    if self._turn >= 2 * self.config.rounds:
      return self._over(author, move, None)
    return Step(self._show(1 - author, action.text), Reward(0.0))

  def snapshot(self) -> bytes:
    return json.dumps([self._turn, self._offer]).encode()

  def restore(self, state: bytes) -> None:
    self._turn, self._offer = json.loads(state)

  def _over(self, author: int, move: str | None, kept: Sequence[int] | None) -> Step:
    """The end: a deal in which the other agent keeps ``kept``, or none."""
    assert self._task is not None
    shares = ((0, 0, 0), (0, 0, 0)) if kept is None else (_rest(self._task["counts"], kept), kept)
    own, other = (
      Reward(_value(share, self._task["values"][who]) / WORTH)
      for share, who in zip(shares, (author, 1 - author), strict=True)
    )
    rewards = {AGENTS[1 - author]: other}
    return Step(Observation(()), own, terminated=True, answer=move, rewards=rewards)

  def _unread(self, author: int, *, cut: bool) -> Step:
    return Step(
      Observation(()),
      Reward(-self.config.penalty),
      terminated=not cut,
      truncated=cut,
      status=Status.TRUNCATED if cut else Status.OK,
      executed=False,
      rewards={AGENTS[1 - author]: Reward(0.0)},
    )

  def _show(self, reader: int, text: str) -> Observation:
    """The offer that lies on the table, and the author's words, as the other agent sees them."""
    assert self._task is not None
    said = text.split("<answer>")[0].strip()[: self.config.words]
    words = [f"They say: {said.encode(errors='replace').decode()}"] if said else []
    left = self.config.rounds - self._turn // 2
    lines = [*words, _on_table(self._task, self._offer, reader), f"You have {left} turns left."]
    return Observation((Message("user", "\n".join(lines)),), next=AGENTS[reader])


def introduce(config: NegotiationConfig, task: Mapping[str, Any], reader: int) -> str:
  """The rules, and what things are worth to one agent."""
  worth = ", ".join(
    f"{n} {name} worth {v} each"
    for n, name, v in zip(task["counts"], ITEMS, task["values"][reader], strict=True)
  )
  lines = [
    f"You divide things with another agent, to whom they are worth other amounts. To you: {worth}. "
    f"Without a deal after {config.rounds} turns each, both get nothing.",
    "Write <answer>offer A B C</answer>, the books, hats and balls that you keep, or "
    "<answer>accept</answer>, or <answer>leave</answer>.",
  ]
  if task["offer"] is not None and not reader:
    lines.append(_on_table(task, task["offer"], reader))
  return "\n".join(lines)


def read_offer(move: str, counts: Sequence[int]) -> list[int] | None:
  """What the author wants to keep; None for what is no offer of what there is."""
  found = _OFFER.fullmatch(move)
  if found is None:
    return None
  kept = [int(number) for number in found.groups()]
  return kept if all(k <= n for k, n in zip(kept, counts, strict=True)) else None


def draw_values(counts: Sequence[int], random: np.random.Generator) -> list[int] | None:
  """Whole numbers whose sum over all things is ``WORTH``; None where the draw finds none."""
  values = [int(random.integers(WORTH // n + 1)) for n in counts[:-1]]
  rest = WORTH - _value(counts[:-1], values)
  return [*values, rest // counts[-1]] if rest >= 0 and rest % counts[-1] == 0 else None


def _on_table(task: Mapping[str, Any], offer: Sequence[int], reader: int) -> str:
  left = _rest(task["counts"], offer)
  things = ", ".join(f"{n} {name}" for n, name in zip(left, ITEMS, strict=True))
  return f"They offer you {things}: worth {_value(left, task['values'][reader])} to you."


def _rest(counts: Sequence[int], kept: Sequence[int]) -> list[int]:
  return [n - k for n, k in zip(counts, kept, strict=True)]


def _value(things: Sequence[int], values: Sequence[int]) -> int:
  return sum(n * v for n, v in zip(things, values, strict=True))


def _offer(kept: Sequence[int]) -> str:
  return f"offer {' '.join(map(str, kept))}"


def _tagged(move: str) -> str:
  return f"<answer>{move}</answer>"
