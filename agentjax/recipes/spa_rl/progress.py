r"""Stepwise progress attribution: what each turn of an episode contributed to its outcome (SPA-RL).

A language model with a linear head, the progress estimator, reads the episode and predicts at the
last token of turn k the turn's contribution c_k. It is trained so that the contributions of an
episode add up to its outcome R; the policy is then paid by turn instead of at the end:

    loss = mean over episodes of (sum_k c_k - R)^2,      r_k = c_k + weight g_k,

with g_k 1 where the environment could carry out the action of turn k, and 0 where not. Advantages
are GAE's over these rewards.

Reference: 2505.20732 and its code (WangHanLinHenry/SPA-RL-Agent), which knows refusals by their
text alone. Ours: the estimator is fitted on the first ``fit_steps`` training steps, in which the
policy is paid at the end as without it; ``residual``; and how else a turn is known not to have been
carried out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from agentjax.config import check
from agentjax.models import ModelConfig
from agentjax.objectives.columns import TOKEN_REWARDS, TURN_REWARDS
from agentjax.objectives.segments import sequence_sum
from agentjax.signals.networks import (
  TurnRows,
  check_start,
  descend,
  map_rows,
  reader_model,
  reader_spec,
  said_of_turns,
  steps_on,
  turn_ends,
  turn_rows,
)
from agentjax.signals.reward_parts import check_pays_turns, move_to_weights
from agentjax.signals.signal import (
  BatchContext,
  Metrics,
  Result,
  Signal,
  SignalConfig,
  SignalTools,
  StepContext,
)
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.state import Network, NetworkSpec, Weights
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column, get_column
from agentjax.trajectory.record import Flag, Status, Trajectory

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment

PROGRESS = "progress"  # name of the network
GROUNDED = Column(
  "grounded",
  "float32",
  "1 where the environment carried out the action of the turn, 0 where it did not.",
  level="turn",
  in_loss=False,
)
_NOT_DONE = frozenset({Flag.TRUNCATED, Flag.NOT_EXECUTED})


def _optimizer() -> OptimizerConfig:
  return OptimizerConfig(learning_rate=3e-6)


@dataclasses.dataclass(unsafe_hash=True)
class ProgressConfig(SignalConfig):
  """The estimator, when it learns, and the rewards of turns.

  Attributes:
    fit_steps: training steps at the beginning in which the estimator learns from the policy's
      episodes; the policy is paid the outcome at the end as long. None: it learns all the time, and
      turns are paid by it from the first step on. The paper fits it before reinforcement learning.
    grounding: weight of g_k: 1 in the paper, .5 in the released WebShop script.
    refusals: texts in the answer of the environment that say that an action could not be carried
      out. A turn that was cut off, that the environment says it did not carry out
      (``Step.executed``) or whose tool call has not the status "ok", and the last turn of an
      episode that broke the protocol, count as refused, too.
    residual: the difference if contributions do not add up to R: "dropped", as in the paper, or
      "paid" at the end of the episode, so that the sum is R.
    model: size of the estimator; None is the policy's. Its vocabulary is the policy's.
    start: "policy", a copy of its parameters as the stage begins, or "random". The head starts at
      0.
    epochs: optimiser steps a batch. Ours.
    optimizer: the learning rate 3e-6 is the paper's.
  """

  fit_steps: int | None = None
  grounding: float = 1.0
  refusals: tuple[str, ...] = ("Nothing happens",)
  residual: Literal["dropped", "paid"] = "dropped"
  model: ModelConfig | None = None
  start: Literal["policy", "random"] = "policy"
  epochs: int = 1
  optimizer: OptimizerConfig = dataclasses.field(default_factory=_optimizer)

  def validate(self, path: str = "config.rl.signals") -> None:
    super().validate(path)
    fit = self.fit_steps
    check(fit is None or fit >= 1, f"{path}.fit_steps", fit, ">= 1, or None")
    check(self.grounding >= 0, f"{path}.grounding", self.grounding, ">= 0")
    check(all(self.refusals), f"{path}.refusals", self.refusals, "texts of one character or more")
    check(self.epochs >= 1, f"{path}.epochs", self.epochs, ">= 1")
    check_start(self.model, self.start, path)

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Turns are paid before the end of an episode, which "broadcast" has no place for."""
    check_pays_turns(experiment, path)

  def networks(self, model: ModelConfig, updates: int) -> Mapping[str, NetworkSpec]:
    """See ``SignalConfig.networks``."""
    own, steps = reader_model(self.model, model), updates * self.epochs
    return {PROGRESS: reader_spec(own, self.optimizer, steps, self.start)}

  def build(self, tools: SignalTools) -> ProgressEstimator:
    """See ``SignalConfig.build``."""
    return ProgressEstimator(self, tools)


class ProgressEstimator(Signal):
  """Pays turns by the estimator's contributions, and trains it on outcomes.

  Metrics: ``spa_rl/loss`` before the first optimiser step on the batch, ``spa_rl/grad_norm``,
  ``spa_rl/update_norm`` and ``spa_rl/bad_steps`` while it learns; ``spa_rl/error``, the mean of
  |sum_k c_k - R|; ``spa_rl/grounded``, the share of turns that were carried out;
  ``spa_rl/learns`` 0 or 1.

  Args:
    config: see ProgressConfig.
    tools: what signals are built with.
  """

  name = "spa_rl"
  needs = ("selected",)

  def __init__(self, config: ProgressConfig, tools: SignalTools):
    self._config, self._tools = config, tools
    self._steps = 0  # training steps seen, with the present one
    model = reader_model(config.model, tools.model)
    self.networks = config.networks(tools.model, tools.updates)
    own = self.networks[PROGRESS]
    assert own.optimizer is not None
    self.adds = (TOKEN_REWARDS, GROUNDED, get_column("rewards"))
    self._attribute = jax.jit(functools.partial(_attribute, model=model, rows=tools.rows))
    self._pay = jax.jit(
      functools.partial(_pay, grounding=config.grounding, residual=config.residual == "paid")
    )
    update = functools.partial(_update, model=model, optimizer=own.optimizer, rows=tools.rows)
    self._learn = steps_on(update, own, tools.mesh, config.epochs)

  @property
  def _fitting(self) -> bool:
    return self._config.fit_steps is not None and self._steps <= self._config.fit_steps

  @property
  def _learns(self) -> bool:
    return self._config.fit_steps is None or self._fitting

  def get_state(self) -> int:
    return self._steps

  def set_state(self, state: Any) -> None:
    self._steps = int(state)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    """Episodes whose drawn segments say whether their turn was carried out."""
    del context
    self._steps += 1
    marked, shares = [], []
    for one in episodes:
      grounded = grounded_turns(one, self._tools.token_bytes, self._config.refusals)
      segments = [
        s.with_columns({GROUNDED.name: np.array(grounded[i], np.float32)}) if i in grounded else s
        for i, s in enumerate(one.segments)
      ]
      marked.append(dataclasses.replace(one, segments=segments))
      shares += list(grounded.values())
    metrics = {"spa_rl/learns": float(self._learns)}
    return marked, metrics | ({"spa_rl/grounded": float(np.mean(shares))} if shares else {})

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    read = turn_rows(batch)
    with jax.set_mesh(self._tools.mesh):
      found = self._attribute(networks[PROGRESS].weights, read)
      paid, left, error = self._pay(found, batch, batch.column(GROUNDED.name))
    metrics = {"spa_rl/error": error}
    if self._fitting:
      paid, left = jnp.zeros_like(paid), batch.rewards
    # The estimator learns from outcomes, even when turns are paid instead.
    context.notes[self.name] = (read, batch.rewards)
    return Result({"token_rewards": paid, "rewards": left}, metrics=metrics)

  def learn(
    self, context: BatchContext, networks: Mapping[str, Any], batch: Batch, prepared: Any
  ) -> Result:
    del prepared
    if not self._learns:
      return Result()
    read, outcomes = context.notes[self.name]
    network, metrics = self._learn(networks[PROGRESS], read, outcomes, batch.valid)
    return Result(
      networks={PROGRESS: network}, metrics={f"spa_rl/{k}": v for k, v in metrics.items()}
    )


def grounded_turns(
  episode: Trajectory, token_bytes: Sequence[bytes | None], refusals: Sequence[str]
) -> dict[int, float]:
  """Of each segment that holds drawn tokens, by its index: 1.0, or 0.0 where it was refused.

  Args:
    episode: its segments hold the ids of what the environment answered.
    token_bytes: of the vocabulary.
    refusals: see ``ProgressConfig``.
  """
  segments = episode.segments
  drawn = [i for i, s in enumerate(segments) if s.sampled.any()]
  said: dict[int, bytes] = {}
  answered: list[int | None] = []  # of each segment: the drawn one that it answers, or is
  for i, segment in enumerate(segments):
    parent = segment.parent
    answered.append(None if parent is None else answered[parent])
    if segment.sampled.any():
      answered[i] = i
    elif segment.owner != "assistant" and (turn := answered[i]) is not None:
      text = b"".join(token_bytes[i] or b"" for i in segment.token_ids.tolist())
      said[turn] = said.get(turn, b"") + text
  wanted = [text.encode() for text in refusals]
  failed = {record.turn for record in episode.tools if record.status != "ok"}
  result = {
    i: float(
      not segments[i].flags & _NOT_DONE
      and segments[i].turn not in failed
      and not any(text in said.get(i, b"") for text in wanted)
    )
    for i in drawn
  }
  if drawn and episode.status is Status.POLICY_ERROR:
    result[drawn[-1]] = 0.0
  return result


def _attribute(weights: Weights, read: TurnRows, model: ModelConfig, rows: int) -> Array:
  return map_rows(lambda one: said_of_turns(weights, one, model), read, rows)


def _pay(
  found: Array, batch: Batch, grounded: Array, grounding: float, residual: bool
) -> tuple[Array, Array, Array]:
  """Rewards of tokens [B, T], the remainder at the end [N], and the mean |sum_k c_k - R|."""
  ends = turn_ends(batch)
  earned = found + grounding * jnp.where(ends, grounded, 0)
  paid = move_to_weights(batch.with_columns({TURN_REWARDS.name: earned}))
  known = _learnt_from(ends, batch.segment_ids, batch.valid)
  rest = batch.rewards - sequence_sum(found, batch.segment_ids, batch.num_sequences)
  error = jnp.sum(jnp.where(known, jnp.abs(rest), 0)) / jnp.maximum(jnp.sum(known), 1)
  left = jnp.where(batch.valid, rest, 0) if residual else jnp.zeros_like(batch.rewards)
  return paid, left, error


def _learnt_from(ends: Array, segment_ids: Array, valid: Array) -> Array:
  """bool [N]: sequences with a valid reward and a turn."""
  turns = sequence_sum(ends.astype(jnp.float32), segment_ids, valid.shape[0])
  return valid & (turns > 0)


def _update(
  network: Network,
  read: TurnRows,
  outcomes: Array,
  valid: Array,
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  rows: int,
) -> tuple[Network, dict[str, Array]]:
  """One optimiser step on the squared error of the sums, and metrics before it."""
  number = jnp.maximum(jnp.sum(_learnt_from(read[3], read[1], valid)), 1)

  def total(weights: Weights, one: TurnRows) -> Array:
    # Sequences are never split over rows, so each has its whole sum in one micro-batch.
    sums = sequence_sum(said_of_turns(weights, one, model), one[1], valid.shape[0])
    here = _learnt_from(one[3], one[1], valid)
    return jnp.sum(jnp.where(here, jnp.square(sums - outcomes), 0)) / number

  return descend(network, optimizer, total, read, rows)
