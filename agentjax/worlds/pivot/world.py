"""The world of single turns of recorded conversations."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from agentjax.config import check
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.tools.build import ToolsConfig
from agentjax.trajectory.record import Task
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Environment
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.pivot.cheats import pivot_cheats
from agentjax.worlds.pivot.environment import PivotEnvironment
from agentjax.worlds.pivot.tasks import pivot_tasks
from agentjax.worlds.pivot.verifier import PivotScorer, PivotVerifierConfig


@dataclasses.dataclass(unsafe_hash=True)
class PivotWorldConfig(WorldConfig):
  """One turn of a recorded conversation, whose tools are not run.

  Its tasks are ``pivots.jsonl`` in the folder ``config.data.path``, and perhaps ``test.jsonl``.

  Attributes:
    verifier: what the reward part "pivot" takes for the same action as the expert's.
  """

  verifier: PivotVerifierConfig = dataclasses.field(default_factory=PivotVerifierConfig)

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    if data.source is None:
      allowed = f"the folder that the world 'pivot' reads; set --{path}.data.path=DIR"
      check(bool(data.path), f"{path}.data.path", data.path, allowed)

  def build(self, site: Site) -> World:
    return PivotWorld(self)


class PivotWorld(World):
  """Episodes of one turn; the scorer "pivot" judges it."""

  def __init__(self, config: PivotWorldConfig):
    self._kind = config.verifier.kind
    self.scorers = {"pivot": PivotScorer(config.verifier)}

  def tasks(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    train = pivot_tasks(os.path.join(data.path, "pivots.jsonl"), limit=data.train_size)
    held_out = os.path.join(data.path, "test.jsonl")
    if not os.path.exists(held_out):
      return TaskSplits(train, [])
    return TaskSplits(train, pivot_tasks(held_out, first_id=FIRST_TEST_ID, limit=data.test_size))

  def environment(self, task: Task) -> Environment:
    return PivotEnvironment()

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return pivot_cheats(task, self._kind)
