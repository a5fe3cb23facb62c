"""Evaluation: greedy accuracy, pass@k, avg@k with confidence intervals, by source and level."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from agentjax.config import Config, NonNegativeInt, PositiveFloat, PositiveInt, Range
from agentjax.engine.config import SamplingConfig
from agentjax.rewards import RewardGraph
from agentjax.rollout import keys
from agentjax.rollout.loop import collect
from agentjax.rollout.program import EpisodeProgram, MakeEnvironment, Player, tool_episode
from agentjax.rollout.statistics import RolloutStatistics, rollout_statistics
from agentjax.trajectory.record import Reward, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class HeldOutConfig(Config):
  """What is measured on held-out tasks, and when.

  Attributes:
    tasks: how many held-out tasks are used, from the first on; 0 switches evaluation off.
    every: RL steps between greedy evaluations while training; 0 for before and after only.
    interleaved: evaluations run beside the next step, with the weights that it begins with and
      behind its episodes, instead of stopping the run. They give the results that they would have
      given, in that step's row, with ``eval/step``. That of the last step has no next one, and
      stands for that of the step before. Snapshots of ``config.seats`` play as in the next step.
    samples: episodes a task at ``temperature``, behind pass@k and avg@k; 0 leaves only greedy.
    pass_at: the k of pass@k, each at most ``samples``.
    temperature: of the samples.
    success_part: reward part that tells success; "" means the total reward.
    success_threshold: an episode succeeds where that reward is at least this.
    resamples, confidence: of the bootstrap intervals.
  """

  tasks: NonNegativeInt = 64
  every: NonNegativeInt = 0
  interleaved: bool = False
  samples: NonNegativeInt = 4
  pass_at: tuple[int, ...] = (4,)
  temperature: PositiveFloat = 1.0
  success_part: str = "exact_match"
  success_threshold: float = 1.0
  resamples: PositiveInt = 1000
  confidence: Annotated[float, Range(0, 1, above=True, below=True)] = 0.95

  def validate(self, path: str = "config.evaluation") -> None:
    super().validate(path)
    require = self.requirements(path)
    for k in self.pass_at if self.samples else ():
      require(1 <= k <= self.samples, "pass_at", f"1 to samples ({self.samples})")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
  r"""Unbiased estimate of the chance that at least one of ``k`` samples is correct.

  ``1 - C(n - c, k) / C(n, k)`` for ``c`` correct of ``n`` samples, as a product so that large
  ``n`` do not overflow. Chen et al., 2107.03374, eq. 1.
  """
  if not 0 <= num_correct <= num_samples:
    raise ValueError(f"num_correct={num_correct} must be in 0..num_samples={num_samples}")
  if not 1 <= k <= num_samples:
    raise ValueError(f"k={k} must be in 1..num_samples={num_samples}; draw more samples")
  if num_samples - num_correct < k:
    return 1.0
  missed = (1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))
  return 1.0 - math.prod(missed)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean over tasks with its bootstrap interval; ``count`` tasks entered it."""

  mean: float
  low: float
  high: float
  count: int

  def __str__(self) -> str:
    return f"{100 * self.mean:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def bootstrap(
  values: Sequence[float], *, seed: Sequence[int], resamples: int, confidence: float
) -> Estimate:
  """Mean of one value a task, with the percentile bootstrap interval over tasks.

  Tasks are resampled whole, so samples of one task stay together. The same seed and number of
  tasks gives the same resamples. Efron, 1979 (percentile method).

  Args:
    values: one finite number a task, at least one.
    seed: words of the random seed.
    resamples: number of resamples. confidence: coverage, such as 0.95.
  """
  if not len(values):
    raise ValueError("an estimate needs the value of at least one task, got none")
  array = np.asarray(values, dtype=np.float64)
  rng = np.random.default_rng(list(seed))
  size = len(array)
  means = np.array([array[rng.integers(size, size=size)].mean() for _ in range(resamples)])
  low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
  return Estimate(float(array.mean()), float(low), float(high), size)


@dataclasses.dataclass(frozen=True)
class Scores:
  """Success on one set of tasks; None where nothing valid was measured.

  Attributes:
    tasks: tasks in the set.
    greedy: share solved by the one episode at temperature 0.
    average: avg@n, the mean share of a task's n samples that succeed.
    pass_at: pass@k by k, over tasks with at least k valid samples.
  """

  tasks: int
  greedy: Estimate | None
  average: Estimate | None
  pass_at: dict[int, Estimate | None]


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
  """Result of ``summarise``.

  Attributes:
    overall: scores on all tasks.
    breakdown: scores by "source", and by "source/level" where tasks carry a level.
    samples: n of avg@n.
    greedy_statistics, sampled_statistics: turns, tool calls, tokens and faults of the episodes.
    masked: episodes left out because the environment or the verifier failed.
    greedy_trajectories, sampled_trajectories: in the order of their addresses.
  """

  overall: Scores
  breakdown: dict[str, Scores]
  samples: int
  greedy_statistics: RolloutStatistics | None
  sampled_statistics: RolloutStatistics | None
  masked: int
  greedy_trajectories: tuple[Trajectory, ...] = dataclasses.field(repr=False)
  sampled_trajectories: tuple[Trajectory, ...] = dataclasses.field(repr=False)

  def metrics(self) -> dict[str, float]:
    """Flat scalars: ``greedy``, ``avg@n``, ``pass@k`` with bounds, overall and by set.

    NaN where episodes ran and none has a verdict.
    """
    flat: dict[str, float] = {"masked": float(self.masked)}
    for prefix, scores in (("", self.overall), *((f"{n}/", s) for n, s in self.breakdown.items())):
      for name, estimate in self.estimates(scores).items():
        estimate = estimate or Estimate(math.nan, math.nan, math.nan, 0)
        flat[prefix + name] = estimate.mean
        flat[f"{prefix}{name}_low"] = estimate.low
        flat[f"{prefix}{name}_high"] = estimate.high
    for mode, statistics in (
      ("greedy", self.greedy_statistics),
      ("sampled", self.sampled_statistics),
    ):
      if statistics is not None:
        flat |= {f"{mode}/{name}": value for name, value in statistics.metrics().items()}
    return flat

  def estimates(self, scores: Scores) -> dict[str, Estimate | None]:
    """The estimates of one set, by name; None if no episode has a verdict."""
    named: dict[str, Estimate | None] = {}
    if self.greedy_statistics is not None:
      named["greedy"] = scores.greedy
    if self.sampled_statistics is not None:
      named[f"avg@{self.samples}"] = scores.average
      named |= {f"pass@{k}": estimate for k, estimate in scores.pass_at.items()}
    return named

  def to_dict(self) -> dict[str, Any]:
    """Everything but the trajectories, as plain JSON values."""
    alone = dataclasses.replace(self, greedy_trajectories=(), sampled_trajectories=())
    plain = dataclasses.asdict(alone)
    return {n: v for n, v in plain.items() if not n.endswith("_trajectories")}


class Episodes(NamedTuple):
  """What an evaluation played, in the order of addresses; ``sampled`` may be empty."""

  greedy: list[Trajectory]
  sampled: list[Trajectory]


async def play(
  tasks: Sequence[Task],
  *,
  player: Player,
  make_environment: MakeEnvironment,
  rewards: RewardGraph,
  plan: HeldOutConfig,
  step: int,
  program: EpisodeProgram = tool_episode,
) -> Episodes:
  """Runs every task greedily and ``plan.samples`` times by sampling.

  The keys of its draws differ from those of training. They are the same for every evaluation at one
  step, so two evaluations of the same weights agree, also if each plays only a part of the tasks.

  Args:
    tasks: with distinct ids.
    player: engine, tokenizer and rollout settings; ``group_size`` is not used here.
    make_environment, rewards, program: as in ``collect``.
    plan: what to measure.
    step: training step the weights come from.
  """
  player = dataclasses.replace(player, run_seed=keys.evaluation_seed(player.run_seed))

  async def run(samples: int, sampling: SamplingConfig) -> list[Trajectory]:
    return await collect(
      tasks,
      step=step,
      samples_per_task=samples,
      player=dataclasses.replace(player, sampling=sampling),
      make_environment=make_environment,
      rewards=rewards,
      program=program,
    )

  return Episodes(
    await run(1, SamplingConfig(temperature=0.0)),
    await run(plan.samples, player.sampling) if plan.samples else [],
  )


def summarise(
  tasks: Sequence[Task],
  greedy: Sequence[Trajectory],
  sampled: Sequence[Trajectory],
  *,
  plan: HeldOutConfig,
  tool_names: Collection[str],
  seed: int,
  step: int,
) -> EvaluationReport:
  """The report on episodes that ``play`` has run; either kind may be empty.

  Args:
    tasks: at least one, with distinct ids.
    greedy, sampled: the episodes.
    plan: what to measure.
    tool_names: tools the policy is given, for the statistics.
    seed: of the run. step: training step the weights come from.
  """
  if not tasks:
    raise ValueError("an evaluation needs at least one task, got none; check config.data")
  greedy_success = _successes(greedy, plan)
  sampled_success = _successes(sampled, plan)
  seed = keys.evaluation_seed(seed)
  words = keys.derive(seed, keys.Stream.BOOTSTRAP, step).tolist()

  def estimate(values: list[float]) -> Estimate | None:
    if not values:
      return None
    return bootstrap(values, seed=words, resamples=plan.resamples, confidence=plan.confidence)

  def scores(members: Sequence[Task]) -> Scores:
    first = [greedy_success.get(task.id, []) for task in members]
    drawn = [sampled_success.get(task.id, []) for task in members]
    return Scores(
      tasks=len(members),
      greedy=estimate([float(s[0]) for s in first if s]),
      average=estimate([sum(s) / len(s) for s in drawn if s]),
      pass_at={
        k: estimate([pass_at_k(len(s), sum(s), k) for s in drawn if len(s) >= k])
        for k in (plan.pass_at if sampled else ())
      },
    )

  def statistics(trajectories: Sequence[Trajectory]) -> RolloutStatistics | None:
    return rollout_statistics(trajectories, tool_names=tool_names) if trajectories else None

  sets: dict[str, list[Task]] = collections.defaultdict(list)
  for task in tasks:
    sets[task.source].append(task)
    if "level" in task.metadata:
      sets[f"{task.source}/level_{task.metadata['level']}"].append(task)
  counted = sum(len(s) for s in (*greedy_success.values(), *sampled_success.values()))
  return EvaluationReport(
    overall=scores(tasks),
    breakdown={name: scores(sets[name]) for name in sorted(sets)},
    samples=plan.samples,
    greedy_statistics=statistics(greedy),
    sampled_statistics=statistics(sampled),
    masked=len(greedy) + len(sampled) - counted,
    greedy_trajectories=tuple(greedy),
    sampled_trajectories=tuple(sampled),
  )


def _successes(trajectories: Sequence[Trajectory], plan: HeldOutConfig) -> dict[int, list[bool]]:
  """Success of every valid episode, by task id."""
  successes: dict[int, list[bool]] = collections.defaultdict(list)
  for trajectory in trajectories:
    reward = _success_reward(trajectory, plan.success_part)
    if reward.value is not None:
      successes[trajectory.task_id].append(reward.value >= plan.success_threshold)
  return dict(successes)


def _success_reward(trajectory: Trajectory, part: str) -> Reward:
  if part in trajectory.reward_parts:
    return trajectory.reward_parts[part]
  if not part or not trajectory.reward.valid:
    return trajectory.reward
  raise ValueError(
    f"evaluation.success_part={part!r} is no reward part; allowed: "
    f"{', '.join(sorted(trajectory.reward_parts))}, or '' for the total reward."
  )
