"""Values by temporal differences on frozen features: two heads for actions and two for states.

With target heads Q', V' that follow slowly, the i-th of two:

    Q_i(s, a) -> r + gamma (1 - done) V'_i(s')        V_i(s) -> Q'_i(s, a)

Legend: B transitions of a batch, D features, P = 2 heads.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from agentjax.models.spec import ParamSpec, Weight, init_params
from agentjax.recipes.digi_q.settings import CriticConfig
from agentjax.training.optimizer import build_optimizer

Array = jax.Array

_PAIR = 2
_INITIAL, _BATCHES = range(2)  # what a key is for


@flax.struct.dataclass
class Mlp:
  """A pair of networks from features to one number: ReLU between layers.

  Attributes:
    weights: [P, in, out] of each layer. biases: [P, out].
  """

  weights: tuple[Weight, ...]
  biases: tuple[Weight, ...]


@flax.struct.dataclass
class Heads:
  """Attributes:
  actions: Q, reads features of a state with an action. states: V, reads those of a state.
  """

  actions: Mlp
  states: Mlp


@flax.struct.dataclass
class Data:
  """Transitions in features.

  Attributes:
    actions, states, next_states: [B, D]; the last is anything where ``done``.
    rewards, done: [B]; done is 1.0 at the end of an episode.
  """

  actions: Array
  states: Array
  next_states: Array
  rewards: Array
  done: Array


@flax.struct.dataclass
class Critic:
  """All that learning carries on.

  Attributes:
    heads, targets: parameters. optimizer: its state. done: updates so far.
  """

  heads: Heads
  targets: Heads
  optimizer: Any
  done: Array


def heads_spec(features: int, config: CriticConfig) -> Heads:
  """Abstract parameters of the heads."""
  sizes = [features, *[config.width] * config.hidden, 1]

  def mlp() -> Mlp:
    sides = list(zip(sizes[:-1], sizes[1:], strict=True))
    weights = [
      ParamSpec(side, (None, None), scale=(2 / side[0]) ** 0.5 if side[1] > 1 else 0.01)
      for side in sides
    ]
    biases = [ParamSpec((side[1],), (None,), init="zeros", decayed=False) for side in sides]
    return Mlp(*(tuple(s.stacked(_PAIR) for s in own) for own in (weights, biases)))

  return Heads(actions=mlp(), states=mlp())


def begin(config: CriticConfig, features: int) -> Critic:
  """Heads that have learnt nothing, with targets that are equal."""
  heads = init_params(heads_spec(features, config), _key(config, _INITIAL))
  optimizer = _optimizer(config, features).init(heads)
  return Critic(heads, jax.tree.map(jnp.copy, heads), optimizer, jnp.int32(0))


def outputs(mlp: Mlp, features: Float[Array, "B D"]) -> Float[Array, "P B"]:
  """What a pair of networks says; with a cross-entropy it is log-odds."""

  def one(weights: tuple[Array, ...], biases: tuple[Array, ...]) -> Array:
    x = features
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
      x = (jax.nn.relu(x) if number else x) @ weight + bias
    return x[:, 0]

  return jax.vmap(one)(mlp.weights, mlp.biases)


def values(config: CriticConfig, mlp: Mlp, features: Float[Array, "B D"]) -> Float[Array, "P B"]:
  """The values of a pair of networks."""
  said = outputs(mlp, features)
  return jax.nn.sigmoid(said) if config.loss == "cross_entropy" else said


def td_targets(
  config: CriticConfig, targets: Heads, data: Data
) -> tuple[Float[Array, "P B"], Float[Array, "P B"]]:
  """What Q and V learn; see the module. No gradient passes."""
  after = values(config, targets.states, data.next_states)
  q = data.rewards + config.gamma * jnp.where(data.done > 0, 0.0, after)
  v = values(config, targets.actions, data.actions)
  return jax.lax.stop_gradient((q, v))


def td_loss(config: CriticConfig, heads: Heads, targets: Heads, data: Data) -> Float[Array, ""]:
  """The losses of Q and V, means over transitions and heads."""
  q, v = td_targets(config, targets, data)
  said = outputs(heads.actions, data.actions), outputs(heads.states, data.states)
  if config.loss == "cross_entropy":
    own = [optax.sigmoid_binary_cross_entropy(*pair) for pair in zip(said, (q, v), strict=True)]
  else:
    own = [jnp.square(a - b) for a, b in zip(said, (q, v), strict=True)]
  return jnp.mean(own[0]) + jnp.mean(own[1])


def followed(targets: Heads, heads: Heads, tau: float) -> Heads:
  """``(1 - tau) targets + tau heads``."""
  return jax.tree.map(lambda old, new: (1 - tau) * old + tau * new, targets, heads)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def learn(
  config: CriticConfig, critic: Critic, data: Data, *, steps: int
) -> tuple[Critic, Float[Array, " steps"]]:
  """The next updates, and the loss of each; batches depend on the seed and their number alone."""
  optimizer = _optimizer(config, data.states.shape[1])
  key = _key(config, _BATCHES)

  def update(critic: Critic, number: Array) -> tuple[Critic, Array]:
    draw = jax.random.fold_in(key, number)
    chosen = jax.random.randint(draw, (config.batch,), 0, len(data.rewards))
    some = jax.tree.map(lambda v: v[chosen], data)
    loss, gradient = jax.value_and_grad(lambda heads: td_loss(config, heads, critic.targets, some))(
      critic.heads
    )
    change, state = optimizer.update(gradient, critic.optimizer, critic.heads)
    heads = optax.apply_updates(critic.heads, change)
    return Critic(heads, followed(critic.targets, heads, config.tau), state, number + 1), loss

  return jax.lax.scan(update, critic, critic.done + jnp.arange(steps, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnames=("config",))
def both_values(
  config: CriticConfig, heads: Heads, actions: Float[Array, "A D"], states: Float[Array, "S D"]
) -> tuple[Float[Array, "P A"], Float[Array, "P S"]]:
  """Q of actions and V of states, by each of the two heads."""
  return values(config, heads.actions, actions), values(config, heads.states, states)


@flax.struct.dataclass
class Scale:
  """Mean and standard deviation of features [D]; heads read them at about unit size. Ours."""

  mean: np.ndarray
  deviation: np.ndarray

  @classmethod
  def of(cls, features: Float[np.ndarray, "n D"]) -> Scale:
    """Those of some features; a feature that never changes is read as 0."""
    deviation = features.std(axis=0)
    still = deviation <= 1e-6 * max(float(deviation.max(initial=0.0)), 1e-30)
    return cls(features.mean(axis=0), np.where(still, np.inf, deviation).astype(np.float32))

  def __call__(self, features: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    """The features at that scale."""
    return (features - self.mean) / self.deviation


def _optimizer(config: CriticConfig, features: int) -> optax.GradientTransformation:
  return build_optimizer(config.optimizer, config.steps, heads_spec(features, config))


def _key(config: CriticConfig, purpose: int) -> Array:
  return jax.random.fold_in(jax.random.key(config.seed), purpose)
