r"""Logits Replay: supervised fine-tuning over the few tokens that the first policy found likely.

Stage 0 runs the first policy once over all demonstrations and stores for every taught token

    S_t = {y_t} + the fewest most likely tokens with sum_v p(v) >= mass.

Training then takes the exactly renormalised ``-(z_{y_t} - logsumexp_{v in S_t} z_v)`` and makes
logits of S_t alone. The loss does not contain the mass outside S_t, so it neither raises nor lowers
it. With ``mass=1`` and the whole vocabulary it is the plain loss.

Reference: 2510.09152, of which the abstract's description is public; its optimiser is
the recipe ``moclip``. The mass and the bound on the size of a set are ours.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from agentjax.config import PositiveInt, PositiveShare
from agentjax.models import (
  ModelConfig,
  Params,
  Readout,
  TokenSets,
  forward,
  over_vocabulary,
  readout,
)
from agentjax.training.token_sets import TokenSetConfig, TokenSetTools
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import repack
from agentjax.trajectory.record import Task

Array = jax.Array


_log = logging.getLogger(__name__)


@dataclasses.dataclass(unsafe_hash=True)
class LogitsReplayConfig(TokenSetConfig):
  """Sets of tokens that the run's first policy finds likely.

  Attributes:
    mass: share of the first policy's distribution in a set, unless ``most`` tokens hold less.
    most: tokens of a set besides the demonstration's own; at most the vocabulary.
  """

  mass: PositiveShare = 0.99
  most: PositiveInt = 64

  def build(self, tools: TokenSetTools) -> StoredSets:
    """Stage 0: the likely tokens of the run's first policy in all demonstrations.

    That policy is made anew, so that a resumed run has the same sets.
    """
    first = tools.first_policy()
    record = make_record(dataclasses.replace(tools.model, exact_chunk=0), self)
    stored = StoredSets()
    for at in range(0, len(tools.tasks), tools.tasks_per_step):
      some = tools.tasks[at : at + tools.tasks_per_step]
      stored.add(some, *tools.read(record, first, some))
    _log.info(
      "logits replay: sets of %d demonstrations, mass outside %.2g on average",
      len(tools.tasks),
      stored.outside,
    )
    return stored


def likely_sets(
  read: Readout,
  targets: Int[Array, "batch time"],
  *,
  mass: float,
  most: int,
  size: int,
) -> tuple[TokenSets, Float[Array, "batch time"]]:
  """The fewest most likely tokens that hold ``mass`` of a distribution, and the target.

  ``S_t = {y_t} + the smallest top set with sum_v p(v) >= mass``, of at most ``most`` tokens.

  Args:
    read: of the states before the targets.
    targets: y.
    mass: 0 to 1; at 1 the set has all ``most`` tokens.
    most: up to the vocabulary.
    size: time steps whose logits are held at once.

  Returns:
    The sets, and float32 [B, T], the mass outside them: the bias of the gradient of a restricted
    softmax is of its order.
  """

  def choose(log_p: Array, gold: Array) -> tuple[Array, Array, Array]:
    top, ids = jax.lax.top_k(log_p, most)
    probs = jnp.exp(top)
    before = jnp.cumsum(probs, axis=-1) - probs
    taken = (before < mass) | (mass >= 1)
    taken &= ids != gold[..., None]  # it stands first
    own = jnp.exp(jnp.take_along_axis(log_p, gold[..., None], axis=-1))
    outside = 1 - own[..., 0] - jnp.sum(jnp.where(taken, probs, 0), axis=-1)
    every = jnp.concatenate([gold[..., None], ids.astype(gold.dtype)], axis=-1)
    inside = jnp.concatenate([jnp.ones_like(taken[..., :1]), taken], axis=-1)
    return every, inside, jnp.maximum(outside, 0)

  ids, inside, outside = over_vocabulary(choose, [read], targets, size=size)
  return TokenSets(ids, inside), outside


Record = Callable[[Params, Array, Array, Array], tuple[Array, Array, Array]]


def make_record(model: ModelConfig, config: LogitsReplayConfig) -> Record:
  """Builds ``record(params, token_ids, segment_ids, positions) -> (ids, inside, outside)``.

  Arguments are [B, T]; results [B, T, 1 + most], twice, and [B, T], aligned with the token that
  they are about (see ``likely_sets``). On the first token of a sequence they have no meaning.
  """
  most = min(config.most, model.vocab_size)

  def record(params: Params, token_ids: Array, segment_ids: Array, positions: Array):
    hidden = forward(params, model, token_ids, segment_ids, positions).hidden
    sets, outside = likely_sets(
      readout(params, model, hidden),
      jnp.roll(token_ids, -1, axis=1),
      mass=config.mass,
      most=most,
      size=model.logits_chunk,
    )
    return tuple(jnp.roll(x, 1, axis=1) for x in (*sets, outside))

  return jax.jit(record)


class StoredSets:
  """The sets of all demonstrations, on the host: ``5 (1 + most)`` bytes a token."""

  def __init__(self) -> None:
    self._sets: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    self._outside, self._tokens = 0.0, 0

  @property
  def outside(self) -> float:
    """Mass outside the sets, mean over all tokens that have one before them."""
    return self._outside / max(self._tokens, 1)

  def add(
    self,
    tasks: Sequence[Task],
    ids: Sequence[np.ndarray],
    inside: Sequence[np.ndarray],
    outside: Sequence[np.ndarray],
  ) -> None:
    """Keeps the sets [n, 1 + K] of the demonstrations of some tasks."""
    for task, own, used, rest in zip(tasks, ids, inside, outside, strict=True):
      self._sets[task.id] = (own, used)
      self._outside += float(rest[1:].sum())
      self._tokens += len(rest) - 1

  def at(self, tasks: Sequence[Task], batch: Batch, places: np.ndarray) -> TokenSets:
    """The sets of the tokens at ``places`` [B, K] of a batch of these tasks' demonstrations."""
    parts = zip(*(self._sets[task.id] for task in tasks), strict=True)
    index = places[:, :, None]
    found: list[Any] = [
      np.take_along_axis(repack(part, batch.segment_ids), index, axis=1) for part in parts
    ]
    found[1][..., 0] = True  # also at the places that fill up a row: a softmax needs a token
    return TokenSets(*found)
