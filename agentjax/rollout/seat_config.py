"""Settings of the other players of an episode's seats, chosen by name for each agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol

from agentjax.config import ConfigError, FilePath, NonNegativeInt, PositiveFloat, check
from agentjax.engine.engine import Engine
from agentjax.names import Choice
from agentjax.rollout.seats import SeatPlayer
from agentjax.text.chat import Chat
from agentjax.trajectory.record import POLICY

_HERE = "agentjax.rollout.seat_config"


class Bank(Protocol):
  """What a run provides to the players of its seats."""

  @property
  def chat(self) -> Chat:
    """Of the policy that is trained."""
    ...

  def serve(self, path: str, policy: str = POLICY) -> tuple[Engine, Chat]:
    """A policy on disk: of RUN or RUN/checkpoints/STEP, or a Hugging Face folder; loaded once."""
    ...


@dataclasses.dataclass(unsafe_hash=True)
class SeatConfig(Choice):
  """Who plays a seat. Only tokens of a "trained" seat carry loss.

  Built in are "snapshot" (the policy of an earlier step), "checkpoint" (a policy on disk),
  "service" (a model behind an endpoint) and "trained" (a further policy that learns). One of your
  own defines ``play``.
  """

  group = "agentjax.seats"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {
      "snapshot": f"{_HERE}:SnapshotSeat",
      "checkpoint": f"{_HERE}:CheckpointSeat",
      "service": "agentjax.adapters.chat_endpoint.seat:ServiceSeat",
      "trained": f"{_HERE}:TrainedSeat",
    }

  def play(self, bank: Bank, name: str) -> SeatPlayer:
    """The player, under ``name`` in the record; called once a run, before any episode."""
    raise NotImplementedError(f"{type(self).__name__} must define play()")


@dataclasses.dataclass(unsafe_hash=True)
class SnapshotSeat(SeatConfig):
  """A policy as it was: self-play against an earlier self.

  Attributes:
    every: steps of reinforcement learning after which it is replaced by the present policy; 0 keeps
      the policy of the stage's start.
    of: name of the policy, "policy" or one that another seat trains.
  """

  every: NonNegativeInt = 10
  of: str = POLICY


@dataclasses.dataclass(unsafe_hash=True)
class CheckpointSeat(SeatConfig):
  """A policy on disk.

  Attributes:
    path: RUN, RUN/checkpoints/STEP, or a Hugging Face folder; it may be of another model and
      vocabulary.
    of: name of the policy in a run that trained several.
  """

  path: FilePath | None = None
  of: str = POLICY

  def validate(self, path: str = "seat") -> None:
    super().validate(path)
    check(self.path is not None, f"{path}.path", self.path, "RUN, RUN/checkpoints/STEP or a folder")

  def play(self, bank: Bank, name: str) -> SeatPlayer:
    assert self.path is not None
    engine, chat = bank.serve(str(self.path), self.of)
    return SeatPlayer(name, chat, engine)


@dataclasses.dataclass(unsafe_hash=True)
class TrainedSeat(SeatConfig):
  """A further policy of the run's model, with weights and an optimiser of its own.

  It learns from its own tokens by the run's objective, as "policy" learns from its own. Each has
  its own reference and its own networks of signals. ``rl.alternate`` says who learns when.

  Attributes:
    policy: its name in the record, the training state and the metrics. Seats that give the same
      name share one policy and have the same settings; "" is ``seat_AGENT``.
    start: what it is as reinforcement learning begins: a copy of "policy", "random", or what
      ``path`` holds.
    path: RUN or RUN/checkpoints/STEP of a run with the same model and vocabulary.
    of: name of the policy in that run.
    learning_rate: of its optimiser; all other settings are those of ``rl.optimizer``, and None
      takes its rate too.
  """

  policy: str = ""
  start: Literal["policy", "random", "checkpoint"] = "policy"
  path: FilePath | None = None
  of: str = POLICY
  learning_rate: PositiveFloat | None = None

  def validate(self, path: str = "seat") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      not self.policy or (self.policy.isidentifier() and self.policy != POLICY),
      "policy",
      f"an identifier that is not {POLICY!r}, or ''",
    )
    wanted = "RUN or RUN/checkpoints/STEP" if self.start == "checkpoint" else "none"
    require(
      (self.path is not None) == (self.start == "checkpoint"),
      "path",
      f"{wanted} with start={self.start!r}",
    )


def policy_names(seats: Mapping[str, SeatConfig]) -> dict[str, str]:
  """Agent -> name of the policy that plays it; seats with the same settings have one policy.

  The name is that in its settings, or else ``seat_AGENT`` with the first of its agents in
  alphabetical order.

  Raises:
    ConfigError: seats with different settings have policies of one name.
  """
  known: dict[SeatConfig, str] = {}
  for agent, config in sorted(seats.items()):
    own = config.policy if isinstance(config, TrainedSeat) else ""
    known.setdefault(config, own or f"seat_{agent}")
  names = {agent: known[config] for agent, config in sorted(seats.items())}
  for agent, name in names.items():
    if list(known.values()).count(name) > 1:
      raise ConfigError(
        f"config.seats.{agent} has a policy {name!r}, and so has a seat with other settings; "
        "allowed: one name for each policy (config.seats.AGENT.policy)."
      )
  return names


def check_seats(seats: Mapping[str, SeatConfig], path: str) -> None:
  """Raises ConfigError for equal names of policies, and for snapshots of a policy that is not
  trained."""
  known = (POLICY, *trained_seats(seats))
  for agent, seat in seats.items():
    if isinstance(seat, SnapshotSeat):
      check(
        seat.of in known, f"{path}.{agent}.of", seat.of, f"a trained policy, {', '.join(known)}"
      )


def trained_seats(seats: Mapping[str, SeatConfig]) -> dict[str, TrainedSeat]:
  """The policies that are trained beside "policy", by name in alphabetical order."""
  names = policy_names(seats)
  found = {names[a]: seat for a, seat in seats.items() if isinstance(seat, TrainedSeat)}
  return dict(sorted(found.items()))
