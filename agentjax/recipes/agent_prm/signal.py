r"""AgentPRM in a run: a model of promise learns from the policy's episodes and pays their turns.

A language model with a linear head reads the episode and predicts at the last token of turn k its
promise q_k. What is known before turn k is the promise of the turn before, so V_k = q_{k-1}, and
V_1 = 0. In each batch the labels come from these present values and the outcome R:

    Q_k, A_k = promise_and_progress(V, r),   r = R at the last turn, 0 before
    loss = mean over turns of (q_k - Q_k)^2 + beta ((q_k - q_{k-1}) - A_k)^2
    r_k = q_k - q_{k-1}

The policy is paid progress r_k at the end of turn k, instead of R at the end of the episode.

Reference: 2511.08325, of which only the abstract is known to us. Ours: V, the values of gamma,
lambda and beta, that the model learns in the run, and ``residual``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from agentjax.config import NonNegativeFloat, PositiveInt, PositiveShare, Share
from agentjax.models import ModelConfig
from agentjax.objectives.columns import TOKEN_REWARDS, TURN_REWARDS
from agentjax.objectives.segments import (
  broadcast_to_tokens,
  last_of_unit,
  sequence_sum,
  sequence_units,
)
from agentjax.recipes.agent_prm.labels import promise_and_progress
from agentjax.recipes.agent_prm.loss import promise_progress_loss
from agentjax.signals.networks import (
  check_start,
  descend,
  map_rows,
  reader_model,
  reader_spec,
  said_of_turns,
  steps_on,
  turn_rows,
)
from agentjax.signals.reward_parts import check_pays_turns, move_to_weights
from agentjax.signals.signal import BatchContext, Result, Signal, SignalConfig, SignalTools
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.state import Network, NetworkSpec, Weights
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column, get_column

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment

Array = jax.Array

PROMISE = "promise"  # name of the network
PROMISE_LABELS = Column(
  "promise_labels", "float32", "AgentPRM's Q at the last token of a turn.", in_loss=False
)
PROGRESS_LABELS = Column(
  "progress_labels", "float32", "AgentPRM's A at the last token of a turn.", in_loss=False
)


def _optimizer() -> OptimizerConfig:
  return OptimizerConfig(learning_rate=1e-5)


@dataclasses.dataclass(unsafe_hash=True)
class AgentPrmConfig(SignalConfig):
  """The model of promise, its labels, and the rewards of turns.

  The source's values are not known to us; all defaults are ours.

  Attributes:
    gamma, gae_lambda: of the labels. With ``gae_lambda`` 0 a label would be the model's own
      prediction, so it is above 0.
    beta: weight of progress in the loss.
    residual: the difference if the promise of the last turn is not the outcome: "paid" at the end
      of the episode, so that all payments sum to the outcome, or "dropped", so that only the model
      pays.
    model: size of the network; None is the policy's. Its vocabulary is the policy's.
    start: "policy", a copy of its parameters as the stage begins, or "random". The head starts at
      0, so that before the first step nothing is promised.
    epochs: optimiser steps a batch.
    optimizer: of the network.
  """

  gamma: Share = 1.0
  gae_lambda: PositiveShare = 0.95
  beta: NonNegativeFloat = 1.0
  residual: Literal["paid", "dropped"] = "paid"
  model: ModelConfig | None = None
  start: Literal["policy", "random"] = "policy"
  epochs: PositiveInt = 1
  optimizer: OptimizerConfig = dataclasses.field(default_factory=_optimizer)

  def validate(self, path: str = "config.rl.signals") -> None:
    super().validate(path)
    check_start(self.model, self.start, path)

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Turns are paid before the end of an episode, which "broadcast" has no place for."""
    check_pays_turns(experiment, path)

  def networks(self, model: ModelConfig, updates: int) -> Mapping[str, NetworkSpec]:
    """See ``SignalConfig.networks``."""
    own, steps = reader_model(self.model, model), updates * self.epochs
    return {PROMISE: reader_spec(own, self.optimizer, steps, self.start)}

  def optimizers(self) -> Mapping[str, tuple[OptimizerConfig, str, str]]:
    """See ``SignalConfig.optimizers``."""
    return {"optimizer": (self.optimizer, "the model of promise", "agent_prm/bad_steps")}

  def build(self, tools: SignalTools) -> PromiseModel:
    """See ``SignalConfig.build``."""
    return PromiseModel(self, tools)


class PromiseModel(Signal):
  """Pays turns their progress, and trains the model of promise on labels of the same batch.

  Metrics: ``agent_prm/error``, the mean of |q - R| at last turns, and ``agent_prm/loss``, both
  before the model learns from the batch; ``agent_prm/grad_norm``, ``agent_prm/update_norm`` and
  ``agent_prm/bad_steps`` of its first optimiser step on it.

  Args:
    config: see AgentPrmConfig.
    tools: what signals are built with.
  """

  name = "agent_prm"
  needs = ("selected",)

  def __init__(self, config: AgentPrmConfig, tools: SignalTools):
    self._config, self._tools = config, tools
    model = reader_model(config.model, tools.model)
    self.networks = config.networks(tools.model, tools.updates)
    own = self.networks[PROMISE]
    assert own.optimizer is not None
    self.adds = (TOKEN_REWARDS, get_column("rewards"), PROMISE_LABELS, PROGRESS_LABELS)
    self._promises = jax.jit(functools.partial(_promises, model=model, rows=tools.rows))
    self._labels = jax.jit(
      functools.partial(_labels, gamma=config.gamma, gae_lambda=config.gae_lambda)
    )
    update = functools.partial(
      _update, model=model, optimizer=own.optimizer, beta=config.beta, rows=tools.rows
    )
    self._learn = steps_on(update, own, tools.mesh, config.epochs)

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    del context
    with jax.set_mesh(self._tools.mesh):
      promises, ends = self._promises(networks[PROMISE].weights, batch)
      progress, rest, error = _progress(promises, ends, batch)
      paid = move_to_weights(batch.with_columns({TURN_REWARDS.name: progress}))
      promise, step = self._labels(promises, ends, batch)
    columns = {PROMISE_LABELS.name: promise, PROGRESS_LABELS.name: step}
    left = rest if self._config.residual == "paid" else jnp.zeros_like(rest)
    return Result(
      {TOKEN_REWARDS.name: paid, "rewards": left, **columns}, metrics={"agent_prm/error": error}
    )

  def learn(
    self, context: BatchContext, networks: Mapping[str, Any], batch: Batch, prepared: Any
  ) -> Result:
    del context, prepared
    network, metrics = self._learn(networks[PROMISE], batch)
    return Result(
      networks={PROMISE: network}, metrics={f"agent_prm/{k}": v for k, v in metrics.items()}
    )


def _promises(weights: Weights, batch: Batch, model: ModelConfig, rows: int) -> tuple[Array, Array]:
  """Promises [B, T], and where turns end."""
  read = turn_rows(batch)
  return map_rows(lambda one: said_of_turns(weights, one, model), read, rows), read[3]


def _before(promises: Array, ends: Array, segment_ids: Array) -> Array:
  """[B, T]: the promise of the last turn that ended before each token, in its sequence; else 0."""
  places = jnp.broadcast_to(jnp.arange(ends.shape[1]), ends.shape)
  last = jax.lax.cummax(jnp.where(ends, places, -1), axis=1)
  earlier = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  at = jnp.maximum(earlier, 0)
  same = jnp.take_along_axis(segment_ids, at, axis=1) == segment_ids
  return jnp.where((earlier >= 0) & same, jnp.take_along_axis(promises, at, axis=1), 0)


@jax.jit
def _progress(promises: Array, ends: Array, batch: Batch) -> tuple[Array, Array, Array]:
  """Progress where turns end [B, T], outcomes less its sums [N], and their mean absolute value."""
  segments, number = batch.segment_ids, batch.num_sequences
  progress = jnp.where(ends, promises - _before(promises, ends, segments), 0)
  turns = sequence_sum(ends.astype(jnp.float32), segments, number)
  known = batch.valid & (turns > 0)
  rest = jnp.where(batch.valid, batch.rewards - sequence_sum(progress, segments, number), 0)
  error = jnp.sum(jnp.where(known, jnp.abs(rest), 0)) / jnp.maximum(jnp.sum(known), 1)
  return progress, rest, error


def _labels(
  promises: Array, ends: Array, batch: Batch, *, gamma: float, gae_lambda: float
) -> tuple[Array, Array]:
  """[B, T] each: ``promise_and_progress`` of present values, the outcome paid at the last turn."""
  segments = batch.segment_ids
  last = last_of_unit(ends.astype(jnp.float32), sequence_units(segments))
  rewards = jnp.where(last, broadcast_to_tokens(batch.rewards, segments), 0)
  before = _before(promises, ends, segments)
  return promise_and_progress(before, rewards, ends, segments, gamma=gamma, gae_lambda=gae_lambda)


def _update(
  network: Network,
  batch: Batch,
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  beta: float,
  rows: int,
) -> tuple[Network, dict[str, Array]]:
  """One optimiser step on the mean loss of the turns of valid episodes, and metrics before it."""
  read = turn_rows(batch)
  valid = broadcast_to_tokens(batch.valid.astype(jnp.float32), batch.segment_ids) > 0
  counted = read[3] & valid
  number = jnp.maximum(jnp.sum(counted), 1)
  labels = batch.column(PROMISE_LABELS.name), batch.column(PROGRESS_LABELS.name)

  def total(weights: Weights, one: Any) -> Array:
    # Sequences are never split over rows, so the turn before stands in the same micro-batch.
    seen, (promise, progress), here = one
    predicted = said_of_turns(weights, seen, model)
    before = _before(predicted, seen[3], seen[1])
    loss = promise_progress_loss(predicted, before, promise, progress, beta=beta)
    return jnp.sum(jnp.where(here, loss, 0)) / number

  return descend(network, optimizer, total, (read, labels, counted), rows)
