r"""SPEAR's advantages: of a step's own episodes, of replayed ones, and 0 for clipped tokens.

    own:       A = R - mean of the group
    replayed:  A~ = R - median of earlier groups' means, as ``imitation`` has computed it

The loss is ``loss(own) + weight loss(replayed)``, each a mean over its own sequences. Surrogates
are homogeneous in the advantage, so one batch holds both: advantages are multiplied by
``S / S_own`` and ``weight S / S_replayed``, with S the number of sequences that the mean of the
batch divides by. This is exact for aggregations that divide by sequences.

Clip-cov removes the gradient of a random share of the tokens whose covariance ``(A - mean A)(log pi
- mean log pi)`` lies between two bounds, with means over the tokens of either kind: their advantage
is 0.

Reference: 2509.22601.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentjax.config import ShareBelowOne, check
from agentjax.objectives.advantage_function import AdvantageChoice, AdvantageInputs
from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.objectives.segments import broadcast_to_tokens, sequence_sum
from agentjax.trajectory.columns import Column

IMITATION_ADVANTAGE = Column(
  "imitation_advantage", "float32", "Advantage of a replayed episode.", level="sequence"
)
IMITATION_WEIGHT = Column(
  "imitation_weight", "float32", "Weight of the loss of replayed episodes.", level="sequence"
)
CLIP_DRAW = Column("clip_draw", "float32", "A number in 0..1 that decides which tokens those are.")

_GROUP_MEAN = AdvantageConfig(centre="group_mean", scale="none")


@dataclasses.dataclass(unsafe_hash=True)
class SpearAdvantages(AdvantageChoice):
  """See the module; for ``objective.advantage.function`` beside ``SpearConfig``.

  Attributes:
    covariance: bounds of clip-cov for a step's own tokens; replay_covariance: for replayed ones.
    covariance_share: share of the tokens that it clips; 0 is off.
  """

  covariance: tuple[float, float] = (1.0, 40.0)
  replay_covariance: tuple[float, float] = (2.0, 60.0)
  covariance_share: ShareBelowOne = 0.02

  def validate(self, path: str = "config.rl.objective.advantage.function") -> None:
    super().validate(path)
    for name in ("covariance", "replay_covariance"):
      bounds = getattr(self, name)
      right = len(bounds) == 2 and bounds[0] < bounds[1]
      check(right, f"{path}.{name}", bounds, "two numbers, the lower one first")

  def __call__(self, inputs: AdvantageInputs) -> Float[Array, "batch time"]:
    inside = inputs.weights > 0
    replayed = inside & inputs.column("replayed")
    own = inside & ~replayed
    number = inputs.rewards.shape[0]

    def sequences(chosen: Array) -> Array:
      return sequence_sum(chosen.astype(jnp.float32), inputs.segment_ids, number) > 0

    of_own = sequence_advantages(
      inputs.rewards, inputs.valid & ~sequences(replayed), inputs.groups, _GROUP_MEAN
    )
    found = jnp.where(
      replayed,
      inputs.column(IMITATION_ADVANTAGE.name),
      broadcast_to_tokens(of_own, inputs.segment_ids),
    )
    draws, still = inputs.column(CLIP_DRAW.name), jnp.zeros_like(inside)
    if self.covariance_share:
      for chosen, bounds in ((own, self.covariance), (replayed, self.replay_covariance)):
        share = self.covariance_share
        still |= clip_covariance(found, inputs.old_log_probs, chosen, bounds, share, draws)
    count = [jnp.sum(sequences(chosen)) for chosen in (inside, own, replayed)]
    factor = jnp.where(
      replayed,
      inputs.column(IMITATION_WEIGHT.name) * count[0] / jnp.maximum(count[2], 1),
      count[0] / jnp.maximum(count[1], 1),
    )
    return jnp.where(inside & ~still, factor * found, 0)


def clip_covariance(
  found: Float[Array, "batch time"],
  log_probs: Float[Array, "batch time"],
  chosen: Bool[Array, "batch time"],
  bounds: tuple[float, float],
  share: float,
  draws: Float[Array, "batch time"],
) -> Bool[Array, "batch time"]:
  """Tokens that are clipped: ``max(1, floor(share tokens))`` of those between the bounds.

  Args:
    found: advantages.
    log_probs: of the tokens, nats.
    chosen: tokens that means and shares are of.
    bounds: of the covariance.
    share: of the chosen tokens, above 0.
    draws: the tokens with the smallest are taken.
  """
  number = jnp.sum(chosen)

  def centred(values: Array) -> Array:
    mean = jnp.sum(jnp.where(chosen, values, 0)) / jnp.maximum(number, 1)
    return values - mean

  covariance = centred(found) * centred(log_probs)
  between = chosen & (covariance > bounds[0]) & (covariance < bounds[1])
  wanted = jnp.maximum(jnp.floor(jnp.float32(share) * number), 1).astype(jnp.int32)
  order = jnp.where(between, draws, jnp.inf)
  last = jnp.sort(order.ravel())[jnp.minimum(wanted, order.size) - 1]
  return between & (order <= last)


def draw_tokens(seed: int, step: int, batch: int, shape: tuple[int, ...]) -> Array:
  """Uniform numbers for a batch of a step, by their address."""
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), batch)
  return jax.random.uniform(key, shape)
