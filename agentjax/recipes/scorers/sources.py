"""What an episode read and what it cites: evidence in the results of tools, citations in answers.

A policy can print what it likes with a tool that runs code. Name the tools whose results count.
"""

from __future__ import annotations

import dataclasses
import re

from agentjax.config import check
from agentjax.rewards.graph import Scorer
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Status, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class CitationsConfig(ScorerConfig):
  """Share of an answer's different citations that results of tools have; 0 without any.

  Attributes:
    pattern: regular expression of a citation, in answers and in results; its group, where it has
      one, is what is compared. By default numbers in brackets, ``[3]``.
    tools: whose results count; () counts all.
  """

  pattern: str = r"\[(\d+)\]"
  tools: tuple[str, ...] = ()

  def validate(self, path: str = "config.reward.settings.citations") -> None:
    super().validate(path)
    try:
      right = re.compile(self.pattern).groups < 2
    except re.error:
      right = False
    check(right, f"{path}.pattern", self.pattern, "a regular expression with one group at most")

  def build(self, sandboxes: Sandboxes) -> Scorer:
    """See ``ScorerConfig.build``."""
    pattern = re.compile(self.pattern)

    def score(trajectory: Trajectory, task: Task) -> float:
      cited = set(pattern.findall(trajectory.answer or ""))
      if not cited or trajectory.status is Status.POLICY_ERROR:
        return 0.0
      known = set(pattern.findall(results(trajectory, self.tools)))
      return len(cited & known) / len(cited)

    return score


@dataclasses.dataclass(unsafe_hash=True)
class EvidenceConfig(ScorerConfig):
  """Share of a task's pieces of evidence that results of tools have, in small letters.

  Attributes:
    field: of ``task.metadata``, a list of texts.
    tools: whose results count; () counts all.
  """

  field: str = "evidence"
  tools: tuple[str, ...] = ()

  def build(self, sandboxes: Sandboxes) -> Scorer:
    """See ``ScorerConfig.build``."""
    return Evidence(self)


class Evidence:
  """The scorer of an ``EvidenceConfig``."""

  def __init__(self, config: EvidenceConfig):
    self._config = config

  def refusal(self, task: Task) -> str | None:
    """A task without evidence cannot be judged."""
    field = self._config.field
    return None if task.metadata.get(field) else f"its metadata has no texts in {field!r}"

  def __call__(self, trajectory: Trajectory, task: Task) -> float:
    wanted = [text.lower() for text in task.metadata[self._config.field]]
    read = results(trajectory, self._config.tools).lower()
    return sum(text in read for text in wanted) / len(wanted)


def results(trajectory: Trajectory, tools: tuple[str, ...]) -> str:
  """What tools gave, one result a line, of calls that succeeded."""
  records = [r for r in trajectory.tools if r.status == "ok" and (not tools or r.name in tools)]
  return "\n".join(record.output for record in records)
