"""Seats of an episode: who plays which agent, in which context, on which branch of the record.

An episode of one agent has one seat, which the policy plays. In an environment of several agents
each has its own seat: it sees only what the environment shows to that agent, and its tokens are a
separate tree of segments in the record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from agentjax.config import ConfigError
from agentjax.engine.config import SamplingConfig
from agentjax.engine.engine import Context, Engine
from agentjax.text.chat import Chat
from agentjax.tools.protocol import Tool
from agentjax.trajectory.record import AGENT, POLICY, Message


class Service(Protocol):
  """A model that writes whole turns."""

  async def reply(self, messages: Sequence[Message], *, key: int) -> str:
    """The next turn of a conversation; ``key`` addresses what is drawn, where that is possible."""


@runtime_checkable
class ToolService(Service, Protocol):
  """One that calls tools; it is asked for a message where its seat has any."""

  async def turn(self, messages: Sequence[Message], tools: Sequence[Tool], *, key: int) -> Message:
    """The next turn, as an assistant's message with its calls."""


@dataclasses.dataclass(frozen=True)
class SeatPlayer:
  """Who plays a seat.

  Attributes:
    policy: name of it in the record; "policy" is the one that is trained.
    chat: writes and reads its conversations.
    engine: samples its turns; None where a ``service`` writes them.
    sampling: how its tokens are drawn; None is as those of the policy.
    service: writes its turns; they are encoded with ``chat`` for the record.
    learns: its tokens carry loss.
  """

  policy: str
  chat: Chat
  engine: Engine | None = None
  sampling: SamplingConfig | None = None
  service: Service | None = None
  learns: bool = False

  def __post_init__(self) -> None:
    if (self.engine is None) == (self.service is None):
      raise ValueError(f"SeatPlayer {self.policy!r} needs an engine or a service, and not both")


@dataclasses.dataclass
class Seat:
  """One agent in one episode.

  Attributes:
    agent: its name.
    player: who plays it.
    several: whether the episode has other agents.
    context: of its engine, from its first turn on; None for a service.
    opened: a conversation is under way.
    length: tokens of it.
    turns: model calls made for it.
    drawn: ids of its latest turn.
    first, tip, last: indices of its first and latest segment, and of its latest turn.
    offered: tools that it may call.
    heard: messages that it will read when it acts next.
    said: the conversation as messages, for a service.
  """

  agent: str
  player: SeatPlayer
  several: bool = False
  context: Context | None = None
  opened: bool = False
  length: int = 0
  turns: int = 0
  drawn: list[int] = dataclasses.field(default_factory=list)
  first: int | None = None
  tip: int | None = None
  last: int | None = None
  offered: Sequence[Tool] = ()
  heard: tuple[Message, ...] = ()
  said: tuple[Message, ...] = ()

  @property
  def visible_to(self) -> tuple[str, ...]:
    """Who sees its segments; () if there are no other agents."""
    return (self.agent,) if self.several else ()

  def grow(self, index: int, tokens: int) -> None:
    """Segment ``index`` continues it."""
    self.first = index if self.first is None else self.first
    self.tip, self.length = index, self.length + tokens

  def restart(self, said: tuple[Message, ...]) -> None:
    """Begins a new conversation on a new branch; the count of turns continues."""
    self.close()
    self.context, self.tip, self.opened = None, None, False
    self.length, self.drawn, self.said = 0, [], said

  def close(self) -> None:
    """Gives its context back."""
    if self.context is not None:
      self.context.close()


def take_seats(
  agents: Sequence[str],
  own: SeatPlayer,
  others: Mapping[str, SeatPlayer],
  *,
  rotate: int = 0,
) -> dict[str, Seat]:
  """A seat for every agent, in their order.

  Args:
    agents: of the environment.
    own: plays all other seats.
    others: who plays, by agent.
    rotate: players move on by this many agents.

  Raises:
    ConfigError: ``others`` names an unknown agent, or leaves no seat to the policy.
  """
  if not agents or len(set(agents)) != len(agents):
    raise ConfigError(
      f"Environment.agents={tuple(agents)}; allowed: at least one name, each of them once."
    )
  unknown = sorted(set(others) - set(agents))
  if unknown:
    raise ConfigError(
      f"config.seats names {', '.join(unknown)}; allowed: agents of the environment, "
      f"{', '.join(agents)}."
    )
  players = [others.get(agent, own) for agent in agents]
  if not any(player.learns for player in players):
    raise ConfigError(
      f"config.seats gives all agents ({', '.join(agents)}) to others; allowed: at least one that "
      "it does not name, which the policy plays."
    )
  several = len(agents) > 1 or tuple(agents) != (AGENT,)
  return {
    agent: Seat(agent, players[(i + rotate) % len(agents)], several)
    for i, agent in enumerate(agents)
  }


async def fork_seats(seats: Mapping[str, Seat]) -> dict[str, Seat]:
  """Copies that continue from here, with their own contexts."""
  made: dict[str, Seat] = {}
  try:
    for agent, seat in seats.items():
      twin = made[agent] = dataclasses.replace(seat, context=None)
      if seat.context is not None:
        (twin.context,) = await seat.context.fork(1)
  except BaseException:
    close_seats(made)
    raise
  return made


def close_seats(seats: Mapping[str, Seat]) -> None:
  """Gives all their contexts back."""
  for seat in seats.values():
    seat.close()


def own_player(chat: Chat, engine: Engine, sampling: SamplingConfig) -> SeatPlayer:
  """The policy that is trained, as a player."""
  return SeatPlayer(POLICY, chat, engine, sampling, learns=True)
