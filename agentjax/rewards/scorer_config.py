"""A part of the reward as a choice: settings that build its scorer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from agentjax.names import Adopted, Choice, check_callable
from agentjax.rewards.graph import GroupScorer, Scorer
from agentjax.sandbox.config import Sandboxes

_FUNCTION = "a function of an episode and its task"


@dataclasses.dataclass(unsafe_hash=True)
class ScorerConfig(Choice):
  """Settings of a part of the reward, whose scorer judges one episode."""

  group = "agentjax.scorers"
  adopts = _FUNCTION

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    gym, scorers = "agentjax.adapters.reasoning_gym.scoring", "agentjax.recipes.scorers"
    return {
      "citations": f"{scorers}:CitationsConfig",
      "evidence": f"{scorers}:EvidenceConfig",
      "genrm": "agentjax.recipes.genrm.cohort:GenRMConfig",
      "overlong": f"{scorers}:OverlongConfig",
      "reasoning_gym": f"{gym}:ReasoningGymScoring",
      "reasoning_gym_graded": f"{gym}:GradedReasoningGymScoring",
      "relative": f"{scorers}:RelativeConfig",
      "renorm": f"{scorers}:RenormConfig",
      "rubric": "agentjax.recipes.rubrics.rubric:RubricConfig",
      "seconds": f"{scorers}:seconds",
      "tags": f"{scorers}:TagsConfig",
      "text_match": f"{scorers}:TextMatchConfig",
      "tool_calls": f"{scorers}:tool_calls",
      "unit_tests": "agentjax.adapters.unit_tests.scorer:UnitTestConfig",
    }

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    check_callable(found, f"{path}={name!r}", _FUNCTION, arguments=2)
    return OwnScorer(name, found)  # type: ignore[return-value]

  def build(self, sandboxes: Sandboxes) -> Scorer:
    """The scorer of a run; one that has a ``close`` is closed at the end.

    Args:
      sandboxes: those of the run.
    """
    raise NotImplementedError(f"{type(self).__name__} must define build()")


@dataclasses.dataclass(unsafe_hash=True)
class GroupScorerConfig(ScorerConfig):
  """Settings of a part of the reward, whose scorer compares the episodes of one task."""

  @property
  def needs(self) -> tuple[str, ...]:
    """Further parts of the reward that it reads; they are scored before it."""
    return ()

  def build_group(self, sandboxes: Sandboxes) -> GroupScorer:
    """As ``build``."""
    raise NotImplementedError(f"{type(self).__name__} must define build_group()")


@dataclasses.dataclass(unsafe_hash=True)
class OwnScorer(Adopted, ScorerConfig):
  """A scorer without settings, named by ``module:attribute``."""
