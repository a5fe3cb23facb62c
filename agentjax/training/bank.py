"""The bank of policies beside "policy": the engines of snapshots, trained and loaded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentjax.engine import Engine
from agentjax.models import Params
from agentjax.rollout.seat_config import SeatConfig, SnapshotSeat, TrainedSeat, policy_names
from agentjax.rollout.seats import SeatPlayer
from agentjax.text.chat import Chat
from agentjax.training.build import Parts
from agentjax.training.model_pool import ModelPool
from agentjax.trajectory.record import POLICY


class PolicyBank:
  """Serves the policies that ``config.seats`` names; seats with the same settings share one.

  Each policy has its own engine, or, with adapters, its part of one engine that all share
  (``evaluation.build_engines``). Policies on disk are loaded when the bank is made.

  Args:
    parts: host-side parts of the run.
    first_step: of reinforcement learning, when snapshots begin.
    make_engine: for a policy of the run's own model.

  Attributes:
    chat: of the policies of the run.
    seats: who plays, by agent.
  """

  def __init__(self, parts: Parts, first_step: int, make_engine: Callable[[Parts], Engine]):
    experiment = parts.experiment
    self.chat: Chat = parts.chat
    self._first, self._make_engine = first_step, make_engine
    self._pool = ModelPool(experiment)
    self._snapshots: dict[str, Engine] = {}
    self._every: dict[str, int] = {}
    self._trained: dict[str, Engine] = {}
    players: dict[str, SeatPlayer] = {}
    names = policy_names(experiment.seats)
    try:
      for agent, config in sorted(experiment.seats.items()):
        name = names[agent]
        if name not in players:
          players[name] = self._player(parts, config, name)
    except BaseException:
      self.close()
      raise
    self.seats: Mapping[str, SeatPlayer] = {a: players[name] for a, name in names.items()}

  def _player(self, parts: Parts, config: SeatConfig, name: str) -> SeatPlayer:
    if isinstance(config, TrainedSeat):
      self._trained[name] = self._make_engine(parts)
      return SeatPlayer(name, self.chat, self._trained[name], learns=True)
    if not isinstance(config, SnapshotSeat):
      return config.play(self, name)
    self._every[name], self._snapshots[name] = config.every, self._make_engine(parts)
    return SeatPlayer(name, self.chat, self._snapshots[name])

  def serve(self, path: str, policy: str = POLICY) -> tuple[Engine, Chat]:
    """Engine and markup of a policy on disk, by its name in the run.

    Raises:
      CheckpointError: there is nothing to load.
      ConfigError: its vocabulary has changed since it was made.
    """
    engine, chat, _ = self._pool.serve(path, policy)
    return engine, chat

  def due(self, step: int) -> tuple[str, ...]:
    """Snapshots that become the present policy as ``step`` begins."""
    return tuple(name for name in self._snapshots if self._version(name, step) == step)

  def publish(
    self, step: int, params: Callable[[str], Params], *, version: int | None = None
  ) -> None:
    """Gives the engines the weights of ``step``, unless they have them already.

    Args:
      step: which episodes are to be sampled for.
      params: of a snapshot or a trained policy, by name.
      version: number of the trained policies' weights; None is ``step``, which begins with them.
    """
    wanted = {name: self._version(name, step) for name in self._snapshots}
    wanted |= dict.fromkeys(self._trained, step if version is None else version)
    for name, engine in {**self._snapshots, **self._trained}.items():
      if engine.version != wanted[name]:
        engine.publish(params(name), wanted[name])

  @property
  def engines(self) -> tuple[Engine, ...]:
    """Those that get weights from the run."""
    return (*self._snapshots.values(), *self._trained.values())

  def close(self) -> None:
    """Ends the engines."""
    self._pool.close()
    for engine in self.engines:
      engine.close()

  def _version(self, name: str, step: int) -> int:
    """The step at which the snapshot was taken that is used in ``step``.

    Before the stage the snapshot is the present policy and has a number of its own.
    """
    since, every = step - self._first, self._every[name]
    if since < 0:
      return step
    return self._first + (since // every * every if every else 0)
