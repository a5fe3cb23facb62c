r"""The process reward of written steps against a graph of dependencies.

    penalty = wrong values + wrong dependencies + missing quantities + min(further ones, n)
              + 1 if the last quantity is not the one that is asked for
    process = max(0, 1 - penalty / n),   n = quantities of the graph

Combine it as ``0.2 * right + 0.8 * process if right >= 1 else 0`` (2512.07783).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from agentjax.rewards.answers import answers_equal
from agentjax.rewards.graph import Scorer
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.text.answers import read_marked_answer
from agentjax.trajectory.record import Status, Task, Trajectory

_LINE = re.compile(r"([a-z]) = (?:([^=\n]+) = )?(-?\d{1,9})")
_NAME = re.compile(r"\b[a-z]\b")


@dataclasses.dataclass(unsafe_hash=True)
class GraphConfig(ScorerConfig):
  """How far the lines of the last turn are the steps of the task's graph, 0..1.

  Use it with ``rollout.answer`` "text". A policy error gets 0, and so does a task without a graph
  that cannot be judged: a run with such a task does not begin.

  Attributes:
    strict: anything that is not as in the graph gives 0.
  """

  strict: bool = False

  def build(self, sandboxes: Sandboxes) -> Scorer:
    """See ``ScorerConfig.build``."""
    return GraphScorer(self)


class GraphScorer:
  """The scorer of a ``GraphConfig``."""

  def __init__(self, config: GraphConfig):
    self._config = config

  def refusal(self, task: Task) -> str | None:
    """A task without a graph cannot be judged."""
    known = task.metadata.get("graph") and task.metadata.get("asked")
    return None if known else "its metadata has no 'graph' and 'asked'"

  def __call__(self, trajectory: Trajectory, task: Task) -> float:
    if trajectory.answer is None or trajectory.status is Status.POLICY_ERROR:
      return 0.0
    score = process_score(trajectory.answer, task.metadata["graph"], task.metadata["asked"])
    return float(score >= 1) if self._config.strict else score


def right(trajectory: Trajectory, task: Task) -> float:
  """1 where the marked answer in the last turn is right, else 0; for ``rollout.answer`` "text"."""
  answer = read_marked_answer(trajectory.answer or "")
  breach = trajectory.status is Status.POLICY_ERROR
  return float(answer is not None and not breach and answers_equal(answer, task.answer))


def process_score(text: str, graph: Mapping[str, Any], asked: str) -> float:
  """See the module.

  Args:
    text: lines such as ``c = a + 3 = 10``; other lines are not read. A quantity that is written
      twice counts as it was written first.
    graph: value and names of the parents, by name.
    asked: name of the quantity that is asked for.
  """
  written: dict[str, tuple[int, frozenset[str]]] = {}
  last = None
  for line in text.splitlines():
    met = _LINE.fullmatch(line.strip())
    if met is not None:
      last = met[1]
      written.setdefault(last, (int(met[3]), frozenset(_NAME.findall(met[2] or ""))))
  both = [name for name in graph if name in written]
  penalty = sum(written[name][0] != graph[name][0] for name in both)
  penalty += sum(written[name][1] != frozenset(graph[name][1]) for name in both)
  penalty += len(graph) - len(both)
  penalty += min(len(written) - len(both), len(graph))
  penalty += last != asked
  return max(0.0, 1 - penalty / len(graph))
