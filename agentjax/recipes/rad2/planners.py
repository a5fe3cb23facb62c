"""Policies of the two networks: proposing plans, choosing among them, and the losses of both."""

from __future__ import annotations

import functools
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.objectives.policy_loss import clipped_surrogate
from agentjax.recipes.rad2.closed_loop import Choice, Episode, play
from agentjax.recipes.rad2.networks import (
  Discriminator,
  Generator,
  context,
  in_metres,
  logits,
  normalised,
  velocity,
)
from agentjax.recipes.rad2.settings import (
  DiscriminatorConfig,
  GeneratorConfig,
  Rad2Config,
  TrafficConfig,
)
from agentjax.recipes.rad2.traffic import Observation, Scenario, State

Mode = Literal["propose", "sample", "best"]
"""How a plan is chosen: the only one that is proposed, one drawn by the scores, or the best one."""


@flax.struct.dataclass
class Decisions:
  """Decisions that the discriminator learns from, N of them with K plans each.

  Attributes:
    seen: Observation [N, ...].
    candidates: [N, K, points, 2]. chosen: [N]. log_probs: of the choice when it was made [N].
    advantages: [N]. weights: 0 for those that are left out [N].
  """

  seen: Observation
  candidates: Array
  chosen: Array
  log_probs: Array
  advantages: Array
  weights: Array


def propose(
  config: GeneratorConfig,
  traffic: TrafficConfig,
  params: Generator,
  seen: Observation,
  key: Array,
  count: int,
) -> Float[Array, "count points 2"]:
  """Plans from the flow: noise, then Euler steps along the predicted velocity."""
  known = context(params, seen)
  steps = config.denoising_steps

  def move(plans: Array, number: Array) -> tuple[Array, None]:
    time = jnp.full(count, number / steps)
    return plans + velocity(params, known, plans, time) / steps, None

  noise = jax.random.normal(key, (count, 2 * traffic.plan_points))
  vectors, _ = jax.lax.scan(move, noise, jnp.arange(steps, dtype=jnp.float32))
  return in_metres(traffic, vectors, seen)


def choice_log_probs(
  config: DiscriminatorConfig, score_logits: Float[Array, "*lead plans"]
) -> Float[Array, "*lead plans"]:
  """Of choosing each plan: a softmax over the log-odds of the scores."""
  return jax.nn.log_softmax(score_logits / config.temperature, axis=-1)


@functools.partial(jax.jit, static_argnames=("config", "mode"))
def play_policy(
  config: Rad2Config,
  generator: Generator,
  discriminator: Discriminator,
  scenarios: Scenario,
  keys: Array,
  *,
  mode: Mode,
) -> Episode:
  """An episode of every scenario; with mode "propose" the discriminator is not asked."""
  count = 1 if mode == "propose" else config.discriminator.candidates

  def choose(state: State, seen: Observation, key: Array) -> Choice:
    del state  # a policy sees no more than what is seen
    noise, draw = jax.random.split(key)
    plans = propose(config.generator, config.traffic, generator, seen, noise, count)
    if mode == "propose":
      return Choice(plans, jnp.int32(0), jnp.float32(0.0))
    scores = logits(discriminator, config.traffic, seen, plans)
    log_probs = choice_log_probs(config.discriminator, scores)
    chosen = jnp.argmax(scores) if mode == "best" else jax.random.categorical(draw, log_probs)
    return Choice(plans, chosen.astype(jnp.int32), log_probs[chosen])

  return jax.vmap(lambda scenario, key: play(config.traffic, scenario, key, choose))(
    scenarios, keys
  )


def flow_loss(
  traffic: TrafficConfig,
  params: Generator,
  seen: Observation,
  plans: Float[Array, "count points 2"],
  weights: Float[Array, " count"],
  key: Array,
) -> Float[Array, ""]:
  """Flow matching: ``|v(x_t, t) - (x_1 - x_0)|²`` with ``x_t = (1 - t) x_0 + t x_1``.

  ``x_1`` is a plan, ``x_0`` noise, t uniform. The mean over the plans, by weight, 0 without any.

  References: Lipman et al., 2210.02747; Liu et al., 2209.03003. The source has a diffusion model.
  """
  noise_key, time_key = jax.random.split(key)
  target = jax.vmap(functools.partial(normalised, traffic))(plans, seen)
  noise = jax.random.normal(noise_key, target.shape)
  time = jax.random.uniform(time_key, (len(plans),))

  def one(seen: Observation, target: Array, noise: Array, time: Array) -> Array:
    noisy = (1 - time) * noise + time * target
    found = velocity(params, context(params, seen), noisy[None], time[None])[0]
    return jnp.mean((found - (target - noise)) ** 2)

  losses = jax.vmap(one)(seen, target, noise, time)
  return jnp.sum(weights * losses) / jnp.maximum(jnp.sum(weights), 1.0)


def score_entropy(score_logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Entropy of the scores as chances of yes and no, in nats: ``-s ln s - (1 - s) ln(1 - s)``."""
  score = jax.nn.sigmoid(score_logits)
  yes, no = jax.nn.log_sigmoid(score_logits), jax.nn.log_sigmoid(-score_logits)
  return -score * yes - (1 - score) * no


def choice_loss(
  config: DiscriminatorConfig,
  traffic: TrafficConfig,
  params: Discriminator,
  decisions: Decisions,
  entropy_coefficient: Float[Array, ""],
) -> tuple[Float[Array, ""], dict[str, Array]]:
  """PPO's clipped surrogate at decision points, less the entropy of the scores (TC-GRPO).

  An advantage belongs to a whole episode, and each of its decisions stands for the ``latch`` steps
  that follow it. The form of the entropy is ours.
  """
  of_all = jax.vmap(functools.partial(logits, params, traffic))
  scores = of_all(decisions.seen, decisions.candidates)
  log_probs = choice_log_probs(config, scores)
  taken = jnp.take_along_axis(log_probs, decisions.chosen[:, None], axis=-1)[:, 0]
  surrogate = clipped_surrogate(
    taken - decisions.log_probs, decisions.advantages, config.clip, config.clip
  )
  count = jnp.maximum(jnp.sum(decisions.weights), 1.0)

  def mean(values: Array) -> Array:
    return jnp.sum(decisions.weights * values) / count

  entropy = mean(jnp.mean(score_entropy(scores), axis=-1))
  loss = mean(surrogate.per_token) - entropy_coefficient * entropy
  clipped = mean(surrogate.clipped.astype(jnp.float32))
  return loss, {"entropy": entropy, "clipped": clipped}


def adapted(
  config: DiscriminatorConfig, coefficient: Float[Array, ""], entropy: Float[Array, ""]
) -> Float[Array, ""]:
  """The coefficient of the entropy after an update: larger if there was too little.

  ``c exp(rate (target - entropy / ln 2))``, from 1e-4 to 1; ours.
  """
  missing = config.entropy_target - entropy / jnp.log(2.0)
  return jnp.clip(coefficient * jnp.exp(config.entropy_rate * missing), 1e-4, 1.0)
