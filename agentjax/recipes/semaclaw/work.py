"""Rewards of single seats: what each agent did, and what each handed in."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections.abc import Callable

from agentjax.adapters.unit_tests.scorer import UnitTestConfig
from agentjax.config import check
from agentjax.names import check_name, load
from agentjax.rewards.graph import Score, Scorer, TurnScores
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.tools.protocol import ToolStatus
from agentjax.trajectory.record import Status, Task, Trajectory

HAND_IN = "hand_in"  # record of the result of a task, with the worker as its author
WRITE_GRAPH = "create_parent"  # the tool, and so the record, of a graph that the orchestrator wrote


def score_work(trajectory: Trajectory, task: Task) -> float:
  """A seat's share of accepted work: of an orchestrator its graphs, of a worker its tasks.

  A graph counts where it could be run, a task where it ended with "done". 0 without any, and after
  a policy error.
  """
  del task
  work = [record for record in trajectory.tools if record.name in (HAND_IN, WRITE_GRAPH)]
  if not work or trajectory.status is Status.POLICY_ERROR:
    return 0.0
  return sum(record.status == ToolStatus.OK for record in work) / len(work)


@dataclasses.dataclass(unsafe_hash=True)
class HandInConfig(ScorerConfig):
  """The part that judges each seat by its own answer: a worker by the last result it handed in.

  Attributes:
    inner: judges an answer.
    read: ``module:attribute`` of a function that reads the answer in a result: text -> answer, or
      None where it holds none.
    agents: globs of the agents that are judged by their own results; all others by the answer of
      the team.
  """

  inner: ScorerConfig = dataclasses.field(default_factory=UnitTestConfig)
  read: str = "agentjax.worlds.code.code_block:read_code"
  agents: tuple[str, ...] = ("*",)

  def validate(self, path: str = "config.reward.settings.hand_in") -> None:
    super().validate(path)
    check_name(self.read, f"{path}.read")
    check(bool(self.agents), f"{path}.agents", self.agents, "at least one glob")

  def build(self, sandboxes: Sandboxes) -> Scorer:
    read = load(self.read, "HandInConfig.read", "a function of a text")
    return HandInScorer(self.inner.build(sandboxes), read, self.agents)


class HandInScorer:
  """See HandInConfig.

  Args:
    inner: judges answers.
    read: reads them.
    agents: globs.
  """

  def __init__(
    self, inner: Scorer, read: Callable[[str], str | None], agents: tuple[str, ...] = ("*",)
  ):
    self._inner, self._read, self._agents = inner, read, agents

  async def __call__(self, trajectory: Trajectory, task: Task) -> Score | TurnScores:
    agent = trajectory.segments[0].agent if trajectory.segments else ""
    own = [record for record in trajectory.tools if record.name == HAND_IN]
    if own and any(fnmatch.fnmatchcase(agent, glob) for glob in self._agents):
      last = own[-1]
      answer = self._read(last.output) if last.status == ToolStatus.OK else None
      trajectory = dataclasses.replace(trajectory, answer=answer)
    found = self._inner(trajectory, task)
    return await found if inspect.isawaitable(found) else found

  async def close(self) -> None:
    """Closes the inner scorer."""
    closing = getattr(self._inner, "close", None)
    outcome = None if closing is None else closing()
    if inspect.isawaitable(outcome):
      await outcome
