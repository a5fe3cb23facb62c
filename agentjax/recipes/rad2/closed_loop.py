"""Episodes: a plan is chosen at a decision point and then held for ``latch`` steps.

The car reacts to nothing between two decision points, so what happens there belongs to one choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentjax.recipes.rad2.geometry import into_frame
from agentjax.recipes.rad2.settings import TrafficConfig
from agentjax.recipes.rad2.traffic import Observation, Scenario, State, drive, observe, start


@flax.struct.dataclass
class Choice:
  """What was chosen at a decision point.

  Attributes:
    candidates: plans [K, points, 2].
    chosen: which of them.
    log_prob: of the choice.
  """

  candidates: Array
  chosen: Array
  log_prob: Array


Chooser = Callable[[State, Observation, Array], Choice]
"""Of the state, what is seen of it, and a random key. A policy may look at what is seen alone."""


@flax.struct.dataclass
class Episode:
  """What happened, D decisions and T steps.

  Attributes:
    seen: Observation at each decision.
    choices: Choice at each decision.
    alive: whether the car had not crashed yet [D].
    ego: the car [T + 1, 4], the start included. others: [T + 1, V, 4]. crashed: [T + 1].
  """

  seen: Any
  choices: Any
  alive: Array
  ego: Array
  others: Array
  crashed: Array


def play(config: TrafficConfig, scenario: Scenario, key: Array, choose: Chooser) -> Episode:
  """Plays one episode; the key of a decision is folded from its number."""

  def decide(state: State, number: Array) -> tuple[State, Any]:
    seen = observe(scenario, state)
    choice = choose(state, seen, jax.random.fold_in(key, number))
    plan = choice.candidates[choice.chosen]
    driven = drive(config, scenario, state, plan, config.latch)
    record = (driven.ego, driven.others, driven.crashed)
    return driven.state, (seen, choice, ~state.crashed, record)

  begin = start(scenario)
  _, (seen, choices, alive, record) = jax.lax.scan(decide, begin, jnp.arange(config.decisions))
  firsts = (begin.ego, begin.others, begin.crashed)
  whole = [
    jnp.concatenate([first[None], steps.reshape(-1, *first.shape)])
    for first, steps in zip(firsts, record, strict=True)
  ]
  return Episode(seen, choices, alive, *whole)


def driven_plans(
  config: TrafficConfig, episode: Episode
) -> tuple[Float[Array, "whole points 2"], Bool[Array, " whole"]]:
  """What was driven after each decision, in the form of a plan; whether it is one without a crash.

  Only the decisions whose plan ends within the episode have one.
  """
  points = config.plan_stride * (1 + jnp.arange(config.plan_points))

  def of(decision: Array) -> tuple[Array, Array]:
    now = decision * config.latch
    plan = into_frame(episode.ego[now + points, :2], episode.ego[now, :3])
    return plan, ~episode.crashed[now + config.horizon]

  return jax.vmap(of)(jnp.arange(config.whole))
