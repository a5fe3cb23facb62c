r"""Process rewards in a run, from the log-probs of two policies.

    r_k = beta sum_{t in step k} (log pi_model(y_t) - log pi_reference(y_t))

If pi_model is a reward model that is trained on outcomes (preset "implicit_prm"), before or during
the run, and pi_reference is its start, these are implicit process rewards (PRIME, 2502.01456). If
pi_model is the policy after and pi_reference the one before reinforcement learning, they are
progress advantages (2606.26080).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from agentjax.config import Config, ConfigError, PositiveFloat, check, differing_fields
from agentjax.models import ModelConfig, Params
from agentjax.models.huggingface import RUNTIME_FIELDS
from agentjax.objectives.advantages import check_outcomes
from agentjax.objectives.columns import TOKEN_REWARDS
from agentjax.objectives.distillation import DistillationConfig
from agentjax.objectives.objective import ObjectiveConfig, policy_objective, preset
from agentjax.objectives.preparation import prepare
from agentjax.objectives.segments import (
  broadcast_to_tokens,
  last_of_unit,
  sequence_sum,
  turn_units,
  unit_sum,
)
from agentjax.sharding import replicated
from agentjax.signals.signal import (
  BatchContext,
  Metrics,
  Result,
  Signal,
  SignalConfig,
  SignalTools,
  StepContext,
)
from agentjax.signals.teacher import TeacherConfig, Teachers, load_teacher
from agentjax.text.chat import Chat
from agentjax.training.optimizer import OptimizerConfig, build_optimizer
from agentjax.training.passes import make_ready, run_update
from agentjax.training.state import (
  Network,
  NetworkSpec,
  TrainState,
  Weights,
  network_shardings,
  network_specs,
)
from agentjax.training.update import UpdateSettings, make_update
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import TEACHER_COLUMNS, Column
from agentjax.trajectory.packing import PackedSequence
from agentjax.trajectory.record import Trajectory

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment

REWARD_MODEL = "reward_model"  # name of the network that learns in the run

OUTCOME = Column(
  "process_outcome",
  "float32",
  "The part of the reward that the reward model predicts.",
  fill=np.nan,
  level="sequence",
  in_loss=False,
)


@dataclasses.dataclass(unsafe_hash=True)
class OnlineConfig(Config):
  """The reward model learns during the run, from the policy's episodes.

  One optimiser step a minibatch, with the beta of the rewards, over the weighted tokens of every
  valid sequence.

  Attributes:
    optimizer: of the reward model. PRIME's settings are not in our sources; all are ours.
    forward: "double" learns from a minibatch and then rewards it, "single" rewards it first and
      saves a forward pass. The default is ours.
    outcome: part of the reward that is predicted, in 0..1; "" is the reward itself.
    loss: "outcome": of the preset "implicit_prm", the cross-entropy of ``sigmoid(sum_t r_t)`` and
      the outcome (PRIME, 2502.01456). "pairs": of the preset "dpo", ``-log sigmoid(sum_t r_t of the
      better - sum_t r_t of the worse)`` (iStar), over all pairs of a group with different outcomes.
  """

  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  forward: Literal["double", "single"] = "double"
  outcome: str = ""
  loss: Literal["outcome", "pairs"] = "outcome"


@dataclasses.dataclass(unsafe_hash=True)
class ProcessConfig(SignalConfig):
  """Rewards of steps in addition to the reward of the episode, for credit "reward_to_go" and "gae".

  Attributes:
    model: pi_model, loaded once; None is the run's own policy as a step begins or, with ``online``,
      as the stage begins.
    reference: pi_reference; None is ``against``.
    against: "reference": the run's reference policy, the one that reinforcement learning, or its
      present phase, started from; "policy": the policy as the step begins (iStar).
    beta: of the formula. PRIME's value is not in our sources; .05 is ours.
    per: what a step is: a "token", or a "turn", which is paid at its last token.
    centre: subtracted from every step: "none", or the mean step of the other members of its group
      ("leave_one_out", as in PRIME; nothing if there are no others).
    online: pi_model is trained in the run; None leaves it as it is.
  """

  model: TeacherConfig | None = None
  reference: TeacherConfig | None = None
  against: Literal["reference", "policy"] = "reference"
  beta: PositiveFloat = 0.05
  per: Literal["token", "turn"] = "token"
  centre: Literal["none", "leave_one_out"] = "none"
  online: OnlineConfig | None = None

  def validate(self, path: str = "config.rl.process") -> None:
    super().validate(path)
    for name in ("model", "reference"):
      policy = getattr(self, name)
      sources = () if policy is None else policy.sources
      check(not sources, f"{path}.{name}.sources", sources, "(): it is asked about all episodes")
    own = self.against == "reference"
    said = f"'reference' with {path}.reference"
    check(own or self.reference is None, f"{path}.against", self.against, said)
    said = (
      f"'reference' unless {path}.online or {path}.model: the policy against itself pays nothing"
    )
    taught = self.online is not None or self.model is not None
    check(own or taught, f"{path}.against", self.against, said)

  @property
  def objective(self) -> ObjectiveConfig:
    """The model's loss, with ``online``."""
    pairs = self.online is not None and self.online.loss == "pairs"
    objective = preset("dpo" if pairs else "implicit_prm")
    assert objective.preference is not None
    objective.preference.beta = self.beta
    return objective.freeze()

  @property
  def needs_reference(self) -> bool:
    """See ``SignalConfig.needs_reference``."""
    return self.reference is None and self.against == "reference"

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Steps are paid before the end, and both policies read whole episodes."""
    require = self.requirements(path)
    stage = experiment.rl
    names = [f"config.rl.phases[{i}]" for i in range(len(stage.phases))]
    for phase, where in zip(stage.all_phases, (*names, "config.rl"), strict=True):
      credit = phase.objective.advantage
      check(
        credit.credit != "broadcast" or credit.function is not None,
        f"{where}.objective.advantage.credit",
        credit.credit,
        f"'reward_to_go' or 'gae' with {path}, which rewards single steps",
      )
      check(
        phase.context == "episode",
        f"{where}.context",
        phase.context,
        f"'episode' with {path}, whose policies read whole episodes",
      )
    if self.online is None:
      return
    check(
      not stage.phases or not self.needs_reference,
      f"{path}.reference",
      None,
      f"a policy with {path}.online and config.rl.phases: the model learns against one reference, "
      "and the run's own is another after a phase",
    )
    require(
      experiment.lora is None,
      "online",
      "none with config.lora: the reward model is a second whole model with an optimiser",
    )
    require(
      self.online.outcome in ("", *experiment.reward.parts),
      "online.outcome",
      f"'' or one of config.reward.parts = {experiment.reward.parts}",
    )

  def networks(
    self, model: ModelConfig, updates: int, start: Any = "policy"
  ) -> Mapping[str, NetworkSpec]:
    """The network that learns beside the policy; ``start`` is that of its ``NetworkSpec``."""
    if self.online is None or not updates:
      return {}
    specs = network_specs(model, critic=False)
    optimizer = build_optimizer(self.online.optimizer, updates, specs)
    return {REWARD_MODEL: NetworkSpec(specs, optimizer, start)}

  def optimizers(self) -> Mapping[str, tuple[OptimizerConfig, str, str]]:
    """See ``SignalConfig.optimizers``."""
    if self.online is None:
      return {}
    own = self.online.optimizer
    return {"online.optimizer": (own, "the reward model", "process/bad_steps")}

  def build(self, tools: SignalTools) -> StepRewards:
    """See ``SignalConfig.build``."""
    assert tools.chat is not None
    chat, start, model = tools.chat, self.model, None
    loaded = start and (lambda: Weights(load_start(start, chat, tools.model, tools.mesh)))
    specs = self.networks(tools.model, tools.updates, loaded or "policy")
    if REWARD_MODEL in specs:
      spec = specs[REWARD_MODEL]
      model = RewardModel(self, tools.model, spec, tools.mesh, tools.temperature)
    return StepRewards(ProcessRewards(self, tools), model)


class ProcessRewards:
  """Scores batches; the policies are loaded at their first use.

  Args:
    config: see ProcessConfig.
    tools: of the run.
  """

  def __init__(self, config: ProcessConfig, tools: SignalTools):
    self.config = config

    def loaded(policy: TeacherConfig | None) -> Teachers | None:
      return None if policy is None else Teachers((policy,), tools)

    # A model that is trained belongs to the state of the run.
    self._policies = {
      "model": loaded(config.model) if config.online is None else None,
      "reference": loaded(config.reference),
    }

  def log_probs(
    self,
    name: Literal["model", "reference"],
    batch: Batch,
    sequences: Sequence[PackedSequence],
    own: Any,
    placed: Batch | None = None,
  ) -> Any:
    """[B, T] of the policy that the config names, or ``own``, the run's, where it names none.

    Args:
      name: which of the two.
      batch: rows of the sequences, on the host.
      sequences: what was packed.
      own: [B, T]; may be None where the config names another.
      placed: the batch on the mesh, as ``Teachers.ask`` has it.
    """
    policy = self._policies[name]
    if policy is not None:
      bare = batch.without(*TEACHER_COLUMNS)  # what another teacher said is not its answer
      return policy.ask(DistillationConfig(), None, bare, sequences, placed)["log_probs"]
    assert own is not None
    return own

  def score(
    self, packed: Batch, batch: Batch, model_log_probs: Any, reference_log_probs: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Float32 [B, T], the reward of each step on its last token, and metrics, all on the mesh.

    Args:
      packed: the batch on the host. Where it has no weights there are no steps and no metrics.
      batch: the same on the mesh, with the columns of the signals before.
      model_log_probs, reference_log_probs: [B, T], of ``log_probs``.
    """
    config = self.config
    rewards, metrics = step_rewards(
      batch,
      model_log_probs,
      reference_log_probs,
      beta=config.beta,
      per=config.per,
      centre=config.centre,
    )
    return rewards, metrics if np.any(packed.weights) else {}


class RewardModel:
  """pi_model if it learns in the run: one optimiser step per batch, on the episodes' outcomes.

  Args:
    config: see ProcessConfig; ``online`` is set.
    model: of the policy and of the reward model.
    spec: of ``ProcessConfig.networks``.
    mesh: that of the updates.
    temperature: divides logits.
  """

  def __init__(
    self,
    config: ProcessConfig,
    model: ModelConfig,
    spec: NetworkSpec,
    mesh: jax.sharding.Mesh,
    temperature: float,
  ):
    assert spec.optimizer is not None
    own = network_shardings(spec.specs, spec.optimizer, mesh)
    placed = TrainState(replicated(mesh), {REWARD_MODEL: own})
    self.networks = {REWARD_MODEL: spec}
    self.prepare = jax.jit(functools.partial(prepare, config=config.objective))
    settings = UpdateSettings(temperature=temperature)
    loss = policy_objective(config.objective)
    self._update = make_update(model, spec.optimizer, loss, settings, placed, REWARD_MODEL)

  def learn(
    self,
    online: OnlineConfig,
    network: Network,
    batch: Batch,
    context: BatchContext,
    reference_log_probs: Any,
  ) -> tuple[Network, jax.Array, dict[str, float]]:
    """The network after a step, its log-probs [B, T] for the rewards, and ``process/...``.

    Metrics are of the model before it has learnt from these episodes.

    Args:
      online: settings.
      network: the reward model.
      batch: on the mesh.
      context: of the batch.
      reference_log_probs: [B, T], of pi_reference.
    """
    own = batch.for_loss()  # it chooses its own experts
    rewards, valid = context.packed.rewards, context.packed.valid
    if online.outcome:
      values = np.asarray(context.packed.column(OUTCOME.name))
      known = ~np.isnan(values)
      rewards, valid = np.where(known, values, 0), np.asarray(valid) & known  # type: ignore[assignment]
      outcomes = {"rewards": rewards, "valid": valid}
      own = own.with_columns({k: context.rows.place_column(k, v) for k, v in outcomes.items()})
    if online.loss == "outcome":
      check_outcomes(
        np.asarray(rewards),
        np.asarray(valid),
        f"config.rl.process.online.outcome={online.outcome!r}",
        "set --config.rl.process.online.outcome to a part of the reward that has such",
      )
    before, _ = context.score(network.weights, own)
    reference = context.rows.place_column("reference_log_probs", reference_log_probs)
    prepared, found = self.prepare(own, old_log_probs=before, reference_log_probs=reference)
    ready = make_ready(context.rows, own, prepared)
    state = TrainState(jnp.zeros((), jnp.int32), {REWARD_MODEL: network})
    state, changed, _ = run_update(self._update, state, ready, context.rows.mesh)
    network = state.networks[REWARD_MODEL]
    metrics = {
      f"process/{name}": float(found[f"preference/{name}"])
      for name in ("loss", "accuracy", "margin")
    }
    metrics |= {
      f"process/{name}": changed[name] for name in ("grad_norm", "update_norm", "bad_steps")
    }
    if online.forward == "single":
      return network, before, metrics
    return network, context.score(network.weights, own)[0], metrics


class StepRewards(Signal):
  """Rewards of steps by two policies' log-probs, for credit "reward_to_go" and "gae".

  Args:
    rewards: pi_model and pi_reference, and how they are compared.
    model: pi_model where it learns in the run; its state is the network "reward_model".
  """

  name = "process"
  needs = ("old_log_probs", "reference_log_probs", "selected")
  adds = (TOKEN_REWARDS, OUTCOME)

  def __init__(self, rewards: ProcessRewards, model: RewardModel | None = None):
    self.rewards, self.model = rewards, model
    self.networks = {} if model is None else model.networks

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    online = self.rewards.config.online
    if online is None or not online.outcome:
      return list(episodes), {}
    result = []
    for one in episodes:
      part = one.reward_parts.get(online.outcome)
      value = np.nan if part is None or part.value is None else part.value
      columns = {**one.columns, OUTCOME.name: np.array(value, np.float32)}
      result.append(dataclasses.replace(one, columns=columns))
    return result, {}

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    packed, sequences = context.packed, context.sequences
    policy = batch.columns.get("old_log_probs", batch.behaviour_log_probs)
    against = self.rewards.config.against == "policy"
    own = policy if against else batch.columns.get("reference_log_probs")
    reference = self.rewards.log_probs("reference", packed, sequences, own, batch)
    changed: dict[str, Any] = {}
    learnt: dict[str, float] = {}
    online = self.rewards.config.online
    if online is None or self.model is None:
      model = self.rewards.log_probs("model", packed, sequences, policy, batch)
    else:
      trained = networks[REWARD_MODEL]
      trained, model, learnt = self.model.learn(online, trained, batch, context, reference)
      changed[REWARD_MODEL] = trained
    token_rewards, metrics = self.rewards.score(packed, batch, model, reference)
    return Result({"token_rewards": token_rewards}, changed, metrics | learnt)


def load_start(
  config: TeacherConfig, chat: Chat, student: ModelConfig, mesh: jax.sharding.Mesh
) -> Params:
  """The parameters from which a reward model goes on learning; arguments as ``load_teacher`` has.

  Raises:
    ConfigError: its model is not that of the policy.
    CheckpointError: there is nothing to load.
  """
  loaded = load_teacher(config, chat, student, mesh)
  # Its parameters are run as the policy's are.
  here, there = (
    {k: v for k, v in m.to_dict().items() if k == "param_dtype" or k not in RUNTIME_FIELDS}
    for m in (student, loaded.model)
  )
  differences = list(differing_fields(there, here, "config.model"))
  if differences:
    raise ConfigError(
      f"config.rl.process.model={config.path!r} is another model than the policy: "
      f"{'; '.join(differences)}. Allowed with config.rl.process.online: the policy's, or None, "
      "which starts from the policy."
    )
  return loaded.params


def log_ratio_rewards(
  log_probs: Float[Any, "*shape"], reference_log_probs: Float[Any, "*shape"], *, beta: float
) -> Float[Any, "*shape"]:
  """``beta (log pi - log pi_ref)`` of the tokens taken, nats; of numpy's or jax's arrays.

  With pi a reward model trained on outcomes: implicit process rewards. With pi the policy after and
  pi_ref the one before reinforcement learning with KL weight beta: progress advantages.
  """
  if log_probs.shape != reference_log_probs.shape:
    raise ValueError(
      f"log-probs of one shape are needed, got {log_probs.shape} and {reference_log_probs.shape}."
    )
  return beta * (log_probs - reference_log_probs)


@functools.partial(jax.jit, static_argnames=("beta", "per", "centre"))
def step_rewards(
  batch: Batch,
  model_log_probs: jax.Array,
  reference_log_probs: jax.Array,
  *,
  beta: float,
  per: Literal["token", "turn"],
  centre: Literal["none", "leave_one_out"],
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """See ``ProcessRewards.score``; ``beta``, ``per`` and ``centre`` as in ProcessConfig.

  Tokens that another signal has not ``selected`` belong to no step, as they have no weight later.
  """
  weights = jnp.where(batch.columns.get("selected", True), batch.weights, 0)
  ends = weights > 0
  paid = jnp.where(ends, log_ratio_rewards(model_log_probs, reference_log_probs, beta=beta), 0)
  if per == "turn":
    units = turn_units(batch.segment_ids, batch.turns)
    ends = last_of_unit(weights, units)
    paid = jnp.where(ends, unit_sum(paid, units), 0)
  if centre == "leave_one_out":
    off = broadcast_to_tokens(_means_of_others(paid, ends, batch), batch.segment_ids)
    paid = jnp.where(ends, paid - off, 0)
  count = jnp.maximum(jnp.sum(ends), 1)
  mean = jnp.sum(paid) / count
  variance = jnp.sum(jnp.where(ends, jnp.square(paid - mean), 0)) / count
  return paid, {"process/step": mean, "process/step_std": jnp.sqrt(variance)}


def _means_of_others(paid: jax.Array, ends: jax.Array, batch: Batch) -> jax.Array:
  """[N], for every sequence the mean over the others of its group of their mean step.

  0 without others. A sequence that is not valid, or has no step, is nobody's other.
  """
  places = batch.num_sequences
  count = sequence_sum(ends.astype(paid.dtype), batch.segment_ids, places)
  means = sequence_sum(paid, batch.segment_ids, places) / jnp.maximum(count, 1)
  known = batch.valid & (count > 0) & ~jnp.isnan(means)
  groups = jnp.maximum(batch.groups, 0)  # unused places have -1, and are not known

  def of_others(values: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(values, groups, places)[groups] - values

  others = of_others(known.astype(paid.dtype))
  return jnp.where(others > 0, of_others(jnp.where(known, means, 0)) / jnp.maximum(others, 1), 0)
