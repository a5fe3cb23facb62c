"""A part of the reward: the score of a solution by a process reward model behind an endpoint."""

from __future__ import annotations

import dataclasses

from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.recipes.math_shepherd.solutions import step_scores, steps_of
from agentjax.recipes.math_shepherd.steps import Aggregate, solution_score
from agentjax.rewards.graph import Scorer
from agentjax.rewards.judges import JudgeUnavailableError, LetterJudge, final_answer, retry
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Reward, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class MathShepherdConfig(ScorerConfig):
  """Scores the lines of an answer by a model that was trained on labelled steps.

  The answer is the whole last turn with ``config.rollout.answer="text"``.

  Attributes:
    aggregate: the score of an answer from those of its lines; "min" in the source.
    judge: the endpoint of the model, which tells log-probs.
  """

  aggregate: Aggregate = "min"
  judge: HttpJudgeConfig = dataclasses.field(default_factory=HttpJudgeConfig)

  def build(self, sandboxes: Sandboxes) -> Scorer:
    return StepScorer(HttpJudge(self.judge), self)


class StepScorer:
  """0..1; no answer scores 0. If the judge stays unavailable, the reward is invalid.

  Args:
    judge: the process reward model.
    config: see MathShepherdConfig; its ``judge`` is not used.
  """

  def __init__(self, judge: LetterJudge, config: MathShepherdConfig):
    self._judge, self._config = judge, config

  async def __call__(self, trajectory: Trajectory, task: Task) -> Reward:
    steps = steps_of(final_answer(trajectory, task) or "")
    if not steps:
      return Reward(0.0)
    try:
      scores = await retry(lambda: step_scores(self._judge.log_probs, task.prompt, steps))
    except JudgeUnavailableError as error:
      return Reward.invalid(f"judge unavailable: {error}")
    return Reward(solution_score(scores, self._config.aggregate))
