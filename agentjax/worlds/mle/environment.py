r"""Machine-learning engineering with partial credit for milestones.

The policy runs Python on ``train.csv`` and ``test.csv`` in its folder; what counts is the file
``submission.csv`` that it leaves. The labels of the test rows never enter the sandbox: the file is
read and measured on the host, where no code of the policy runs. So a policy cannot claim a
milestone that it has not reached, in the spirit of the frozen instrumentation of 2509.01684:

  mle_submitted         there is a submission with the header id,target
  mle_loaded            it names at least half of the test rows, whose ids are only in test.csv
  mle_valid             it answers every test row once, and nothing else, with a finite number or a
                        target that occurs in training
  mle_beats_constant    valid, and a quarter of the way from the best constant answer to the strong
                        one, which guessing seldom goes
  mle_beats_strong      valid, and at least as good as the strong answer
  mle_score             0 at that quarter, 1 at the strong answer, linear between, clipped

The first three only check the form: give them small weights, or put them behind a gate.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping

from agentjax.config import AtLeastTwo, ConfigError, check
from agentjax.data import DataConfig, TaskSplits
from agentjax.rewards.graph import Scorer
from agentjax.tools.build import ToolsConfig
from agentjax.tools.registry import ToolRegistry
from agentjax.tools.workspace import WorkspaceConfig, Workspaces
from agentjax.trajectory.record import Reward, Status, Task, Trajectory
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Environment
from agentjax.world.workspace import WorkspaceEnvironment
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.mle.cheats import mle_cheats
from agentjax.worlds.mle.tasks import MleTaskConfig
from agentjax.worlds.mle.tool import WorkspacePythonTool

SUBMISSION = "submission.csv"
_LUCK = 0.25  # of the way from constant to strong; ours


@dataclasses.dataclass(unsafe_hash=True)
class MleWorldConfig(WorldConfig):
  """Settings of machine-learning engineering; the figures are ours.

  Attributes:
    workspace: folders of the episodes.
    packages: what programs may import beyond the standard library; the embedded sandbox loads it.
    tasks: the data sets, generated or in the folder ``config.data.path``.
    shown_characters: of output, half from the head and half from the tail.
    max_submission_bytes: a larger submission is none.
  """

  workspace: WorkspaceConfig = dataclasses.field(
    default_factory=lambda: WorkspaceConfig(max_bytes=2**25, max_files=500)
  )
  packages: tuple[str, ...] = ("numpy",)
  tasks: MleTaskConfig = dataclasses.field(default_factory=MleTaskConfig)
  shown_characters: AtLeastTwo = 2000
  max_submission_bytes: AtLeastTwo = 2**20

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    if data.source is None:
      self.tasks.check_data(data, f"{path}.data")
    check(
      "python" not in tools.names,
      f"{path}.tools.names",
      tools.names,
      "no 'python' in the world 'mle', which brings its own",
    )

  def build(self, site: Site) -> World:
    return MleWorld(self, site)


@dataclasses.dataclass(frozen=True)
class Milestones:
  """How far a submission got; each is 0 or 1 but the score, 0..1."""

  submitted: float = 0.0
  loaded: float = 0.0
  valid: float = 0.0
  beats_constant: float = 0.0
  beats_strong: float = 0.0
  score: float = 0.0


def judge_submission(task: Task, submission: str | None) -> Milestones:
  """The milestones that a submission reaches; see the module."""
  if submission is None:
    return Milestones()
  labels: Mapping[str, str] = task.metadata["labels"]
  metric = task.metadata["metric"]
  try:
    reader = csv.reader(io.StringIO(submission))
    header = [name.strip() for name in next(reader, [])]
    rows = [[cell.strip() for cell in row] for row in reader if row]
  except csv.Error:
    return Milestones()
  if header != ["id", "target"]:
    return Milestones()
  named = {row[0] for row in rows} & set(labels)
  loaded = float(2 * len(named) >= len(labels))
  if len(rows) != len(labels) or len(named) != len(labels) or any(len(r) != 2 for r in rows):
    return Milestones(1.0, loaded)
  answers = {row[0]: row[1] for row in rows}
  if metric == "rmse":
    numbers = {i: _number(text) for i, text in answers.items()}
    known = all(math.isfinite(number) for number in numbers.values())
  else:
    targets = {row["target"] for row in csv.DictReader(io.StringIO(_train(task)))}
    known = set(answers.values()) <= targets
  if not known:
    return Milestones(1.0, loaded)
  constant, strong = task.metadata["constant"], task.metadata["strong"]
  if metric == "rmse":
    value = math.sqrt(
      math.fsum((numbers[i] - float(label)) ** 2 for i, label in labels.items()) / len(labels)
    )
  else:
    value = sum(answers[i] == label for i, label in labels.items()) / len(labels)
  share = (value - constant) / (strong - constant)
  score = min(1.0, max(0.0, (share - _LUCK) / (1 - _LUCK)))
  return Milestones(1.0, loaded, 1.0, float(share >= _LUCK), float(share >= 1), score)


class MleWorld(World):
  """Episodes with the tool ``python`` on the task's files, beside the tools of the run.

  Scorers: those of the module's list.

  Raises:
    ConfigError: the run has a tool ``python`` of its own.
  """

  def __init__(self, config: MleWorldConfig, site: Site):
    if "python" in site.registry.schemas:
      raise ConfigError(
        "config.tools.names holds 'python' in the world 'mle', which brings a tool of that name "
        "that works on the task's files; take it out of config.tools.names"
      )
    self._config, self._site = config, site
    lease = site.lease(
      config.workspace.sandbox, "config.world.workspace.sandbox", packages=config.packages
    )
    self._workspaces = Workspaces(lease.sandbox, lease.limits, config.workspace)
    python = WorkspacePythonTool(self._workspaces, config.shown_characters)
    self._registry = ToolRegistry([python, *site.registry.tools], timeout=site.tool_timeout)
    self.tools = self._registry.tools
    names = [field.name for field in dataclasses.fields(Milestones)]
    self.scorers = {f"mle_{name}": _scorer(name) for name in names}

  def tasks(self, data: DataConfig) -> TaskSplits:
    return self._config.tasks.load(data, self._site.folder)

  def environment(self, task: Task) -> Environment:
    return WorkspaceEnvironment(
      self._registry,
      self._workspaces,
      files=lambda task: {p: t.encode() for p, t in task.metadata["files"].items()},
      hand_in=self._hand_in,
      max_turns=self._site.max_turns,
      tool_timeout=self._site.tool_timeout,
    )

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return mle_cheats(task, setting)

  async def close(self) -> None:
    await self._workspaces.close()

  def _hand_in(self, files: Mapping[str, bytes]) -> str | None:
    content = files.get(SUBMISSION)
    if content is None or len(content) > self._config.max_submission_bytes:
      return None
    return content.decode("utf-8", "replace")


def _scorer(name: str) -> Scorer:
  def score(trajectory: Trajectory, task: Task) -> Reward:
    failed = trajectory.status is Status.POLICY_ERROR
    milestones = judge_submission(task, None if failed else trajectory.answer)
    return Reward(getattr(milestones, name))

  return score


def _train(task: Task) -> str:
  return task.metadata["files"]["train.csv"]


def _number(text: str) -> float:
  """The number of a cell; NaN where it is none, or too large to be squared."""
  try:
    number = float(text)
  except ValueError:
    return math.nan
  return number if abs(number) < 1e100 else math.nan
