"""The reward parts that judges give, from settings: "rubric" and "genrm"."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from agentjax.config import Config, check
from agentjax.rewards.genrm import GenRMCohort, GenRMConfig
from agentjax.rewards.graph import GroupScorer, Scorer
from agentjax.rewards.http_judge import HttpJudge, HttpJudgeConfig
from agentjax.rewards.rubric import RUBRIC, RubricConfig, RubricScorer

GENRM = "genrm"
JUDGED_PARTS = (RUBRIC, GENRM)


@dataclasses.dataclass(unsafe_hash=True)
class JudgedConfig(Config):
  """Who judges, and how.

  Attributes:
    judges: endpoints, the panel of "rubric"; none where all criteria have rules.
    comparer: endpoint that compares for "genrm".
    rubric: of the part "rubric"; the criteria stand in each task's metadata["rubric"].
    genrm: of the part "genrm", which compares the members of a group.
    seed: of the judges' randomness, with the address of what they judge.
  """

  judges: tuple[HttpJudgeConfig, ...] = ()
  comparer: HttpJudgeConfig | None = None
  rubric: RubricConfig = dataclasses.field(default_factory=RubricConfig)
  genrm: GenRMConfig = dataclasses.field(default_factory=GenRMConfig)
  seed: int = 0

  def validate(self, path: str = "judged") -> None:
    super().validate(path)
    for i, judge in enumerate(self.judges):
      judge.validate(f"{path}.judges[{i}]")

  def check_parts(self, parts: Collection[str], path: str) -> None:
    """Raises ConfigError where a part has no judge to ask."""
    missing = GENRM in parts and self.comparer is None
    check(not missing, f"{path}.comparer", self.comparer, f"a judge, for the part {GENRM!r}")


def build_judged(
  config: JudgedConfig, parts: Sequence[str]
) -> tuple[dict[str, Scorer], dict[str, GroupScorer]]:
  """Scorers and group scorers of ``parts``, a choice of ``JUDGED_PARTS``."""
  single: dict[str, Scorer] = {}
  compared: dict[str, GroupScorer] = {}
  if RUBRIC in parts:
    judges = [HttpJudge(judge) for judge in config.judges]
    single[RUBRIC] = RubricScorer(judges, config.rubric, seed=config.seed)
  if GENRM in parts and config.comparer is not None:
    compared[GENRM] = GenRMCohort(HttpJudge(config.comparer), config.genrm, seed=config.seed)
  return single, compared
