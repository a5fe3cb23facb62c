"""What training changes: parameters, optimiser, step; sharded from the parameter specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from agentjax.models import ModelConfig, init, param_specs, value_specs
from agentjax.models.lora import LoraConfig, init_lora, lora_specs, merge_lora
from agentjax.models.spec import abstract, init_params
from agentjax.sharding import replicated, shardings

Array = jax.Array


@flax.struct.dataclass
class Networks:
  """Everything the optimiser moves."""

  policy: Any  # models.Params, or the adapters of a LoRA run
  value: Any  # linear value head, or None without a critic


@flax.struct.dataclass
class TrainState:
  """One pytree that a checkpoint holds.

  Attributes:
    step: int32, training steps done, over all stages; a step may hold many updates.
    networks: trained parameters.
    opt_state: optax state of ``networks``.
    reference: frozen policy parameters, of the KL term and what adapters are added to, or None
      where nothing uses them.
    process: the reward model that learns beside the policy (``rl.process.online``), a state of its
      own: its parameters are the policy of its ``networks``. None without one.
  """

  step: Any
  networks: Networks
  opt_state: Any
  reference: Any
  process: TrainState | None = None

  @property
  def trained(self) -> Any:
    """All trained parameters, for a fingerprint."""
    return self.networks if self.process is None else (self.networks, self.process.networks)


def network_specs(config: ModelConfig, critic: bool, lora: LoraConfig | None = None) -> Networks:
  """ParamSpecs of all trained parameters; of a LoRA policy the adapters alone."""
  policy = param_specs(config)
  return Networks(
    policy=policy if lora is None else lora_specs(policy, lora),
    value=value_specs(config) if critic else None,
  )


def full_policy(networks: Networks, reference: Any, lora: LoraConfig | None) -> Any:
  """What the model runs with: the trained policy, or ``reference`` with the adapters added in."""
  if lora is None:
    return networks.policy
  return merge_lora(reference, networks.policy, lora)


def state_shardings(
  config: ModelConfig,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  *,
  critic: bool,
  reference: bool,
  lora: LoraConfig | None = None,
  process: optax.GradientTransformation | None = None,
) -> TrainState:
  """NamedShardings of a TrainState: moments are placed as their parameters, scalars replicated.

  Args:
    config: model.
    optimizer: of the networks.
    mesh: to place on.
    critic, reference: whether there is a value head, and a reference policy.
    lora: adapters are trained.
    process: optimiser of a reward model beside the policy; None has none.
  """
  specs = network_specs(config, critic, lora)
  placed = shardings(specs, mesh)
  everywhere = replicated(mesh)
  opt_shapes = jax.eval_shape(optimizer.init, abstract(specs))
  opt_shardings = optax.tree_utils.tree_map_params(
    optimizer.init,
    lambda moment, sharding: moment if _masked(moment) else sharding,
    opt_shapes,
    placed,
    transform_non_params=lambda _: everywhere,
    is_leaf=_masked,
  )
  return TrainState(
    step=everywhere,
    networks=placed,
    opt_state=opt_shardings,
    reference=shardings(param_specs(config), mesh) if reference or lora is not None else None,
    process=None
    if process is None
    else state_shardings(config, process, mesh, critic=False, reference=False),
  )


def init_state(
  config: ModelConfig,
  optimizer: optax.GradientTransformation,
  key: Array,
  placed: TrainState,
  networks: Networks | None = None,
  lora: LoraConfig | None = None,
  process: optax.GradientTransformation | None = None,
) -> TrainState:
  """Parameters and a fresh optimiser, created in place on the mesh.

  Args:
    config: model.
    optimizer: its state is initialised for the parameters.
    key: addresses all initial values; the value head folds in its own number.
    placed: result of ``state_shardings``; says which parts exist.
    networks: parameters to start from, whose buffers are taken over; a value head that they lack
      is random, and so is everything where this is None.
    lora: trains adapters, fresh ones, on the policy that would be trained otherwise.
    process: optimiser of the reward model, which starts from the policy; as in ``placed``.
  """
  build = _builder(config, optimizer, placed, lora, process)
  return jax.jit(build, out_shardings=placed, donate_argnums=1)(key, networks)


def abstract_state(
  config: ModelConfig,
  optimizer: optax.GradientTransformation,
  placed: TrainState,
  lora: LoraConfig | None = None,
  process: optax.GradientTransformation | None = None,
) -> TrainState:
  """Shapes, dtypes and shardings of what ``init_state`` makes, without making it."""
  build = _builder(config, optimizer, placed, lora, process)
  shapes = jax.eval_shape(build, jax.random.key(0), None)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    placed,
  )


def _builder(
  config: ModelConfig,
  optimizer: optax.GradientTransformation,
  placed: TrainState,
  lora: LoraConfig | None,
  process: optax.GradientTransformation | None,
) -> Callable[[Array, Networks | None], TrainState]:
  critic = placed.networks.value is not None

  def build(key: Array, given: Networks | None) -> TrainState:
    policy, value = (None, None) if given is None else (given.policy, given.value)
    if policy is None:
      policy = init(config, jax.random.fold_in(key, 0))
    if critic and value is None:
      value = init_params(value_specs(config), jax.random.fold_in(key, 1))
    reference = None
    if lora is not None:
      key = jax.random.fold_in(key, 2)
      reference, policy = policy, init_lora(param_specs(config), lora, key)
    elif placed.reference is not None:
      # A copy: donated buffers must not appear twice in one state.
      reference = jax.tree.map(jnp.copy, policy)
    networks = Networks(policy=policy, value=value)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      networks=networks,
      opt_state=optimizer.init(networks),
      reference=reference,
      process=None if process is None else _fresh(process, policy),
    )

  return build


def begin_stage(
  state: TrainState,
  optimizer: optax.GradientTransformation,
  placed: TrainState,
  lora: LoraConfig | None = None,
  process: optax.GradientTransformation | None = None,
  model: Any = None,
) -> TrainState:
  """State at the start of a stage: fresh optimiser, reference set to the present policy.

  With ``lora`` the reference stays what the adapters are added to. With ``process`` there is a
  fresh reward model, which starts from ``model``, or from the present policy where that is None.
  """

  def restart(state: TrainState, model: Any) -> TrainState:
    fresh = dataclasses.replace(state, opt_state=optimizer.init(state.networks))
    if process is not None:
      start = state.networks.policy if model is None else model
      fresh = dataclasses.replace(fresh, process=_fresh(process, start))
    if state.reference is None or lora is not None:
      return fresh
    return dataclasses.replace(fresh, reference=jax.tree.map(jnp.copy, state.networks.policy))

  return jax.jit(restart, out_shardings=placed, donate_argnums=0)(state, model)


def _fresh(optimizer: optax.GradientTransformation, policy: Any) -> TrainState:
  """State of a reward model that starts as a copy of ``policy``."""
  networks = Networks(policy=jax.tree.map(jnp.copy, policy), value=None)
  return TrainState(jnp.zeros((), jnp.int32), networks, optimizer.init(networks), None)


def _masked(value: Any) -> bool:
  return isinstance(value, optax.MaskedNode)
