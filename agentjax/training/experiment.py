"""Experiment: the whole description of a run, as one typed tree of settings."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Literal

from agentjax.config import (
  Config,
  ConfigError,
  FilePath,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  Table,
  check,
)
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig, num_routers, param_specs
from agentjax.models.lora import LoraConfig, lora_specs
from agentjax.models.param_ops import qk_clip_obstacle
from agentjax.names import is_own, load_config_module
from agentjax.objectives.advantages import check_group_size
from agentjax.objectives.aggregation import Aggregation
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.preference import PreferenceConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.evaluation import HeldOutConfig
from agentjax.rollout.guards import GuardsConfig
from agentjax.rollout.guards.interface import strings
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.seat_config import SeatConfig, check_seats, trained_seats
from agentjax.sandbox.config import SandboxConfig, Sandboxes, default_sandboxes
from agentjax.sharding import MeshConfig
from agentjax.signals.critic import CriticConfig
from agentjax.signals.signal import SignalConfig
from agentjax.signals.teacher import TeacherConfig, check_teachers
from agentjax.text import ChatConfig, TokenizerConfig, check_chat
from agentjax.tools import ToolsConfig
from agentjax.training.alternation import AlternateConfig
from agentjax.training.auxiliary import AuxiliaryConfig
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.diagnostics import DiagnosticsConfig
from agentjax.training.likelihood import LikelihoodConfig
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.pass_config import PassesConfig
from agentjax.training.pretrained import pretrained_model
from agentjax.training.selectors import SelectionConfig
from agentjax.training.token_sets import TokenSetConfig
from agentjax.trajectory.weights import WeightConfig
from agentjax.world.world import WorldConfig, default_world

FORMAT = 2  # of a saved config.json


@dataclasses.dataclass(unsafe_hash=True)
class SupervisedStage(AuxiliaryConfig):
  """Warm start: next-token loss on the assistant's tokens of the tasks' demonstrations.

  Attributes:
    steps: optimiser steps; 0 skips the stage.
    tasks_per_step: demonstrations a step, packed into rows.
    row_length: tokens a row; a longer demonstration is an error.
    microbatch_rows: rows a forward pass.
    aggregation: how token losses become one number (objectives.token_coefficients).
    weights: rules whose product is the loss weight of a token; turns and tool results may have
      flags in the data (``record.Message``).
    token_sets: chooses a set of tokens for each place, over which its loss is computed, such as
      ``agentjax.recipes.logits_replay:LogitsReplayConfig``; None is the whole vocabulary.
  """

  steps: NonNegativeInt = 0
  tasks_per_step: PositiveInt = 64
  row_length: PositiveInt = 512
  microbatch_rows: PositiveInt = 8
  aggregation: Aggregation = "token_mean"
  weights: WeightConfig = dataclasses.field(default_factory=WeightConfig)
  token_sets: TokenSetConfig | None = None
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

  def validate(self, path: str = "config.supervised") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      self.token_sets is None or self.z_loss_coefficient == 0,
      "z_loss_coefficient",
      "0 with token_sets, which makes no logits of the whole vocabulary",
    )


@dataclasses.dataclass(unsafe_hash=True)
class PhaseConfig(Config):
  """A part of the reinforcement-learning stage with an objective of its own.

  Attributes:
    steps: training steps it lasts.
    objective: replaces the stage's.
    context: what the tokens are conditioned on in the update (not in sampling). "episode":
      everything that the policy saw. "response": only the first token of the conversation and what
      follows the prompt, so that log P(y) is trained instead of log P(y | x) (2604.14142); ratios
      are then to the trainer's own log-probs, and there is no comparison with the sampler.
    trains: "all" networks, or only the "values": the policy and its optimiser state do not change.
      With ``advantage.value_lambda`` 1 this is VAPO's value pre-training (2504.05118) on
      Monte-Carlo returns.
    passes: see RLStage.
  """

  steps: PositiveInt = 1
  objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
  context: Literal["episode", "response"] = "episode"
  trains: Literal["all", "values"] = "all"
  passes: PassesConfig | None = None

  def validate(self, path: str = "phase") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      self.trains == "all" or self.objective.needs_values,
      "trains",
      f"'all' unless {path}.objective.advantage.credit is 'gae'",
    )


@dataclasses.dataclass(unsafe_hash=True)
class RLStage(AuxiliaryConfig):
  """Reinforcement learning: sample groups of episodes, score them, update.

  Attributes:
    steps: rollout-and-update rounds; 0 skips the stage.
    tasks_per_step: tasks a round; each is attempted ``rollout.group_size`` times.
    row_length: tokens a training row; must hold the longest episode.
    microbatch_rows: rows a forward pass.
    minibatches: optimiser steps a pass over the round's episodes.
    epochs: passes over the round's episodes.
    old_log_probs: "behaviour" trusts the sampler's log-probs as the ratio's denominator (one
      forward pass less); "recomputed" asks the trainer before the first update.
    objective: advantages and the loss; presets are in agentjax.recipes.presets. A critic is trained
      where ``objective.advantage.credit`` is "gae" or ``centre`` is "prompt_value".
    replay_experts: the update sends every token to the experts that the sampler's routers chose
      (router replay, 2510.11370), which the engine then records.
    schedule: how sampling and updates take turns, and how old a token may be when it is trained on.
    mismatch_alarm: a token whose log-probs by sampler and trainer differ by more than this, in
      nats, raises a warning that names it, and ``mismatch/alarmed`` is the share of such tokens.
      Tokens of older weights also differ because the policy has learned since. Ours.
    weights: rules whose product is the loss weight of a token.
    sampling: how episodes are drawn.
    selection: which of the sampled groups a step is trained on, and whether the others are replaced
      by new ones.
    diagnostics: what is watched for signs of collapse.
    phases: run one after the other at the start of the stage, before ``objective``. At the end of a
      phase the present policy becomes the reference policy; the optimiser state is kept.
    teachers: policies that ``objective.distillation`` learns from, by data set.
    rollouts: folder of stored episodes (``training.stored``) that are trained on instead of new
      ones: one group per task, in an order by the seed, repeated when all were used. None samples.
    signals: compute further columns of the tokens before training, or change the rewards of a
      step's episodes, such as ``agentjax.recipes.meds:MedsConfig`` (``signals.signal``).
    process: a signal that rewards steps in addition to the reward, such as "prime", from the
      log-probs of two policies (``agentjax.recipes.prime``); None is off. For rewards of turns by
      scorers or environments see ``objective.advantage.turn_rewards``.
    critic: a separate network as critic, by name: "episode" reads everything that the policy saw,
      "prompt" reads only prompts; None is a value head on the policy.
    passes: several updates per batch, such as ``agentjax.recipes.agentic_grpo:StagedConfig``; None
      is one update.
    alternate: which policy learns when, if ``config.seats`` adds trained policies; None lets all of
      them learn at every step.
  """

  steps: NonNegativeInt = 0
  tasks_per_step: PositiveInt = 16
  row_length: PositiveInt = 512
  microbatch_rows: PositiveInt = 8
  minibatches: PositiveInt = 1
  epochs: PositiveInt = 1
  old_log_probs: Literal["behaviour", "recomputed"] = "behaviour"
  objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
  replay_experts: bool = False
  schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
  mismatch_alarm: PositiveFloat = 1.0
  weights: WeightConfig = dataclasses.field(default_factory=WeightConfig)
  sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
  selection: SelectionConfig = dataclasses.field(default_factory=SelectionConfig)
  diagnostics: DiagnosticsConfig = dataclasses.field(default_factory=DiagnosticsConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  phases: tuple[PhaseConfig, ...] = ()
  teachers: tuple[TeacherConfig, ...] = ()
  rollouts: FilePath | None = None
  stop_above_kl: PositiveFloat | None = None
  signals: tuple[SignalConfig, ...] = ()
  process: SignalConfig | None = None
  critic: CriticConfig | None = None
  passes: PassesConfig | None = None
  alternate: AlternateConfig | None = None

  @property
  def has_value_head(self) -> bool:
    """Whether a critic is trained that is a head on the policy."""
    return self.critic is None and self.objective.needs_values

  @property
  def named_signals(self) -> tuple[tuple[str, SignalConfig], ...]:
    """``signals`` and ``process``, each with its field."""
    named = tuple((f"signals[{i}]", signal) for i, signal in enumerate(self.signals))
    return named if self.process is None else (*named, ("process", self.process))

  @property
  def every_signal(self) -> tuple[SignalConfig, ...]:
    """``signals`` and ``process``."""
    return tuple(signal for _, signal in self.named_signals)

  @property
  def all_phases(self) -> tuple[PhaseConfig, ...]:
    """``phases``, and the rest of the stage as the last."""
    rest = self.steps - sum(phase.steps for phase in self.phases)
    last = PhaseConfig(steps=rest, objective=self.objective, passes=self.passes)
    return (*self.phases, last)

  def phase_of(self, number: int) -> tuple[int, bool]:
    """Index in ``all_phases`` of the stage's step ``number`` (from 0), and whether its phase begins
    there."""
    first = 0
    for i, phase in enumerate(self.phases):
      if number < first + phase.steps:
        return i, number == first
      first += phase.steps
    return len(self.phases), number == first

  def validate(self, path: str = "config.rl") -> None:
    super().validate(path)
    require = self.requirements(path)
    self._validate_phases(path)
    self._validate_teachers(path)
    require(
      self.rollouts is None or not self.selection.refill,
      "selection.refill",
      f"0 with {path}.rollouts: nothing is sampled",
    )
    require(
      self.stop_above_kl is None or self.rollouts is not None,
      "stop_above_kl",
      f"none without {path}.rollouts: what is sampled anew cannot be left behind",
    )
    self._validate_critic(path)

  def _validate_critic(self, path: str) -> None:
    if self.critic is None:
      return
    require = self.requirements(path)
    require(
      self.objective.needs_values,
      "objective.advantage.credit",
      f"'gae', or advantage.centre='prompt_value', with {path}.critic",
    )
    self.critic.check_centre(self.objective.advantage.centre, f"{path}.critic")
    for phase in self.phases:
      loss = phase.objective.value_loss
      said = f"{path}.objective.value_loss, as {path}.critic has one loss"
      check(loss == self.objective.value_loss, f"{path}.phases.objective.value_loss", loss, said)

  def _validate_phases(self, path: str) -> None:
    for i, phase in enumerate(self.phases):
      require = phase.requirements(f"{path}.phases[{i}]")
      require(
        phase.objective.needs_values == self.objective.needs_values,
        "objective.advantage.credit",
        f"with a value head if and only if {path}.objective has one",
      )
      require(
        phase.context == "episode" or phase.objective.distillation is None,
        "objective.distillation",
        "none with context='response': a teacher is asked about whole episodes",
      )
      require(
        phase.context == "episode" or not phase.objective.needs_values,
        "context",
        "'episode' with a value head",
      )
    if self.phases and self.steps:
      total = sum(phase.steps for phase in self.phases)
      require = self.requirements(path)
      require(total < self.steps, "steps", f"above {total}, all steps of phases")

  def _validate_teachers(self, path: str) -> None:
    require = self.requirements(path)
    check_teachers(self.teachers, f"{path}.teachers")
    taught = [p.objective.distillation for p in self.all_phases if p.objective.distillation]
    if self.rollouts is not None:
      require(
        self.schedule.mode == "sync",
        "schedule.mode",
        f"'sync' with {path}.rollouts: nothing is sampled beside the updates",
      )
      require(
        self.old_log_probs == "recomputed"
        or all(phase.objective.only_divergences for phase in self.all_phases),
        "old_log_probs",
        f"'recomputed' with {path}.rollouts: the policy moves away from the one that sampled them",
      )
    require(
      not self.teachers or bool(taught),
      "objective.distillation",
      f"a DistillationConfig with {path}.teachers; presets have them, such as 'opd'",
    )
    for settings in taught:
      alone = settings.form == "full" and len(self.teachers) > 1
      check(
        not alone,
        f"{path}.objective.distillation.form",
        settings.form,
        "'sampled' or 'top_k' with several teachers: each has an output projection of its own",
      )
      live = settings.needs_live_teacher or self.rollouts is None
      require(
        bool(self.teachers) or not live,
        "teachers",
        "at least one with objective.distillation, but for form 'sampled' or 'top_k', keep=1 and "
        f"overlap_top_k=0 on stored {path}.rollouts, with candidates of one model and no "
        "candidate_loss",
      )


@dataclasses.dataclass(unsafe_hash=True)
class DeviceConfig(Config):
  """Which devices train and which sample, as numbers among the devices of each process.

  With both empty, all devices do both in turn. Otherwise the two must not share a device: updates
  and sampling run at the same time, and new weights are copied to the rollout devices.

  Attributes:
    training: devices that ``mesh`` is laid over; empty takes those that ``rollout`` leaves.
    rollout: devices that the engine's lanes are spread over, the same number on each; empty takes
      those that ``training`` leaves.
  """

  training: tuple[int, ...] = ()
  rollout: tuple[int, ...] = ()

  def validate(self, path: str = "config.devices") -> None:
    super().validate(path)
    require = self.requirements(path)
    for name in ("training", "rollout"):
      numbers = getattr(self, name)
      require(
        len(set(numbers)) == len(numbers) and min(numbers, default=0) >= 0,
        name,
        "different numbers >= 0",
      )
    shared = sorted(set(self.training) & set(self.rollout))
    require(
      not shared,
      "rollout",
      f"devices that are not in {path}.training={self.training}, which has "
      f"{', '.join(map(str, shared))} as well; leave both empty to share all devices",
    )


@dataclasses.dataclass(unsafe_hash=True)
class Experiment(Config):
  """Everything a run needs; saved as ``config.json`` in the run's directory.

  The policy starts from ``start_from`` if it is set, else from ``pretrained`` if that is set, else
  with random weights. With ``pretrained`` the folder's ``config.json`` decides the architecture;
  ``model`` may repeat it or keep its defaults, and chooses how the model is run
  (``models.huggingface``'s RUNTIME_FIELDS: dtypes, remat, chunks, kernels). The run's checkpoints
  load only with a folder of the same contents, anywhere.

  Attributes:
    name: shown in plots and logs.
    seed: addresses all randomness of the run.
    sandboxes: where untrusted code runs, by names that tools, worlds and verifiers refer to.
    world: what episodes take place in, by name: a folder of ``agentjax.worlds``, or
      ``module:attribute`` of your own.
    seats: other players than the policy, by agent, for environments with several agents; the policy
      plays agents that are not named. In training and evaluation.
    model: the policy: its fields, or a name such as "qwen3_8b". ``vocab_size`` follows the
      tokenizer if that is trained on the tasks.
    mesh: how devices are shared in updates.
    devices: which devices train and which sample.
    lora: trains low-rank adapters on the frozen policy, which is then the reference as well; None
      trains the policy itself. ``start_from`` then names a run without adapters.
    pretrained: Hugging Face folder (``config.json``, ``*.safetensors``, ``tokenizer.json``, a chat
      template) whose model is trained; needs ``tokenizer.kind`` "huggingface".
    start_from: checkpoint directory of an earlier run whose networks are taken over; the earlier
      run had the same model, tokenizer and ``pretrained``.
    likelihood: how tokens are scored and drawn, from left to right or otherwise, such as
      ``agentjax.recipes.dmax:DMaxConfig``.
  """

  name: str = "run"
  seed: NonNegativeInt = 0
  seats: Table[SeatConfig] = dataclasses.field(default_factory=Table)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
  chat: ChatConfig = dataclasses.field(default_factory=ChatConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  sandboxes: Table[SandboxConfig] = dataclasses.field(
    default_factory=lambda: Table(default_sandboxes())
  )
  tools: ToolsConfig = dataclasses.field(default_factory=ToolsConfig)
  world: WorldConfig = dataclasses.field(default_factory=default_world)
  guards: GuardsConfig = dataclasses.field(default_factory=GuardsConfig)
  reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
  engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
  rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
  supervised: SupervisedStage = dataclasses.field(default_factory=SupervisedStage)
  rl: RLStage = dataclasses.field(default_factory=RLStage)
  evaluation: HeldOutConfig = dataclasses.field(default_factory=HeldOutConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  devices: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
  lora: LoraConfig | None = None
  pretrained: FilePath | None = None
  start_from: FilePath | None = None
  likelihood: LikelihoodConfig = dataclasses.field(default_factory=LikelihoodConfig)

  @property
  def sampling_engine(self) -> EngineConfig:
    """Settings of the run's engine: what routers chose is recorded where training replays it."""
    recorded = self.engine.record_experts or self.rl.replay_experts
    return dataclasses.replace(self.engine, record_experts=recorded)

  @property
  def samples_in_turn(self) -> bool:
    """Whether lanes need their weights only between updates.

    They need them for longer on devices of their own, for episodes beside an update, and where the
    weights below adapters are kept.
    """
    apart = self.devices.training or self.devices.rollout
    beside = self.rl.schedule.bound > 0 or self.evaluation.interleaved
    return not (apart or beside or (self.lora is not None and self.engine.keep_base))

  def validate(self, path: str = "config") -> None:
    """Checks every part, and the combinations between parts."""
    super().validate(path)
    require = self.requirements(path)
    require(
      self.supervised.steps + self.rl.steps > 0,
      "rl.steps",
      f"> 0 when {path}.supervised.steps is 0: there is nothing to train",
    )
    require(
      self.start_from is None
      or self.supervised.token_sets is None
      or pathlib.PurePath(self.start_from).name.isdigit(),
      "start_from",
      f"RUN/checkpoints/STEP with {path}.supervised.token_sets: a resumed run reads its first "
      "policy again, and a run's newest checkpoint may by then be another",
    )
    self.tools.check_sandboxes(Sandboxes(self.sandboxes), f"{path}.tools")
    check_chat(self.chat, self.tokenizer, path)
    require(
      not self.guards.permissions.channels
      or self.guards.permissions.timeout < self.rollout.environment_timeout,
      "guards.permissions.timeout",
      f"below {path}.rollout.environment_timeout ({self.rollout.environment_timeout:g}), within "
      "which a step waits for the answer",
    )
    self._validate_pretrained(path)
    if self.pretrained is None:
      check_model_features(self, self.model, path)
    self._validate_groups(path)
    self._validate_seats(path)
    self._validate_environment(path)
    self._validate_lengths(path)
    self._validate_mesh(path)
    self.likelihood.check_run(self, f"{path}.likelihood")

  def _validate_pretrained(self, path: str) -> None:
    require = self.requirements(path)
    templated = self.tokenizer.reads_folder
    if self.pretrained is None:
      require(
        not templated or self.tokenizer.path is not None,
        "tokenizer.path",
        f"a folder when tokenizer.kind is {self.tokenizer.kind!r} and {path}.pretrained is None; "
        f"set --{path}.pretrained=DIR to train the model of a folder",
      )
      return
    require(
      templated,
      "tokenizer.kind",
      f"'huggingface' when {path}.pretrained is set: its weights know those ids only",
    )
    config = pathlib.Path(self.pretrained) / "config.json"
    require(
      config.is_file(),
      "pretrained",
      "a Hugging Face folder with config.json, *.safetensors and tokenizer.json",
    )
    pretrained_model(self.pretrained, self.model, f"{path}.model")

  def _validate_groups(self, path: str) -> None:
    if not self.rl.steps:
      return
    names = [f"{path}.rl.phases[{i}]" for i in range(len(self.rl.phases))]
    for phase, name in zip(self.rl.all_phases, (*names, f"{path}.rl"), strict=True):
      self._validate_objective(phase, path, name)
    for where, signal in self.rl.named_signals:
      signal.check_run(self, f"{path}.rl.{where}")
    require = self.requirements(path)
    require(
      self.rl.tasks_per_step % self.rl.minibatches == 0,
      "rl.minibatches",
      f"a divisor of rl.tasks_per_step = {self.rl.tasks_per_step}, so that no group is split",
    )

  def _validate_seats(self, path: str) -> None:
    require = self.requirements(path)
    check_seats(self.seats, f"{path}.seats")
    trained = trained_seats(self.seats)
    if self.rl.alternate is not None:
      self.rl.alternate.check_names(trained, f"{path}.rl.alternate")
    loaded = [name for name, seat in trained.items() if seat.start == "checkpoint"]
    require(
      self.lora is None or not loaded,
      "lora",
      f"none with start='checkpoint' of {loaded}: adapters begin at random or as those of 'policy'",
    )

  def _validate_objective(self, phase: PhaseConfig, path: str, name: str) -> None:
    """Checks an objective against the rest of the experiment; ``name`` is the phase's field."""
    objective, settings = f"{name}.objective", phase.objective
    recomputed = self.rl.old_log_probs == "recomputed" or phase.context == "response"
    if settings.needs_old_log_probs and not recomputed:
      raise ConfigError(
        f"{objective}.policy_loss.mismatch compares trainer with sampler, which "
        f"{path}.rl.old_log_probs='behaviour' takes to be the same; allowed: 'recomputed'."
      )
    self._check_groups(settings, path, objective)
    self._check_parts(settings, path, objective)
    if phase.passes is not None:
      phase.passes.check_phase(self, phase, path, name)
    self._check_repeated_updates(settings, path, objective, recomputed)
    if settings.preference is not None:
      self._check_preference(settings.preference, path, objective, recomputed)

  def _check_groups(self, settings: ObjectiveConfig, path: str, objective: str) -> None:
    """Groups are large enough for comparisons, and baselines exist."""
    require_own = settings.requirements(objective)
    check_group_size(
      settings.advantage,
      self.rollout.group_size,
      f"{path}.rollout.group_size",
      f"{objective}.advantage",
    )
    require_own(
      self.rl.rollouts is None or not settings.needs_baseline,
      "advantage.centre",
      f"another than 'baseline' with {path}.rl.rollouts: nothing is sampled, greedily or not",
    )

  def _check_parts(self, settings: ObjectiveConfig, path: str, objective: str) -> None:
    """Which parts of the reward are credited, to whom and when."""
    require = self.requirements(path)
    weighted = [name for name, weight in self.reward.shares.items() if weight]
    credit = settings.advantage
    require(
      credit.credit != "reward_to_go"
      or credit.function is not None
      or credit.gamma < 1
      or bool(credit.turn_rewards)
      or credit.kl_in_reward > 0
      or self.rl.process is not None
      or bool(self.rl.signals),
      "rl.process",
      f"a ProcessConfig, as preset('prime') needs one: with {objective}.advantage.credit="
      "'reward_to_go' and gamma=1 nothing else is paid before the end, so that it is 'broadcast'. "
      f"Or set {objective}.advantage.turn_rewards, kl_in_reward, gamma, credit='broadcast', or "
      f"{path}.rl.signals, of which one may pay tokens",
    )
    for chosen in filter(None, (credit.function, *credit.terms)):
      chosen.check_run(self, settings, objective)
    check(
      set(credit.turn_rewards) <= set(weighted),
      f"{objective}.advantage.turn_rewards",
      credit.turn_rewards,
      f"some of {weighted}, the parts that have a weight in {path}.reward, which has no formula",
    )

  def _check_repeated_updates(
    self, settings: ObjectiveConfig, path: str, objective: str, recomputed: bool
  ) -> None:
    """Losses that need several updates per batch, or do not allow them."""
    require = self.requirements(path)
    loss, updates = settings.policy_loss, self.rl.minibatches * self.rl.epochs
    on_policy = recomputed or self.rl.schedule.mode == "sync"
    require(
      loss.covariance != "kl" or updates > 1 or not on_policy,
      "rl.minibatches",
      f"rl.minibatches x rl.epochs >= 2 with {objective}.policy_loss.covariance='kl', as in "
      "preset('kl_cov'): its term |log r| has no gradient before the policy has moved",
    )
    # KL-Cov holds the ratio by its own term.
    plain = loss.covariance != "kl" and not settings.function
    unbounded = loss.clip == "none" and loss.gradient_form == "ratio" and plain
    if updates > 1 and unbounded:
      raise ConfigError(
        f"{objective}.policy_loss.clip='none' with {self.rl.minibatches} minibatches x "
        f"{self.rl.epochs} epochs lets the ratio run away; allowed: clip='ppo' or 'mask', or one "
        "optimiser step a round."
      )

  def _check_preference(
    self, preference: PreferenceConfig, path: str, objective: str, recomputed: bool
  ) -> None:
    """Checks the fields that a preference loss needs: its weights are computed before the
    update."""
    require = self.requirements(path)
    once = f"1 with {objective}.preference; further passes are further steps"
    require(self.rl.minibatches == 1, "rl.minibatches", once)
    require(self.rl.epochs == 1, "rl.epochs", once)
    require(recomputed, "rl.old_log_probs", f"'recomputed' with {objective}.preference")
    pairs_needed = preference.form == "dpo" and self.rl.rollouts is None
    require(
      self.rollout.group_size > 1 or not pairs_needed,
      "rollout.group_size",
      f">= 2 with {objective}.preference.form='dpo', unless {path}.rl.rollouts holds the pairs",
    )

  def _validate_environment(self, path: str) -> None:
    require, sampler = self.requirements(path), self.rollout.sampler
    require(
      set(sampler.scorers) <= set(self.reward.parts),
      "reward.parts",
      f"{', '.join(map(repr, sampler.scorers))} among them with "
      f"{path}.rollout.sampler={sampler.chosen!r}",
    )
    self.world.check_run(self.tools, self.data, path)

  def _validate_lengths(self, path: str) -> None:
    require = self.requirements(path)
    require(
      self.rollout.grammar == "none" or self.engine.grammar_states > 0,
      "engine.grammar_states",
      f"above 0 with rollout.grammar={self.rollout.grammar!r}",
    )
    longest = self.rollout.max_total_tokens
    require(
      longest <= self.engine.max_length,
      "rollout.max_total_tokens",
      f"at most engine.max_length ({self.engine.max_length})",
    )
    if self.rl.steps:
      require(
        self.rl.row_length >= longest,
        "rl.row_length",
        f"at least rollout.max_total_tokens ({longest}), so that no episode is cut",
      )

  def _validate_mesh(self, path: str) -> None:
    require = self.requirements(path)
    sampling, size = len(self.devices.rollout), self.engine.mesh.size
    here = self.engine.lanes * size // self.engine.processes
    if size == 1:
      require(
        self.engine.lanes % max(sampling, 1) == 0,
        "engine.lanes",
        f"a multiple of {sampling}, the devices of {path}.devices.rollout",
      )
    else:
      require(
        not sampling or sampling == here,
        "devices.rollout",
        f"engine.lanes * the devices of engine.mesh in one process = {here} of them",
      )
    splits = (self.mesh.data, self.mesh.fsdp, self.mesh.expert)
    rows = math.prod(max(ways, 1) for ways in splits)  # -1 is known on the machine only
    for stage, settings in (("supervised", self.supervised), ("rl", self.rl)):
      if settings.steps:
        require(
          settings.microbatch_rows % rows == 0,
          f"{stage}.microbatch_rows",
          f"a multiple of mesh.data * mesh.fsdp * mesh.expert = {rows}",
        )
      if settings.steps and self.mesh.context > 0:
        require(
          settings.row_length % self.mesh.context == 0,
          f"{stage}.row_length",
          f"a multiple of mesh.context ({self.mesh.context})",
        )


def check_model_features(experiment: Experiment, model: ModelConfig, path: str = "config") -> None:
  """Raises ConfigError if a stage asks for something that the model does not have.

  Args:
    experiment: its stages and ``lora`` are looked at.
    model: what is trained; the experiment's own, or that of its pretrained folder.
    path: dotted name of the experiment, for messages.
  """
  routers = num_routers(model)
  for name, stage in (("supervised", experiment.supervised), ("rl", experiment.rl)):
    if not stage.steps:
      continue
    require = stage.requirements(f"{path}.{name}")
    for field in ("balance_coefficient", "sequence_balance_coefficient", "router_z_coefficient"):
      off = not getattr(stage, field)
      require(routers > 0 or off, field, "0 for a model without a router")
    require(
      model.mtp is not None or not stage.mtp_coefficient,
      "mtp_coefficient",
      f"0 unless {path}.model.mtp is set",
    )
    require(
      experiment.lora is None or not stage.router_bias_rate,
      "router_bias_rate",
      f"0 with {path}.lora: the routers' biases belong to the frozen policy",
    )
    if stage.qk_clip is not None:
      require(experiment.lora is None, "qk_clip", f"none with {path}.lora")
      reason = qk_clip_obstacle(model)
      require(reason is None, "qk_clip", f"none, as {reason}")
  require = experiment.requirements(path)
  require(
    routers > 0 or not experiment.rl.replay_experts,
    "rl.replay_experts",
    "False for a model without a router",
  )
  for where, signal in experiment.rl.named_signals:
    signal.check_model(model, f"{path}.rl.{where}")
  if model.exact_chunk and experiment.rl.steps:
    _check_exact(experiment, model.exact_chunk, path)
  if experiment.lora is not None:
    lora_specs(param_specs(model), experiment.lora)


def _check_exact(experiment: Experiment, chunk: int, path: str) -> None:
  """Checks the fields that exact log-probs need."""
  name, stage = f"{path}.model.exact_chunk", experiment.rl
  require = experiment.requirements(path)
  require(stage.row_length % chunk == 0, "rl.row_length", f"a multiple of {name}={chunk}")
  check(
    not any(p.objective.needs_divergences for p in stage.all_phases),
    f"{path}.rl.objective.distillation.form",
    stage.objective.distillation and stage.objective.distillation.form,
    f"'sampled' with {name}={chunk}, where all tokens are scored as in sampling",
  )
  require(
    not stage.replay_experts,
    "rl.replay_experts",
    f"False with {name}={chunk}: training chooses the experts that sampling chose",
  )
  check(
    experiment.lora is None,
    name,
    chunk,
    f"0 with {path}.lora: the exact computation has no gradient of adapters",
  )


def own_names(experiment: Experiment) -> tuple[str, ...]:
  """All that an experiment names by ``module:attribute``, each once."""
  return tuple(dict.fromkeys(filter(is_own, strings(experiment.to_dict()))))


def write_experiment(experiment: Experiment) -> str:
  """What a run keeps as ``config.json``: the settings that differ from the defaults."""
  return json.dumps({"format": FORMAT} | experiment.to_short_dict(), indent=2) + "\n"


def read_experiment(text: str | bytes, where: str) -> Experiment:
  """Inverse of ``write_experiment``; not yet validated.

  Args:
    text: content of a ``config.json``.
    where: what the message calls it.

  Raises:
    ConfigError: it is not JSON, of another format, or holds a setting that is not one.
  """
  try:
    values = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{where} is not JSON: {error}.") from error
  found = values.pop("format", None) if isinstance(values, dict) else None
  if found != FORMAT:
    raise ConfigError(
      f'{where} has "format": {found!r}; allowed: {FORMAT}. It was written by another version of '
      "agentjax, whose settings had other names. To write it anew, start from the .py file that "
      "the run began with (--config=FILE.py, the same flags, a new --workdir): a run saves its "
      "config.json in today's format. docs/runs.md lists what the settings were called before."
    )
  return Experiment.from_dict(values)


def load_experiment(path: str | os.PathLike[str]) -> Experiment:
  """Experiment of a ``.py`` file with ``get_config()`` or of a ``.json`` file; not yet validated.

  Raises:
    ConfigError: no such file, another suffix, no ``get_config``, or not an Experiment.
  """
  file = pathlib.Path(path)
  if file.suffix not in (".py", ".json"):
    raise ConfigError(
      f"--config={str(path)!r}; allowed: a .py file with get_config() or a .json file."
    )
  if not file.is_file():
    raise ConfigError(
      f"--config={str(path)!r}: no such file (working directory {pathlib.Path.cwd()})."
    )
  if file.suffix == ".json":
    return read_experiment(file.read_bytes(), f"--config={str(path)!r}")
  try:
    module = load_config_module(file)
    if not hasattr(module, "get_config"):
      raise ConfigError(f"--config={str(path)!r} defines no get_config().")
    experiment = module.get_config()
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:  # the file is a program: it may fail in any way
    raise ConfigError(f"--config={str(path)!r} fails: {type(error).__name__}: {error}") from error
  if not isinstance(experiment, Experiment):
    raise ConfigError(
      f"--config={str(path)!r}: get_config() returned {type(experiment).__name__}; "
      "allowed: Experiment."
    )
  return experiment


def resolve(experiment: Experiment) -> Experiment:
  """Validates, makes paths absolute and freezes; after flags and before anything is built."""
  experiment.validate()
  experiment.make_paths_absolute()
  return experiment.freeze()
