"""The host-side parts of a run, built once from its config and the caller's extensions."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.config import ConfigError, check
from agentjax.data import TaskSplits, load_tasks
from agentjax.engine import Engine, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.names import Adopted, naming, wrong
from agentjax.rewards.config import build_rewards
from agentjax.rewards.graph import RewardGraph, Scorer
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout.group import Sampler
from agentjax.rollout.guards import guard_environments
from agentjax.rollout.program import EpisodeProgram, MakeEnvironment, Player
from agentjax.rollout.seats import SeatPlayer
from agentjax.sandbox.config import Sandboxes
from agentjax.schedules import at_end, at_most
from agentjax.text.answers import read_marked_answer
from agentjax.text.build import build_chat, marked_format
from agentjax.text.chat import Chat, conversation_texts
from agentjax.text.tokenizer import Tokenizer
from agentjax.tools.build import build_tools
from agentjax.tools.declared import declared_tools
from agentjax.tools.protocol import Tool
from agentjax.tools.registry import ToolRegistry
from agentjax.training.experiment import Experiment
from agentjax.training.pretrained import folder_fingerprint, pretrained_model
from agentjax.trajectory.artifacts import FOLDER, ArtifactStore
from agentjax.world.world import PlainWorld, Site, World


@dataclasses.dataclass(frozen=True)
class Extensions:
  """Parts that a caller adds to a config, or that replace parts of it; all optional.

  A config can name the same things by ``module:attribute`` (``tools.names``, ``data.source``,
  ``world``, ``reward.parts``, ``rollout.program``, ``rollout.sampler``); then the saved config
  describes the whole run.

  Attributes:
    tools: further tools, beside those the config names.
    tasks: replace those of ``config.data``.
    make_environment: makes the environment of a task; replaces that of ``config.world``.
    scorers: further scorers by name, which ``config.reward`` may then use.
    program: what happens in an episode; replaces ``config.rollout.program``.
    sampler: how the groups of training are made; replaces ``config.rollout.sampler``.
  """

  tools: Sequence[Tool] = ()
  tasks: TaskSplits | None = None
  make_environment: MakeEnvironment | None = None
  scorers: Mapping[str, Scorer] = dataclasses.field(default_factory=dict)
  program: EpisodeProgram | None = None
  sampler: Sampler | None = None


@dataclasses.dataclass(frozen=True)
class Scoring:
  """The parts that judge the episodes of a run; they need neither model nor vocabulary."""

  tasks: TaskSplits
  registry: ToolRegistry
  site: Site
  world: World
  rewards: RewardGraph

  async def start(self) -> None:
    """Starts the world; called on the event loop of the episodes, before the first of them."""
    await self.world.start(self.site)

  async def close(self) -> None:
    """Frees the resources of tools, environments and verifiers."""
    await self.world.close()
    await self.registry.close()
    await self.rewards.close()


@dataclasses.dataclass(frozen=True)
class Parts(Scoring):
  """Everything on the host side of a run."""

  experiment: Experiment
  model: ModelConfig  # with the vocabulary of the tokenizer, or as the pretrained folder says
  chat: Chat
  make_environment: MakeEnvironment
  program: EpisodeProgram
  sampler: Sampler | None  # of training; evaluations are independent

  @property
  def tools(self) -> tuple[Tool, ...]:
    """What every episode offers."""
    return self.world.tools

  @property
  def tokenizer(self) -> Tokenizer:
    """The vocabulary of ``chat``."""
    return self.chat.tokenizer

  @property
  def identity(self) -> dict[str, Any]:
    """What a checkpoint must match to be loaded here."""
    lora = self.experiment.lora
    return self.base_identity | ({} if lora is None else {"lora": lora.to_dict()})

  @property
  def base_identity(self) -> dict[str, Any]:
    """What a checkpoint must match for its whole policy to be taken over."""
    model = self.model.to_dict()
    # These say how it is computed, and what gradients reach.
    del model["exact_chunk"], model["frozen_router"]
    if model["mtp"] is not None:
      del model["mtp"]["detach"]
    identity = {"model": model, "tokenizer": self.chat.fingerprint()}
    if self.experiment.pretrained is None:
      return identity
    return identity | {"pretrained": folder_fingerprint(self.experiment.pretrained)}

  def player(
    self,
    engine: Engine,
    sampling: SamplingConfig,
    seed: int,
    seats: Mapping[str, SeatPlayer] | None = None,
  ) -> Player:
    """What plays an episode with these parts; schedules have their last number.

    Args:
      engine: of the policy.
      sampling: how its tokens are drawn.
      seed: of the run.
      seats: of a ``training.bank.PolicyBank``.

    Raises:
      ConfigError: ``config.seats`` names others, and ``seats`` is None.
    """
    if seats is None and self.experiment.seats:
      raise ConfigError(
        f"config.seats names {', '.join(sorted(self.experiment.seats))}; allowed: nobody here, "
        "where the policy plays every seat. Others play in training and evaluation."
      )
    return Player(
      engine=engine,
      chat=self.chat,
      sampling=at_end(sampling),
      config=at_end(self.experiment.rollout),
      run_seed=seed,
      seats=seats or {},
    )


def build_scoring(
  experiment: Experiment, extensions: Extensions, directory: pathlib.Path | None = None
) -> Scoring:
  """Loads tasks and builds tools, world and rewards, the world's scorers among them.

  Args:
    experiment: validated.
    extensions: what the caller brings.
    directory: of the run; None where nothing is kept.

  Raises:
    ConfigError: parts that do not fit each other.
    DataError: tasks that cannot be read.
  """
  sandboxes = Sandboxes(experiment.sandboxes)
  registry = build_tools(experiment.tools, extensions.tools, sandboxes)
  site = Site(
    registry,
    sandboxes,
    max_turns=at_most(experiment.rollout).max_turns,
    tool_timeout=experiment.tools.timeout,
    read_answer=read_marked_answer if experiment.rollout.answer == "marked" else str,
    folder=None if directory is None else directory / "world",
  )
  with naming(experiment.world.chosen, "config.world"):
    world = experiment.world.build(site)
  tasks = load_task_splits(experiment, extensions, world)
  if extensions.make_environment is not None:
    world = PlainWorld(extensions.make_environment, registry.tools, world)
  own = experiment.rollout.sampler.scorers
  scorers = {**SCORERS, **own, **world.scorers, **extensions.scorers}
  rewards = build_rewards(
    experiment.reward, scorers, sandboxes=sandboxes, group_scorers=world.group_scorers
  )
  return Scoring(tasks, registry, site, world, rewards)


def build_parts(
  experiment: Experiment, directory: pathlib.Path | None, extensions: Extensions
) -> Parts:
  """Loads tasks, trains or loads the tokenizer, builds tools, rewards and environments.

  Args:
    experiment: validated.
    directory: of the run: files that its world and its tools make, and a tokenizer trained on the
      tasks, are kept there.
    extensions: what the caller brings.

  Raises:
    ConfigError: parts that do not fit each other.
    DataError: tasks that cannot be read.
  """
  scoring = build_scoring(experiment, extensions, directory)
  if directory is not None:
    scoring.registry.artifacts = ArtifactStore(directory / FOLDER)
  tasks, registry, world = scoring.tasks, scoring.registry, scoring.world
  lines = itertools.chain.from_iterable(
    conversation_texts(
      (*task.prompt, *task.demonstration),
      tool_call_format=marked_format(experiment.chat),
      schemas={tool.name: tool.parameters for tool in declared_tools(task.metadata) or world.tools},
    )
    for task in tasks.train
  )
  chat = build_chat(
    experiment.chat,
    experiment.tokenizer,
    lines=itertools.chain([experiment.chat.system_prompt], lines),
    directory=directory,
    pretrained=experiment.pretrained,
  )
  if extensions.make_environment is None and not isinstance(experiment.world, Adopted):
    _check_prompts(experiment, chat, world.tools, tasks)
  if scoring.rewards.refuses:
    for task in itertools.chain(tasks.train, tasks.test):
      if (reason := scoring.rewards.refusal(task)) is not None:
        raise ConfigError(f"task {task.id} of {task.source!r} cannot be judged: {reason}.")
  return Parts(
    **vars(scoring),
    experiment=experiment,
    model=_model(experiment, chat.tokenizer),
    chat=chat,
    make_environment=guard_environments(
      world.environment, experiment.guards, registry, offered=world.tools
    ),
    program=extensions.program or experiment.rollout.program.build(),
    sampler=extensions.sampler or experiment.rollout.sampler.build(scoring.rewards),
  )


def load_task_splits(
  experiment: Experiment,
  extensions: Extensions,
  world: World,
) -> TaskSplits:
  """The tasks of a run: the caller's, those of ``config.data.source``, or the world's own.

  Args:
    experiment: validated.
    extensions: what the caller brings.
    world: of the run.

  Raises:
    ConfigError: settings that cannot be, or an evaluation without test tasks.
    DataError: tasks that cannot be read.
  """
  if extensions.tasks is not None:
    return extensions.tasks
  data, wanted = experiment.data, experiment.evaluation.tasks
  data.validate()
  maker = experiment.world if data.source is None else data.source
  path = "config.world" if data.source is None else "config.data.source"
  with naming(maker.chosen, path):
    tasks = load_tasks(data) if data.source is not None else world.tasks(data)
  if not isinstance(tasks, TaskSplits):
    raise wrong(maker.chosen, path, tasks, "one whose tasks are TaskSplits")
  check(
    bool(tasks.test) or not wanted,
    "config.evaluation.tasks",
    wanted,
    f"0, as {maker.chosen!r} has no test tasks",
  )
  return tasks


def _check_prompts(
  experiment: Experiment, chat: Chat, tools: Sequence[Tool], tasks: TaskSplits
) -> None:
  """Raises ConfigError for the first task that is played and whose prompt leaves no room."""
  limit = experiment.rollout.max_total_tokens
  train = tasks.train if experiment.rl.steps else ()
  for task in itertools.chain(train, tasks.test if experiment.evaluation.tasks else ()):
    offered = declared_tools(task.metadata) or tools
    length = sum(len(span.ids) for span in chat.prompt(task.prompt, offered))
    if length >= limit:
      raise ConfigError(
        f"the prompt of task {task.id} of {task.source!r} has {length} tokens; "
        f"config.rollout.max_total_tokens={limit} must exceed it (and engine.max_length, "
        "rl.row_length be at least that). Raise them or leave the task out."
      )


def _model(experiment: Experiment, tokenizer: Tokenizer) -> ModelConfig:
  """The policy's settings; for a pretrained folder its own, with ``RUNTIME_FIELDS`` on top."""
  model = experiment.model
  if experiment.pretrained is not None:
    model = pretrained_model(experiment.pretrained, model)
  if experiment.tokenizer.kind == "sentencepiece_from_tasks":
    return dataclasses.replace(model, vocab_size=tokenizer.vocab_size).freeze()
  if model.vocab_size < tokenizer.vocab_size:
    raise ConfigError(
      f"config.model.vocab_size={model.vocab_size}; allowed: at least {tokenizer.vocab_size}, the "
      f"size of the {tokenizer.name} vocabulary."
    )
  return model
