"""The host-side parts of a run, built once from its config and what the caller brings along."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.config import ConfigError
from agentjax.data import TaskSplits, load_tasks
from agentjax.engine import Engine, SamplingConfig
from agentjax.envs.environment import Environment
from agentjax.envs.question import QuestionEnvironment
from agentjax.models import ModelConfig
from agentjax.rewards.config import build_rewards
from agentjax.rewards.graph import RewardGraph, Scorer
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout.program import EpisodeProgram, MakeEnvironment, Player, tool_episode
from agentjax.text.chat import conversation_texts, encode_prompt
from agentjax.text.tokenizer import Tokenizer, build_tokenizer
from agentjax.tools.build import build_tools
from agentjax.tools.protocol import Tool
from agentjax.tools.registry import ToolRegistry
from agentjax.training.experiment import Experiment
from agentjax.trajectory.record import Task


@dataclasses.dataclass(frozen=True)
class Extensions:
  """What a caller adds to or puts in the place of a config's parts; all optional.

  Attributes:
    tools: further tools, beside those the config names.
    tasks: tasks in the place of ``config.data``.
    make_environment: environment of a task, in the place of questions with tools.
    scorers: further scorers by name, which ``config.reward`` may then use.
    program: what an episode does, in the place of the tool loop.
  """

  tools: Sequence[Tool] = ()
  tasks: TaskSplits | None = None
  make_environment: MakeEnvironment | None = None
  scorers: Mapping[str, Scorer] = dataclasses.field(default_factory=dict)
  program: EpisodeProgram = tool_episode


@dataclasses.dataclass(frozen=True)
class Parts:
  """Everything on the host side of a run."""

  experiment: Experiment
  model: ModelConfig  # with the vocabulary of the tokenizer
  tokenizer: Tokenizer
  tasks: TaskSplits
  registry: ToolRegistry
  rewards: RewardGraph
  make_environment: MakeEnvironment
  program: EpisodeProgram

  @property
  def identity(self) -> dict[str, Any]:
    """What a checkpoint must match to be loaded here."""
    return {"model": self.model.to_dict(), "tokenizer": self.tokenizer.fingerprint()}

  def player(self, engine: Engine, sampling: SamplingConfig, seed: int) -> Player:
    """What plays an episode with these parts."""
    return Player(
      engine=engine,
      tokenizer=self.tokenizer,
      chat=self.experiment.chat,
      sampling=sampling,
      config=self.experiment.rollout,
      run_seed=seed,
    )


def build_parts(
  experiment: Experiment, directory: pathlib.Path | None, extensions: Extensions
) -> Parts:
  """Loads tasks, trains or loads the tokenizer, builds tools, rewards and environments.

  Args:
    experiment: validated.
    directory: where a tokenizer trained on the tasks is kept.
    extensions: what the caller brings.

  Raises:
    ConfigError: parts that do not fit each other.
    DataError: tasks that cannot be read.
  """
  tasks = load_tasks(experiment.data) if extensions.tasks is None else extensions.tasks
  registry = build_tools(experiment.tools, extensions.tools)
  lines = itertools.chain.from_iterable(
    conversation_texts(
      (*task.prompt, *task.demonstration),
      tool_call_format=experiment.chat.tool_call_format,
      schemas=registry.schemas,
    )
    for task in tasks.train
  )
  tokenizer = build_tokenizer(experiment.tokenizer, lines=lines, directory=directory)
  rollout, timeout = experiment.rollout, experiment.tools.timeout

  def question(task: Task) -> Environment:
    del task
    return QuestionEnvironment(registry, max_turns=rollout.max_turns, tool_timeout=timeout)

  if extensions.make_environment is None:
    _check_prompts(experiment, tokenizer, tasks)
  return Parts(
    experiment=experiment,
    model=_with_vocabulary(experiment, tokenizer),
    tokenizer=tokenizer,
    tasks=tasks,
    registry=registry,
    rewards=build_rewards(experiment.reward, {**SCORERS, **extensions.scorers}),
    make_environment=extensions.make_environment or question,
    program=extensions.program,
  )


def _check_prompts(experiment: Experiment, tokenizer: Tokenizer, tasks: TaskSplits) -> None:
  """Raises ConfigError for the first task whose prompt leaves no room to answer."""
  limit = experiment.rollout.max_total_tokens
  for task in itertools.chain(tasks.train, tasks.test):
    spans = encode_prompt(tokenizer, task.prompt)
    length = sum(len(span.ids) for span in spans)
    if length >= limit:
      raise ConfigError(
        f"the prompt of task {task.id} of {task.source!r} has {length} tokens; "
        f"config.rollout.max_total_tokens={limit} must exceed it (and engine.max_length, "
        "rl.row_length be at least that). Raise them or leave the task out."
      )


def _with_vocabulary(experiment: Experiment, tokenizer: Tokenizer) -> ModelConfig:
  model = experiment.model
  if experiment.tokenizer.kind == "sentencepiece_from_tasks":
    return dataclasses.replace(model, vocab_size=tokenizer.vocab_size).freeze()
  if model.vocab_size < tokenizer.vocab_size:
    raise ConfigError(
      f"config.model.vocab_size={model.vocab_size}; allowed: at least {tokenizer.vocab_size}, the "
      f"size of the {tokenizer.name} tokenizer."
    )
  return model
