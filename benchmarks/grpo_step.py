"""Whole GRPO steps of one turn, timed part by part: publish, generate, update.

``benchmarks/rollout.py`` compares them with peers, ``benchmarks/gpu_suite.py`` with what a GPU can.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentjax import models
from agentjax.data import TaskSplits
from agentjax.engine import Engine, EngineConfig
from agentjax.objectives.objective import policy_objective
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig, collect
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.text.tool_calls import ParsedTurn
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage
from agentjax.training.build import Extensions, build_parts
from agentjax.training.experiment import resolve
from agentjax.training.learner import Learner
from agentjax.trajectory.record import Message, Task
from agentjax.world.environment import Action, Environment, Observation, Step

TOKENIZER = ByteTokenizer()
_MARKUP = 5  # tokens around the user's text


class NoEnvironment(Environment):
  """Answers at once, and ends after some turns."""

  def __init__(self, turns: int):
    self.left = turns

  async def reset(self, task: Task, key: int) -> Observation:
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    self.left -= 1
    if not self.left:
      return Step(Observation(()), terminated=True, answer="4")
    return Step(Observation((Message("tool", "ok"),)))

  def snapshot(self) -> bytes:
    return str(self.left).encode()

  def restore(self, state: bytes) -> None:
    self.left = int(state)


class SilentChat(MarkedChat):
  """Markup that no turn can end or break: every one has all its tokens."""

  def __init__(self, tokenizer: ByteTokenizer):
    super().__init__(tokenizer)
    self.stop_ids = ()
    self.reserved_ids = frozenset()

  def parse(self, turn: Sequence[int], tools: Any = ()) -> ParsedTurn:
    del turn, tools
    return ParsedTurn("", ())


@dataclasses.dataclass(frozen=True)
class StepSizes:
  """Of one step.

  Attributes:
    batch: episodes, in groups of ``group``.
    prompt, completion: tokens of each.
    lanes, chunk_tokens: as in EngineConfig.
    narrow: its cache_dtype and its weight_dtype.
    extend_rows: prompts that one dispatch takes in.
    rows: of a micro-batch, each of one episode; 0 is all.
  """

  batch: int
  group: int
  prompt: int
  completion: int
  lanes: int = 1
  chunk_tokens: int = 16
  narrow: str | None = None
  extend_rows: int = 2
  rows: int = 0

  @property
  def length(self) -> int:
    return self.prompt + self.completion


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """Wall and CPU seconds of the parts of a step, and the metrics of its update."""

  publish: tuple[float, float]
  generate: tuple[float, float]
  update: tuple[float, float]
  metrics: Mapping[str, float]


class GrpoSteps:
  """Runs whole steps on the first device; the reward counts vowels.

  Attributes:
    engine: which samples.
  """

  def __init__(self, config: models.ModelConfig, sizes: StepSizes) -> None:
    text = "q" * (sizes.prompt - _MARKUP)
    number = sizes.batch // sizes.group
    self._tasks = [Task(i, (Message("user", text),), "4", "made") for i in range(number)]
    self._sizes, self._number = sizes, 0
    experiment = Experiment(
      model=config,
      engine=EngineConfig(
        slots=sizes.batch,
        lanes=sizes.lanes,
        max_length=sizes.length,
        chunk_tokens=sizes.chunk_tokens,
        extend_buckets=(sizes.prompt,),
        extend_rows=(sizes.extend_rows,),
        cache_dtype=sizes.narrow,
        weight_dtype=sizes.narrow,
      ),
      reward=RewardConfig(parts=("vowels",), weights=(1.0,)),
      rollout=RolloutConfig(
        group_size=sizes.group,
        max_turns=1,
        max_tokens_per_turn=sizes.completion,
        max_total_tokens=sizes.length,
      ),
      rl=RLStage(
        steps=10**6,
        tasks_per_step=number,
        row_length=sizes.length,
        microbatch_rows=sizes.rows or sizes.batch,
        optimizer=OptimizerConfig(learning_rate=1e-4),
      ),
      evaluation=HeldOutConfig(tasks=0),
    )
    parts = build_parts(
      resolve(experiment),
      None,
      Extensions(
        tasks=TaskSplits(self._tasks, []),
        make_environment=lambda task: NoEnvironment(1),
        scorers={"vowels": _vowels},
      ),
    )
    self._parts = dataclasses.replace(parts, chat=SilentChat(TOKENIZER))
    self._learner = Learner(self._parts, policy_objective(experiment.rl.objective))
    self.engine = Engine(self._parts.model, experiment.engine, devices=jax.local_devices()[:1])
    self._player = self._parts.player(self.engine, experiment.rl.sampling, 0)
    self._state = self._learner.begin_rl(self._learner.initial_state("rl"))

  def __iter__(self) -> Iterator[StepTimes]:
    """One whole step each time, after one that compiles."""
    while True:
      start = _clock()
      self.engine.publish(self._learner.policy(self._state), self._number)
      publish, start = _since(start), _clock()
      trajectories = asyncio.run(
        collect(
          self._tasks,
          step=self._number,
          samples_per_task=self._sizes.group,
          player=self._player,
          make_environment=self._parts.make_environment,
          rewards=self._parts.rewards,
        )
      )
      generate, start = _since(start), _clock()
      self._state, metrics = self._learner.rl_step(self._state, trajectories, self._number)
      jax.block_until_ready(self._state)
      update = _since(start)
      self._number += 1
      if self._number > 1:
        yield StepTimes(publish, generate, update, metrics)

  def prefill(self, prompts: np.ndarray) -> float:
    """Wall seconds in which prompts [n, tokens] are taken in; weights must be published."""

    async def every() -> None:
      for prefix in await asyncio.gather(*map(self.engine.prefill, prompts)):
        prefix.release()

    start = _clock()
    asyncio.run(every())
    return _since(start)[0]

  def close(self) -> None:
    """Ends the engine."""
    self.engine.close()


def _clock() -> tuple[float, float]:
  return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> tuple[float, float]:
  now = _clock()
  return now[0] - start[0], now[1] - start[1]


def _vowels(trajectory: Any, task: Task) -> float:
  drawn = np.concatenate([s.token_ids[s.sampled] for s in trajectory.segments])
  return float(np.isin(drawn, TOKENIZER.encode("aeiou")).sum())
