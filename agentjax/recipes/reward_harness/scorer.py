"""A part of the reward: answers of a group, compared by a judge with an evolved library."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from agentjax.adapters.judge_model import JudgeModelConfig, RunJudges
from agentjax.config import check
from agentjax.engine import EngineConfig
from agentjax.recipes.reward_harness.evolution import read_library
from agentjax.recipes.reward_harness.library import Demonstration, Library
from agentjax.recipes.reward_harness.models import HarnessModels
from agentjax.rewards.graph import GroupScorer
from agentjax.rewards.judges import (
  JudgeUnavailableError,
  final_answer,
  question_key,
  question_text,
)
from agentjax.rewards.scorer_config import GroupScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Reward, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class RewardHarnessConfig(GroupScorerConfig):
  """Every answer is compared with the next of its group, the last with the first. Ours.

  Attributes:
    library: a ``library.json`` that ``agentjax.recipes.reward_harness.evolve`` has written.
    judge: a run, a checkpoint, a Hugging Face folder or an endpoint.
    router: likewise; None uses the whole library.
    engine: serves each model on disk. Its slots are the questions under way at one time.
    seed: of their randomness, with the addresses of what it compares.
  """

  library: str = ""
  judge: JudgeModelConfig = dataclasses.field(default_factory=JudgeModelConfig)
  router: JudgeModelConfig | None = None
  engine: EngineConfig = dataclasses.field(
    default_factory=lambda: EngineConfig(
      slots=16, max_length=10_240, extend_buckets=(128, 1024), extend_rows=(4, 1)
    )
  )
  seed: int = 0

  def validate(self, path: str = "reward_harness") -> None:
    super().validate(path)
    check(bool(self.library), f"{path}.library", self.library, "a file that 'evolve' has written")

  def build_group(self, sandboxes: Sandboxes) -> GroupScorer:
    library, named = read_library(self.library), {"judge": self.judge}
    if self.router is not None:
      named["router"] = self.router
    served = RunJudges(named, self.engine, self.seed, "config.reward.settings.reward_harness")
    models = HarnessModels(served.judges["judge"], router=served.judges.get("router"))
    return LibraryCohort(models, library, seed=self.seed, close=served.close)


class LibraryCohort:
  """The mean over an answer's comparisons: 1 where it is better, 0 where worse, .5 for a tie.

  No answer is worth 0 and is not compared. A lone answer is worth .5. If the judge stays
  unavailable for all comparisons of an answer, its reward is invalid.

  Args:
    models: the judge.
    library: its skills and tools.
    seed: see RewardHarnessConfig.
    close: frees the models.
  """

  def __init__(
    self,
    models: HarnessModels,
    library: Library,
    *,
    seed: int,
    close: Callable[[], None] = lambda: None,
  ):
    self._models, self._library, self._seed = models, library, seed
    self.close = close

  async def __call__(self, members: Sequence[Trajectory], task: Task) -> list[Reward]:
    answers = [final_answer(one, task) for one in members]
    there = [i for i, answer in enumerate(answers) if answer is not None]
    rewards = [Reward(0.0) for _ in members]
    if len(there) == 1:
      rewards[there[0]] = Reward(0.5)
    if len(there) < 2:
      return rewards
    pairs = [(i, there[(at + 1) % len(there)]) for at, i in enumerate(there)]
    verdicts = await asyncio.gather(*(self._share(members, answers, task, *p) for p in pairs))
    won: dict[int, list[float]] = {i: [] for i in there}
    for (i, j), share in zip(pairs, verdicts, strict=True):
      if share is not None:
        won[i].append(share)
        won[j].append(1 - share)
    for i, shares in won.items():
      known = bool(shares)
      rewards[i] = (
        Reward(sum(shares) / len(shares)) if known else Reward.invalid("judge unavailable")
      )
    return rewards

  async def _share(
    self,
    members: Sequence[Trajectory],
    answers: Sequence[str | None],
    task: Task,
    first: int,
    second: int,
  ) -> float | None:
    """1 where the first is better, 0 where the second, .5 for a tie; None without a judge."""
    a, b = answers[first], answers[second]
    assert a is not None and b is not None
    shown = {"prompt": question_text(task.prompt)}
    key = question_key(self._seed, *members[first].address, members[second].address[2])
    try:
      judged = await self._models.judge(
        self._library, Demonstration(task.id, shown, a, b, "tie"), key
      )
    except JudgeUnavailableError:
      return None
    return {"A": 1.0, "B": 0.0, "tie": 0.5}[judged.choice]
