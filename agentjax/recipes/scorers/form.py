"""The form of an answer: which tags stand in it, and in which order."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from agentjax.config import check
from agentjax.rewards.graph import Scorer
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Status, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class TagsConfig(ScorerConfig):
  """1 where the last turn is written in tags such as ``<think>...</think>``, else 0.

  Use it with ``rollout.answer`` "text", where the answer is the whole last turn. A policy error
  gets 0.

  Attributes:
    tags: names; each stands in the turn, closed, not empty, and in no other of them.
    order: "exact": each once, in this order; "any": each at least once, in any order.
    outside: whether text may stand outside of all tags.
  """

  tags: tuple[str, ...] = ("think", "answer")
  order: Literal["exact", "any"] = "exact"
  outside: bool = False

  def validate(self, path: str = "config.reward.settings.tags") -> None:
    super().validate(path)
    words = len(set(self.tags)) == len(self.tags) and all(
      re.fullmatch(r"\w+", t) for t in self.tags
    )
    check(bool(self.tags) and words, f"{path}.tags", self.tags, "different words, at least one")

  def build(self, sandboxes: Sandboxes) -> Scorer:
    """See ``ScorerConfig.build``."""

    def score(trajectory: Trajectory, task: Task) -> float:
      right = trajectory.answer is not None and self.follows(trajectory.answer)
      return float(right and trajectory.status is not Status.POLICY_ERROR)

    return score

  def follows(self, text: str) -> bool:
    """Whether a text has the form."""
    pieces = re.split(rf"<(/?(?:{'|'.join(self.tags)}))>", text)
    met, inside = [], ""  # pieces are: text, tag, text, tag, ..., text
    for i, piece in enumerate(pieces):
      if i % 2 == 0:
        if bool(inside) != bool(piece.strip()) and (inside or not self.outside):
          return False
      elif piece != f"/{inside}" and (inside or piece.startswith("/")):
        return False
      else:
        met += [] if inside else [piece]
        inside = "" if inside else piece
    if inside:
      return False
    return met == list(self.tags) if self.order == "exact" else set(met) == set(self.tags)
