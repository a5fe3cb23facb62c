"""Who plays the seats of an episode beside the policy: settings, chosen by name for each agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from agentjax.config import FilePath, check
from agentjax.engine.engine import Engine
from agentjax.names import Choice
from agentjax.rollout.seats import SeatPlayer
from agentjax.text.chat import Chat

_HERE = "agentjax.rollout.seat_config"


class Bank(Protocol):
  """What a run has for the players of its seats."""

  @property
  def chat(self) -> Chat:
    """Of the policy that is trained."""
    ...

  def serve(self, path: str) -> tuple[Engine, Chat]:
    """A policy on disk: RUN, RUN/checkpoints/STEP or a Hugging Face folder; loaded once."""
    ...


@dataclasses.dataclass(unsafe_hash=True)
class SeatConfig(Choice):
  """Who plays a seat; nothing of what it writes carries loss.

  Built in are "snapshot" (the policy of an earlier step), "checkpoint" (a policy on disk) and
  "service" (a model behind an endpoint). One of your own defines ``play``.
  """

  group = "agentjax.seats"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {
      "snapshot": f"{_HERE}:SnapshotSeat",
      "checkpoint": f"{_HERE}:CheckpointSeat",
      "service": "agentjax.adapters.chat_endpoint.seat:ServiceSeat",
    }

  @property
  def snapshot_every(self) -> int | None:
    """Steps between copies of the policy that it plays with; None where it plays with none."""
    return None

  def play(self, bank: Bank, name: str) -> SeatPlayer:
    """The player, under ``name`` in the record; called once a run, before any episode."""
    raise NotImplementedError(f"{type(self).__name__} must define play()")


@dataclasses.dataclass(unsafe_hash=True)
class SnapshotSeat(SeatConfig):
  """The policy as it was: self-play against an earlier self.

  Attributes:
    every: steps of reinforcement learning after which it becomes the present policy; 0 leaves it
      as the stage began.
  """

  every: int = 10

  def validate(self, path: str = "seat") -> None:
    super().validate(path)
    check(self.every >= 0, f"{path}.every", self.every, ">= 0")

  @property
  def snapshot_every(self) -> int | None:
    return self.every


@dataclasses.dataclass(unsafe_hash=True)
class CheckpointSeat(SeatConfig):
  """A policy on disk.

  Attributes:
    path: RUN, RUN/checkpoints/STEP, or a Hugging Face folder; it may be of another model and
      vocabulary.
  """

  path: FilePath | None = None

  def validate(self, path: str = "seat") -> None:
    super().validate(path)
    check(self.path is not None, f"{path}.path", self.path, "RUN, RUN/checkpoints/STEP or a folder")

  def play(self, bank: Bank, name: str) -> SeatPlayer:
    assert self.path is not None
    engine, chat = bank.serve(str(self.path))
    return SeatPlayer(name, chat, engine)
