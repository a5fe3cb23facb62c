"""Settings of the traffic, the two networks and their training.

What the source gives: groups of 4, plans held for 8 steps, a window of progress from 1.05 to 1.10,
a buffer of 8, one update of the generator for 8 of the discriminator, 32 candidates at its best.
All other figures are ours.
"""

from __future__ import annotations

import dataclasses

from agentjax.config import (
  AtLeastTwo,
  Config,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  PositiveShare,
  Share,
  check,
)
from agentjax.training.optimizer import OptimizerConfig

STEP_SECONDS = 0.1


@dataclasses.dataclass(unsafe_hash=True)
class TrafficConfig(Config):
  """Clocks of an episode; a step is 0.1 s.

  Attributes:
    decisions: times at which a plan is chosen.
    latch: steps for which a chosen plan is followed (8 in the source).
    plan_points: positions of a plan. plan_stride: steps between them.
  """

  decisions: PositiveInt = 12
  latch: PositiveInt = 8
  plan_points: AtLeastTwo = 6
  plan_stride: PositiveInt = 5

  @property
  def steps(self) -> int:
    """Steps of an episode."""
    return self.decisions * self.latch

  @property
  def horizon(self) -> int:
    """Steps of a plan."""
    return self.plan_points * self.plan_stride

  @property
  def whole(self) -> int:
    """Decisions, from the first on, whose plan ends within the episode."""
    return (self.steps - self.horizon) // self.latch + 1

  def validate(self, path: str = "traffic") -> None:
    super().validate(path)
    said = f"from latch={self.latch} to decisions x latch={self.steps} steps"
    within = self.latch <= self.horizon <= self.steps
    check(within, f"{path}.plan_points x {path}.plan_stride", self.horizon, said)


@dataclasses.dataclass(unsafe_hash=True)
class ExpertConfig(Config):
  """Who drives the demonstrations.

  Attributes:
    careless: share of its decisions in which it does not look at other vehicles.
    cruise: speed that it wants, m/s.
    margin: metres before and behind the car that it keeps free, where it can.
  """

  careless: Share = 0.25
  cruise: PositiveFloat = 12.0
  margin: NonNegativeFloat = 6.0


@dataclasses.dataclass(unsafe_hash=True)
class GeneratorConfig(Config):
  """The network that proposes plans: a flow from noise to trajectories.

  Attributes:
    width: of its layers. blocks: residual ones.
    denoising_steps: Euler steps from noise to a plan.
    optimizer: of imitation. tuning: of the updates on edited trajectories.
  """

  width: PositiveInt = 64
  blocks: PositiveInt = 2
  denoising_steps: PositiveInt = 5
  optimizer: OptimizerConfig = dataclasses.field(
    default_factory=lambda: OptimizerConfig(learning_rate=2e-3, schedule="cosine")
  )
  tuning: OptimizerConfig = dataclasses.field(
    default_factory=lambda: OptimizerConfig(learning_rate=3e-4)
  )


@dataclasses.dataclass(unsafe_hash=True)
class DiscriminatorConfig(Config):
  """The network that scores plans, and its loss.

  Attributes:
    width: of its layers.
    candidates: plans that it chooses from; the source's figures have 32, and 8 to 128 were tried.
    temperature: of the choice while it learns, over the logits of the scores.
    clip: bound on the ratio of probabilities.
    entropy_target: of the scores, as a share of ln 2. Below it the coefficient of the entropy
      grows, above it shrinks. entropy_rate: how fast. entropy_start: the first coefficient.
    optimizer: of its updates.
  """

  width: PositiveInt = 64
  candidates: AtLeastTwo = 16
  temperature: PositiveFloat = 0.2
  clip: PositiveShare = 0.2
  entropy_target: Share = 0.7
  entropy_rate: NonNegativeFloat = 0.05
  entropy_start: PositiveFloat = 0.01
  optimizer: OptimizerConfig = dataclasses.field(
    default_factory=lambda: OptimizerConfig(learning_rate=1e-3)
  )


@dataclasses.dataclass(unsafe_hash=True)
class RewardConfig(Config):
  """What an episode is paid: never more than 0.

  Attributes:
    time_to_collision: seconds from which on more time is worth nothing more.
    safety: weight of the least time to a collision. progress: weight of the progress.
    low, high: window of the progress against the expert's (1.05 and 1.10 in the source).
  """

  time_to_collision: PositiveFloat = 3.0
  safety: NonNegativeFloat = 1.0
  progress: NonNegativeFloat = 0.5
  low: PositiveFloat = 1.05
  high: PositiveFloat = 1.10

  def validate(self, path: str = "reward") -> None:
    super().validate(path)
    check(self.low <= self.high, f"{path}.low", self.low, f"at most {path}.high={self.high}")
    steps = self.time_to_collision / STEP_SECONDS
    check(steps >= 1, f"{path}.time_to_collision", self.time_to_collision, "at least 0.1")


@dataclasses.dataclass(unsafe_hash=True)
class EditConfig(Config):
  """How driven trajectories are edited for the generator (OGO).

  Attributes:
    danger: time to a collision, in seconds, below which a trajectory is slowed down.
    slower: factors of speed that are tried, the mildest first; the mildest safe one is taken.
    faster: factors that are tried for a safe trajectory of an episode with too little progress,
      the strongest first.
    ramp: seconds in which the factor sets in.
    margin: metres before and behind the car that an edited trajectory must keep free.
  """

  danger: PositiveFloat = 2.0
  slower: tuple[PositiveShare, ...] = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)
  faster: tuple[PositiveFloat, ...] = (1.2, 1.1)
  ramp: PositiveFloat = 1.5
  margin: NonNegativeFloat = 2.0

  def validate(self, path: str = "edit") -> None:
    super().validate(path)
    falling = list(self.slower) == sorted(set(self.slower), reverse=True)
    right = bool(self.slower) and falling and self.slower[0] < 1
    check(right, f"{path}.slower", self.slower, "falling factors below 1, at least one")
    falling = list(self.faster) == sorted(set(self.faster), reverse=True)
    right = bool(self.faster) and falling and self.faster[-1] > 1
    check(right, f"{path}.faster", self.faster, "falling factors above 1, at least one")


@dataclasses.dataclass(unsafe_hash=True)
class TrainingConfig(Config):
  """How much is learnt.

  Attributes:
    scenarios: that are trained on. test_scenarios: that policies are measured on.
    imitation_steps: updates of the generator on demonstrations. imitation_batch: plans in each.
    rounds: of closed-loop driving. round_scenarios: scenarios of a round.
    group: episodes of a scenario in a round.
    least_spread: standard deviation of rewards below which a group teaches nothing.
    buffer: rounds that are learnt from, the newest ones.
    discriminator_steps: updates after each round. discriminator_batch: decisions in each.
    generator_every: rounds between two turns of the generator (8 in the source).
    generator_steps: updates in a turn. generator_batch: edited trajectories in each.
    imitation_weight: of the loss on demonstrations beside that on edited trajectories.
    keep_every: rounds between two saved states.
  """

  scenarios: PositiveInt = 1024
  test_scenarios: PositiveInt = 512
  imitation_steps: PositiveInt = 12000
  imitation_batch: PositiveInt = 256
  rounds: PositiveInt = 64
  round_scenarios: PositiveInt = 32
  group: AtLeastTwo = 4
  least_spread: NonNegativeFloat = 0.02
  buffer: PositiveInt = 8
  discriminator_steps: PositiveInt = 8
  discriminator_batch: PositiveInt = 256
  generator_every: PositiveInt = 8
  generator_steps: PositiveInt = 40
  generator_batch: PositiveInt = 256
  imitation_weight: NonNegativeFloat = 0.5
  keep_every: PositiveInt = 16

  def validate(self, path: str = "training") -> None:
    super().validate(path)
    said = f"at most {path}.scenarios={self.scenarios}"
    check(
      self.round_scenarios <= self.scenarios, f"{path}.round_scenarios", self.round_scenarios, said
    )


@dataclasses.dataclass(unsafe_hash=True)
class Rad2Config(Config):
  """The settings of a run; see each part.

  Attributes:
    seed: of the first run; the others follow. seeds: runs.
    resamples: of the bootstrap intervals.
  """

  traffic: TrafficConfig = dataclasses.field(default_factory=TrafficConfig)
  expert: ExpertConfig = dataclasses.field(default_factory=ExpertConfig)
  generator: GeneratorConfig = dataclasses.field(default_factory=GeneratorConfig)
  discriminator: DiscriminatorConfig = dataclasses.field(default_factory=DiscriminatorConfig)
  reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
  edit: EditConfig = dataclasses.field(default_factory=EditConfig)
  training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
  seed: NonNegativeInt = 0
  seeds: PositiveInt = 3
  resamples: PositiveInt = 2000
