"""How the two networks learn: imitation first, then rounds of closed-loop driving.

A round plays each of its scenarios ``group`` times and is put into a buffer of the newest rounds.
The discriminator learns after each round, the generator after each ``generator_every`` rounds, when
the buffer holds nothing that it has learnt from before. All draws use keys that are folded from the
seed and the number of the step or round.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from agentjax.models.spec import init_params
from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.recipes.rad2.closed_loop import Episode, driven_plans
from agentjax.recipes.rad2.edits import edited_plans
from agentjax.recipes.rad2.expert import demonstrate
from agentjax.recipes.rad2.networks import (
  Discriminator,
  Generator,
  discriminator_spec,
  generator_spec,
)
from agentjax.recipes.rad2.outcomes import Outcome, outcome
from agentjax.recipes.rad2.planners import (
  Decisions,
  Mode,
  adapted,
  choice_loss,
  flow_loss,
  play_policy,
)
from agentjax.recipes.rad2.settings import Rad2Config
from agentjax.recipes.rad2.traffic import Observation, Scenario, scenarios
from agentjax.training.optimizer import build_optimizer

Variant = Literal["generator", "discriminator", "both"]
"""Which networks learn in the rounds."""
VARIANTS: tuple[Variant, ...] = get_args(Variant)

_IMITATE, _EXPERT, _INITIAL, _ROUNDS = range(4)  # what a key is for
_ADVANTAGES = AdvantageConfig(centre="group_mean", scale="group_std")


@flax.struct.dataclass
class Lessons:
  """Scenarios to train on, and what the expert did in them.

  Attributes:
    scenarios: S of them. references: metres that an expert makes in each that is never careless.
    seen, plans: demonstrations without a crash: what was seen, and what was driven then.
  """

  scenarios: Scenario
  references: Array
  seen: Observation
  plans: Array


@flax.struct.dataclass
class Round:
  """What is kept of a round: E episodes of D decisions, W of which have whole plans."""

  decisions: Decisions  # [E, D, ...]
  edited: Array  # plans [E, W, points, 2]
  edits: Array  # 1.0 where there is an edit [E, W]


@flax.struct.dataclass
class Learner:
  """All that a run carries from round to round.

  Attributes:
    generator, discriminator: their parameters. tuning, choosing: states of their optimisers.
    entropy: coefficient of the entropy.
    rounds: the newest ones, by number modulo the size of the buffer; [R, ...].
    done: rounds so far.
  """

  generator: Generator
  tuning: Any
  discriminator: Discriminator
  choosing: Any
  entropy: Array
  rounds: Round
  done: Array


def seed_key(seed: int, purpose: int) -> Array:
  """The key of a seed for one purpose."""
  return jax.random.fold_in(jax.random.key(seed), purpose)


def prepare_lessons(config: Rad2Config, seed: int) -> Lessons:
  """Demonstrations in the training scenarios of a seed."""
  count = config.training.scenarios
  found = scenarios(seed, 0, count)
  episodes, references = demonstrated(config, found, seed)
  plans, whole = jax.vmap(functools.partial(driven_plans, config.traffic))(episodes)
  kept = np.asarray(whole)
  if not kept.any():
    raise ValueError(
      "training.scenarios: the expert crashed in all demonstrations; give more scenarios, or a "
      "smaller expert.careless."
    )
  seen = jax.tree.map(lambda v: jnp.asarray(v[:, : config.traffic.whole])[kept], episodes.seen)
  return Lessons(found, references, seen, plans[kept])


def demonstrated(
  config: Rad2Config, found: Scenario, seed: int
) -> tuple[Episode, Float[Array, " scenarios"]]:
  """The expert's episodes, and the metres of an expert that is never careless."""
  keys = jax.random.split(seed_key(seed, _EXPERT), len(found.kind))
  drive = functools.partial(demonstrate, config.traffic, config.expert, found, keys)
  episodes, best = drive(config.expert.careless), drive(0.0)
  return episodes, best.ego[:, -1, 0] - best.ego[:, 0, 0]


def initial_generator(config: Rad2Config, seed: int) -> tuple[Generator, Any]:
  """A generator that has learnt nothing, and the state of its optimiser."""
  spec = _generator(config)
  generator = init_params(spec, seed_key(seed, _INITIAL))
  return generator, _imitating(config).init(generator)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def imitate(
  config: Rad2Config,
  generator: Generator,
  state: Any,
  lessons: Lessons,
  seed: int,
  first: int,
  *,
  steps: int,
) -> tuple[Generator, Any, Float[Array, " steps"]]:
  """Updates ``first`` to ``first + steps`` on demonstrations, and the loss of each."""
  optimizer = _imitating(config)
  key = seed_key(seed, _IMITATE)

  def update(carry: Any, number: Array) -> tuple[Any, Array]:
    generator, state = carry
    draw, noise = jax.random.split(jax.random.fold_in(key, number))
    loss, gradient = jax.value_and_grad(
      lambda p: _imitation(config, p, lessons, config.training.imitation_batch, draw, noise)
    )(generator)
    change, state = optimizer.update(gradient, state, generator)
    return (optax.apply_updates(generator, change), state), loss

  (generator, state), losses = jax.lax.scan(update, (generator, state), first + jnp.arange(steps))
  return generator, state, losses


def begin(
  config: Rad2Config, generator: Generator, lessons: Lessons, seed: int, variant: Variant
) -> Learner:
  """Where the rounds begin: a trained generator, and a discriminator with its scene encoder.

  The encoder is copied if the widths agree; the source reports that this helps much.
  """
  spec = discriminator_spec(config.discriminator.width, config.traffic.plan_points)
  discriminator = init_params(spec, seed_key(seed, _INITIAL))
  if config.discriminator.width == config.generator.width:
    discriminator = dataclasses.replace(discriminator, scene=generator.scene)
  play_one = functools.partial(_play_round, config, mode=_mode(variant))
  shapes, _ = jax.eval_shape(
    play_one, generator, discriminator, lessons.scenarios, lessons.references, seed, 0
  )
  size = config.training.buffer
  return Learner(
    generator=generator,
    tuning=_tuning(config).init(generator),
    discriminator=discriminator,
    choosing=_choosing(config).init(discriminator),
    entropy=jnp.float32(config.discriminator.entropy_start),
    rounds=jax.tree.map(lambda s: jnp.zeros((size, *s.shape), s.dtype), shapes),
    done=jnp.int32(0),
  )


@functools.partial(jax.jit, static_argnames=("config", "variant"))
def play_and_learn(
  config: Rad2Config, learner: Learner, lessons: Lessons, seed: int, *, variant: Variant
) -> tuple[Learner, dict[str, Array]]:
  """One round: play, keep, and update what learns in this variant."""
  number = learner.done
  played, metrics = _play_round(
    config, learner.generator, learner.discriminator, lessons.scenarios, lessons.references,
    seed, number, mode=_mode(variant),
  )  # fmt: skip
  slot = number % config.training.buffer
  rounds = jax.tree.map(lambda all_, new: all_.at[slot].set(new), learner.rounds, played)
  learner = dataclasses.replace(learner, rounds=rounds, done=number + 1)
  key = jax.random.fold_in(seed_key(seed, _ROUNDS), number)
  if variant != "generator":
    learner, choosing = _learn_choosing(config, learner, jax.random.fold_in(key, 1))
    metrics |= choosing
  if variant != "discriminator":
    due = learner.done % config.training.generator_every == 0
    learner, loss = jax.lax.cond(
      due,
      lambda one: _learn_edits(config, one, lessons, jax.random.fold_in(key, 2)),
      lambda one: (one, jnp.float32(jnp.nan)),
      learner,
    )
    metrics |= {"edit_loss": loss}
  return learner, metrics


def _mode(variant: Variant) -> Mode:
  return "propose" if variant == "generator" else "sample"


def _play_round(
  config: Rad2Config,
  generator: Generator,
  discriminator: Discriminator,
  found: Scenario,
  references: Array,
  seed: int,
  number: Array,
  *,
  mode: Mode,
) -> tuple[Round, dict[str, Array]]:
  training = config.training
  key = jax.random.fold_in(seed_key(seed, _ROUNDS), number)
  draw, play_key = jax.random.split(jax.random.fold_in(key, 0))
  chosen = jax.random.permutation(draw, len(references))[: training.round_scenarios]
  chosen = jnp.repeat(chosen, training.group)
  groups = jnp.repeat(jnp.arange(training.round_scenarios), training.group)
  few = jax.tree.map(lambda v: v[chosen], found)
  keys = jax.random.split(play_key, len(chosen))
  episodes = play_policy(config, generator, discriminator, few, keys, mode=mode)
  results = jax.vmap(functools.partial(outcome, config.reward))(few, episodes, references[chosen])
  advantages, taught = group_advantages(results.reward, groups, training.least_spread)
  edit = functools.partial(edited_plans, config.traffic, config.edit, config.reward)
  edited, edits = jax.vmap(edit)(few, episodes, results)
  shape = episodes.alive.shape
  decisions = Decisions(
    seen=episodes.seen,
    candidates=episodes.choices.candidates,
    chosen=episodes.choices.chosen,
    log_probs=episodes.choices.log_prob,
    advantages=jnp.broadcast_to(advantages[:, None], shape),
    weights=(episodes.alive & taught[:, None]).astype(jnp.float32),
  )
  kept = Round(decisions, edited, edits.astype(jnp.float32))
  return kept, {**summary(results), "taught": jnp.mean(taught), "edits": jnp.mean(kept.edits)}


def group_advantages(
  rewards: Float[Array, " episodes"], groups: Array, least_spread: float
) -> tuple[Float[Array, " episodes"], Array]:
  """``(r - mean) / std`` within each group, and which episodes teach.

  Those of a group whose rewards spread less than ``least_spread`` (standard deviation) do not.
  """
  ones = jnp.ones_like(rewards)
  count = jax.ops.segment_sum(ones, groups, len(groups))[groups]
  mean = jax.ops.segment_sum(rewards, groups, len(groups))[groups] / count
  squares = jax.ops.segment_sum((rewards - mean) ** 2, groups, len(groups))[groups]
  taught = jnp.sqrt(squares / count) >= least_spread
  return sequence_advantages(rewards, taught, groups, _ADVANTAGES), taught


def summary(results: Outcome) -> dict[str, Array]:
  """Means of the outcomes of some episodes."""
  return {
    "reward": jnp.mean(results.reward),
    "crashed": jnp.mean(results.crashed),
    "progress": jnp.mean(results.progress),
    "least_time": jnp.mean(results.least_time),
  }


def _learn_choosing(
  config: Rad2Config, learner: Learner, key: Array
) -> tuple[Learner, dict[str, Array]]:
  """Updates of the discriminator on decisions of the buffer."""
  optimizer, settings = _choosing(config), config.training
  flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[3:]), learner.rounds.decisions)
  there = jnp.minimum(learner.done, settings.buffer) * (len(flat.chosen) // settings.buffer)

  def update(carry: Any, key: Array) -> tuple[Any, dict[str, Array]]:
    params, state, entropy = carry
    picked = jax.random.randint(key, (settings.discriminator_batch,), 0, there)
    few = jax.tree.map(lambda v: v[picked], flat)
    (_, metrics), gradient = jax.value_and_grad(
      lambda p: choice_loss(config.discriminator, config.traffic, p, few, entropy), has_aux=True
    )(params)
    change, state = optimizer.update(gradient, state, params)
    params = optax.apply_updates(params, change)
    entropy = jnp.where(
      jnp.sum(few.weights) > 0,
      adapted(config.discriminator, entropy, metrics["entropy"]),
      entropy,
    )
    return (params, state, entropy), metrics

  carry = (learner.discriminator, learner.choosing, learner.entropy)
  keys = jax.random.split(key, settings.discriminator_steps)
  (params, state, entropy), metrics = jax.lax.scan(update, carry, keys)
  learner = dataclasses.replace(learner, discriminator=params, choosing=state, entropy=entropy)
  means = {name: jnp.mean(values) for name, values in metrics.items()}
  return learner, {**means, "entropy_coefficient": entropy}


def _learn_edits(
  config: Rad2Config, learner: Learner, lessons: Lessons, key: Array
) -> tuple[Learner, Float[Array, ""]]:
  """Updates of the generator on edited trajectories of the buffer, and on demonstrations."""
  optimizer, settings = _tuning(config), config.training
  whole = config.traffic.whole
  seen = jax.tree.map(
    lambda v: v[:, :, :whole].reshape(-1, *v.shape[3:]), learner.rounds.decisions.seen
  )
  plans = learner.rounds.edited.reshape(-1, *learner.rounds.edited.shape[3:])
  upto = jnp.cumsum(learner.rounds.edits.reshape(-1))  # each edit is as likely as any other
  some = (upto[-1] > 0).astype(jnp.float32)

  def update(carry: Any, key: Array) -> tuple[Any, Array]:
    params, state = carry
    draw, noise, draw_shown, noise_shown = jax.random.split(key, 4)
    level = jax.random.uniform(draw, (settings.generator_batch,)) * upto[-1]
    picked = jnp.minimum(jnp.searchsorted(upto, level, side="right"), len(upto) - 1)
    few = jax.tree.map(lambda v: v[picked], seen)
    weights = jnp.full(settings.generator_batch, some)

    def loss(params: Generator) -> tuple[Array, Array]:
      edited = flow_loss(config.traffic, params, few, plans[picked], weights, noise)
      shown = _imitation(config, params, lessons, settings.generator_batch, draw_shown, noise_shown)
      return edited + settings.imitation_weight * shown, edited

    (_, edited), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    change, state = optimizer.update(gradient, state, params)
    return (optax.apply_updates(params, change), state), edited

  carry = (learner.generator, learner.tuning)
  keys = jax.random.split(key, settings.generator_steps)
  (params, state), losses = jax.lax.scan(update, carry, keys)
  return dataclasses.replace(learner, generator=params, tuning=state), jnp.mean(losses)


def _imitation(
  config: Rad2Config, params: Generator, lessons: Lessons, batch: int, draw: Array, noise: Array
) -> Float[Array, ""]:
  picked = jax.random.randint(draw, (batch,), 0, len(lessons.plans))
  seen = jax.tree.map(lambda v: v[picked], lessons.seen)
  ones = jnp.ones(batch)
  return flow_loss(config.traffic, params, seen, lessons.plans[picked], ones, noise)


def _generator(config: Rad2Config) -> Generator:
  settings = config.generator
  return generator_spec(settings.width, settings.blocks, config.traffic.plan_points)


def _imitating(config: Rad2Config) -> optax.GradientTransformation:
  steps = config.training.imitation_steps
  return build_optimizer(config.generator.optimizer, steps, _generator(config))


def _tuning(config: Rad2Config) -> optax.GradientTransformation:
  settings = config.training
  steps = settings.rounds // settings.generator_every * settings.generator_steps
  return build_optimizer(config.generator.tuning, steps, _generator(config))


def _choosing(config: Rad2Config) -> optax.GradientTransformation:
  steps = config.training.rounds * config.training.discriminator_steps
  spec = discriminator_spec(config.discriminator.width, config.traffic.plan_points)
  return build_optimizer(config.discriminator.optimizer, steps, spec)
