"""Episodes of one agent outside training: any player of a seat, in any environment."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import cast

from agentjax.engine import Engine
from agentjax.rollout import keys
from agentjax.rollout.program import (
  MakeEnvironment,
  Player,
  SharedPrefixes,
  run_episode,
)
from agentjax.rollout.seat_config import SeatConfig
from agentjax.rollout.seats import Seat, SeatPlayer, take_seats
from agentjax.schedules import at_end
from agentjax.text import ByteTokenizer
from agentjax.text.chat import Chat, MarkedChat
from agentjax.training.experiment import Experiment
from agentjax.training.model_pool import ModelPool
from agentjax.trajectory.record import POLICY, Reward, Task, Trajectory

PATIENCE = 1e9  # seconds that an environment may take where people are waited for


@dataclasses.dataclass(frozen=True)
class SeatedPlayer(Player):
  """A player of which one seat plays every agent; it may be a service, without an engine."""

  seat: SeatPlayer | None = None

  def take_seats(self, agents: Sequence[str], address: keys.Address) -> dict[str, Seat]:
    assert self.seat is not None
    return take_seats(agents, dataclasses.replace(self.seat, learns=True), {})


class SeatHost:
  """Players chosen by settings, and episodes that they play; a ``rollout.seat_config.Bank``.

  Args:
    experiment: resolved; its engine and mesh for policies on disk, its program, limits, draws and
      seed.

  Attributes:
    chat: of models that have no vocabulary of ours.
  """

  chat: Chat = MarkedChat(ByteTokenizer(), "json")

  def __init__(self, experiment: Experiment):
    self._experiment, self._pool = experiment, ModelPool(experiment)
    self._seats: dict[SeatConfig, SeatPlayer] = {}

  def serve(self, path: str, policy: str = POLICY) -> tuple[Engine, Chat]:
    """A policy on disk."""
    engine, chat, _ = self._pool.serve(path, policy)
    return engine, chat

  async def seat(self, config: SeatConfig) -> SeatPlayer:
    """The player of some settings, made once; a policy on disk is loaded."""
    if config not in self._seats:
      player = await asyncio.to_thread(config.play, self, POLICY)
      sampling = player.sampling or at_end(self._experiment.rl.sampling)
      self._seats[config] = dataclasses.replace(player, policy=POLICY, sampling=sampling)
    return self._seats[config]

  async def play(
    self, config: SeatConfig, task: Task, make_environment: MakeEnvironment
  ) -> Trajectory:
    """One episode, which takes as long as its environment likes; without a reward.

    Args:
      config: who plays.
      task: its id addresses the draws.
      make_environment: of one agent.
    """
    experiment, seat = self._experiment, await self.seat(config)
    limits = at_end(experiment.rollout)
    engine = cast(Engine, seat.engine)  # only the seat uses it, and it may be a service
    prefixes = SharedPrefixes(engine)
    assert seat.sampling is not None
    try:
      trajectory = await run_episode(
        experiment.rollout.program.build(),
        task,
        (0, task.id, 0),
        player=SeatedPlayer(
          engine=engine,
          chat=seat.chat,
          sampling=seat.sampling,
          config=dataclasses.replace(
            limits, environment_timeout=PATIENCE, episode_timeout=PATIENCE
          ),
          run_seed=experiment.seed,
          seat=seat,
        ),
        make_environment=make_environment,
        prefixes=prefixes,
      )
    finally:
      await prefixes.release()
    trajectory.reward = Reward.invalid("nobody judged it")
    return trajectory

  def close(self) -> None:
    """Frees the engines."""
    self._pool.close()
