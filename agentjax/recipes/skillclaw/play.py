"""Episodes with a library: days, replays of held-out tasks, and the models that are asked.

Who plays and who is asked is chosen by name, as for the seats of an episode
(``rollout.seat_config``): "service" is a model behind an endpoint, "checkpoint" a policy on disk,
``module:attribute`` one of your own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar, cast

from agentjax.adapters.chat_endpoint.endpoint import endpoint_identity
from agentjax.adapters.chat_endpoint.judge import HttpJudge
from agentjax.adapters.chat_endpoint.seat import ServiceSeat
from agentjax.adapters.engine_judge import EngineJudge
from agentjax.adapters.seat_host import SeatedPlayer
from agentjax.config import Config, ConfigError, check
from agentjax.engine import Engine, SamplingConfig
from agentjax.recipes.skillclaw.library import Entries
from agentjax.recipes.skillclaw.models import SkillModels
from agentjax.recipes.skillclaw.night import SkillClawConfig
from agentjax.recipes.skillclaw.retrieval import Retriever
from agentjax.recipes.skillclaw.world import SkilledEnvironment, SkillWorldConfig
from agentjax.rewards.judges import Judge, question_key
from agentjax.rollout import keys
from agentjax.rollout.loop import collect
from agentjax.rollout.seat_config import (
  CheckpointSeat,
  SeatConfig,
  SnapshotSeat,
  TrainedSeat,
)
from agentjax.rollout.seats import SeatPlayer
from agentjax.text import ByteTokenizer
from agentjax.text.chat import Chat, MarkedChat
from agentjax.threads import LoopThread
from agentjax.training.build import Extensions, Parts, build_parts
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import ModelPool
from agentjax.trajectory.record import POLICY, Task, Trajectory

T = TypeVar("T")


@dataclasses.dataclass(unsafe_hash=True)
class ModelsConfig(Config):
  """Who plays and who is asked; each is "service", "checkpoint" or ``module:attribute``.

  Attributes:
    player: plays days and replays. With "checkpoint", ``config.rl.sampling`` draws its tokens.
    writer: summarises sessions, proposes and merges skills.
    judge: grades sessions and proposals; none is the writer.
  """

  player: SeatConfig | None = None
  writer: SeatConfig | None = None
  judge: SeatConfig | None = None

  def validate(self, path: str = "models") -> None:
    super().validate(path)
    for name in ("player", "writer", "judge"):
      seat = getattr(self, name)
      check(
        not isinstance(seat, SnapshotSeat | TrainedSeat),
        f"{path}.{name}",
        getattr(seat, "chosen", None),
        "'service', 'checkpoint' or 'module:attribute'; nothing is trained here",
      )


class Stage:
  """Tasks, world and models of an experiment, opened for days and nights.

  Args:
    experiment: validated and frozen here; its data, world, reward, rollout and seed.
    models: validated.
    config: of the nights.
    extensions: may bring tasks and scorers, as in ``Run``.

  Raises:
    ConfigError: settings that cannot be.
    CheckpointError: no model to load.
    DataError: tasks that cannot be read.
  """

  def __init__(
    self,
    experiment: Experiment,
    models: ModelsConfig,
    config: SkillClawConfig,
    extensions: Extensions | None = None,
  ):
    if isinstance(experiment.world, SkillWorldConfig):
      raise ConfigError(
        f"config.world={experiment.world.chosen!r} has a library already; allowed: its inner "
        "world, as --library is shown here."
      )
    resolve(experiment)
    models.validate("models")
    self.experiment, self._models, self._config = experiment, models, config
    self.parts: Parts = build_parts(experiment, None, extensions or Extensions())
    self._pool, self._runner = ModelPool(experiment), LoopThread()
    self._started = False
    self._player: SeatPlayer | None = None
    try:
      if models.player is not None:
        self._player = self._seat(models.player, POLICY)
    except BaseException:
      self.close()
      raise

  # As a ``rollout.seat_config.Bank``.

  @property
  def chat(self) -> Chat:
    """Of the episodes that are stored."""
    return self.parts.chat if self._player is None else self._player.chat

  def serve(self, path: str, policy: str = POLICY) -> tuple[Engine, Chat]:
    """A policy on disk."""
    engine, chat, _ = self._pool.serve(path, policy)
    return engine, chat

  def _seat(self, config: SeatConfig, name: str) -> SeatPlayer:
    player = config.play(self, name)
    sampling = player.sampling or self.experiment.rl.sampling
    return dataclasses.replace(player, policy=POLICY, sampling=sampling)

  def identity(self, name: str) -> Any:
    """Plain JSON that tells a model from others."""
    config: SeatConfig | None = getattr(self._models, name)
    if isinstance(config, CheckpointSeat):
      return {"use": config.chosen, "policy": self._pool.serve(str(config.path), config.of)[2]}
    return seat_identity(config)

  def models(self) -> SkillModels:
    """The models of a night, each with its temperature.

    Raises:
      ConfigError: no writer.
    """
    return open_models(self._models, self._config, self, self.experiment.seed)

  # Playing.

  def play(self, tasks: Sequence[Task], entries: Entries, *, samples: int, step: int, held_out: bool
  ) -> list[Trajectory]:  # fmt: skip
    """Episodes of the player with a library, scored, in the order of their addresses."""
    return self.run(self._play(tasks, entries, samples=samples, step=step, held_out=held_out))

  async def replay(self, entries: Entries, night: int) -> list[float | None]:
    """Mean rewards, cut to 0 to 1, of the held-out cases of a night; see ``night.Replay``.

    Each night has its own cases, chosen by the seed, and its own draws.

    Raises:
      ConfigError: nobody plays, or there are too few tasks.
    """
    tasks = cases(self.parts.tasks.test, self._config.cases, self.experiment.seed, night)
    episodes = await self._play(
      tasks, entries, samples=self._config.samples, step=night, held_out=True
    )
    rewards: dict[int, list[float]] = {task.id: [] for task in tasks}
    for episode in episodes:
      if episode.reward.value is not None:
        rewards[episode.task_id].append(min(1.0, max(0.0, episode.reward.value)))
    return [sum(r) / len(r) if (r := rewards[task.id]) else None for task in tasks]

  async def _play(
    self, tasks: Sequence[Task], entries: Entries, *, samples: int, step: int, held_out: bool
  ) -> list[Trajectory]:
    seat, experiment = self._player, self.experiment
    if seat is None:
      raise ConfigError(
        "--models.player=none; allowed: who plays the tasks, 'service', 'checkpoint' or "
        "'module:attribute'."
      )
    retriever, make = Retriever(entries, self._config.retrieval), self.parts.make_environment
    player = SeatedPlayer(
      engine=cast(Engine, seat.engine),  # only seats use it, and the seat is no engine's then
      chat=seat.chat,
      sampling=seat.sampling or SamplingConfig(),
      config=experiment.rollout,
      run_seed=keys.evaluation_seed(experiment.seed) if held_out else experiment.seed,
      seat=seat,
    )
    if not self._started:
      self._started = True
      await self.parts.start()
    return await collect(
      tasks,
      step=step,
      samples_per_task=samples,
      player=player,
      make_environment=lambda task: SkilledEnvironment(make(task), retriever),
      rewards=self.parts.rewards,
      program=self.parts.program,
    )

  def run(self, work: Coroutine[Any, Any, T]) -> T:
    """Blocks until a coroutine has ended, on the loop of the episodes."""
    return self._runner.run(work)

  def close(self) -> None:
    """Frees tasks, tools and engines."""
    self._runner.run(self.parts.close())
    self._runner.close()
    self._pool.close()


def cases(tasks: Sequence[Task], count: int, seed: int, night: int) -> list[Task]:
  """The held-out tasks of a night.

  Raises:
    ConfigError: there are too few.
  """
  if len(tasks) < count:
    raise ConfigError(
      f"config.data has {len(tasks)} held-out tasks and skills.cases={count}; raise "
      "config.data.test_size, or lower skills.cases."
    )
  order = sorted(tasks, key=lambda task: question_key(seed, "case", night, task.id))
  return sorted(order[:count], key=lambda task: task.id)


def seat_identity(config: SeatConfig | None) -> Any:
  """Plain JSON that tells a model from others, by its settings."""
  if isinstance(config, ServiceSeat):
    return {"use": config.chosen, **endpoint_identity(config.endpoint)}
  return None if config is None else config.to_dict()


class NoBank:
  """For models that need no policy of ours."""

  chat: Chat = MarkedChat(ByteTokenizer())

  def serve(self, path: str, policy: str = POLICY) -> tuple[Engine, Chat]:
    raise ConfigError(f"{path} is a policy on disk; give --config=FILE, whose engine serves it.")


def open_models(
  models: ModelsConfig, config: SkillClawConfig, bank: Stage | NoBank, seed: int
) -> SkillModels:
  """The models of a night, each with its temperature.

  Args:
    models: validated.
    config: temperatures and sizes of replies.
    bank: serves policies on disk.
    seed: of the draws of policies.
  """
  writer, judge = models.writer, models.judge or models.writer
  if writer is None or judge is None:
    raise ConfigError(
      "--models.writer=none; allowed: who writes skills, 'service', 'checkpoint' or "
      "'module:attribute'."
    )

  def opened(seat: SeatConfig, name: str, temperature: float, tokens: int) -> Judge:
    if isinstance(seat, ServiceSeat):
      return HttpJudge(
        dataclasses.replace(seat.endpoint, temperature=temperature, max_tokens=tokens)
      )
    player = seat.play(bank, name)
    if player.service is not None:
      return player.service
    assert player.engine is not None
    sampling = SamplingConfig(temperature=temperature)
    return EngineJudge(player.engine, player.chat, sampling, max_tokens=tokens, seed=seed)

  short, long = config.reply_tokens, config.edit_tokens
  return SkillModels(
    summarise=opened(writer, "writer", config.summary_temperature, short),
    evolve=opened(writer, "writer", config.edit_temperature, long),
    merge=opened(writer, "writer", config.merge_temperature, long),
    grade=opened(judge, "judge", config.judge_temperature, short),
    verify=opened(judge, "judge", config.judge_temperature, short),
  )
