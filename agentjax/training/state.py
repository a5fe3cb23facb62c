"""What training changes: parameters, optimiser, step; sharded from the parameter specs."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from agentjax.models import ModelConfig, init, param_specs, value_specs
from agentjax.models.spec import abstract, init_params
from agentjax.sharding import replicated, shardings

Array = jax.Array


@flax.struct.dataclass
class Networks:
  """Everything the optimiser moves."""

  policy: Any  # models.Params
  value: Any  # linear value head, or None without a critic


@flax.struct.dataclass
class TrainState:
  """One pytree that a checkpoint holds.

  Attributes:
    step: int32, training steps done, over all stages.
    networks: trained parameters.
    opt_state: optax state of ``networks``.
    reference: frozen policy parameters for the KL term, or None where no objective uses one.
  """

  step: Any
  networks: Networks
  opt_state: Any
  reference: Any


def network_specs(config: ModelConfig, critic: bool) -> Networks:
  """ParamSpecs of all trained parameters."""
  return Networks(policy=param_specs(config), value=value_specs(config) if critic else None)


def state_shardings(
  config: ModelConfig,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  *,
  critic: bool,
  reference: bool,
) -> TrainState:
  """NamedShardings of a TrainState: moments are placed as their parameters, scalars replicated."""
  specs = network_specs(config, critic)
  placed = shardings(specs, mesh)
  everywhere = replicated(mesh)
  opt_shapes = jax.eval_shape(optimizer.init, abstract(specs))
  opt_shardings = optax.tree_utils.tree_map_params(
    optimizer.init,
    lambda _, sharding: sharding,
    opt_shapes,
    placed,
    transform_non_params=lambda _: everywhere,
  )
  return TrainState(
    step=everywhere,
    networks=placed,
    opt_state=opt_shardings,
    reference=placed.policy if reference else None,
  )


def init_state(
  config: ModelConfig,
  optimizer: optax.GradientTransformation,
  key: Array,
  placed: TrainState,
) -> TrainState:
  """Random parameters and a fresh optimiser, created in place on the mesh.

  Args:
    config: model.
    optimizer: its state is initialised for the parameters.
    key: addresses all initial values; the value head folds in its own number.
    placed: result of ``state_shardings``; says which parts exist.
  """
  critic = placed.networks.value is not None

  def build(key: Array) -> TrainState:
    networks = Networks(
      policy=init(config, jax.random.fold_in(key, 0)),
      value=init_params(value_specs(config), jax.random.fold_in(key, 1)) if critic else None,
    )
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      networks=networks,
      opt_state=optimizer.init(networks),
      # A copy: donated buffers must not appear twice in one state.
      reference=jax.tree.map(jnp.copy, networks.policy) if placed.reference is not None else None,
    )

  return jax.jit(build, out_shardings=placed)(key)


def begin_stage(
  state: TrainState, optimizer: optax.GradientTransformation, placed: TrainState
) -> TrainState:
  """State at the start of a stage: fresh optimiser, reference set to the present policy."""

  def restart(state: TrainState) -> TrainState:
    return dataclasses.replace(
      state,
      opt_state=optimizer.init(state.networks),
      reference=None if state.reference is None else jax.tree.map(jnp.copy, state.networks.policy),
    )

  return jax.jit(restart, out_shardings=placed, donate_argnums=0)(state)
