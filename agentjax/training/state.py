"""What training changes: parameters, optimiser, step; sharded from the parameter specs."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import optax

from agentjax.models import ModelConfig, init, param_specs, value_specs
from agentjax.models.lora import LoraConfig, adapt, init_lora, lora_specs, merge_lora
from agentjax.models.spec import abstract, init_params
from agentjax.sharding import replicated, shardings, with_shardings
from agentjax.training.optimizer import is_masked

Array = jax.Array


@flax.struct.dataclass
class Weights:
  """Parameters that one optimiser moves, or that are frozen."""

  policy: Any  # models.Params, or the adapters of a LoRA run
  value: Any = None  # linear value head on its states, or None


@flax.struct.dataclass
class Network:
  """One network of a run.

  Attributes:
    weights: its parameters.
    opt_state: optax state of ``weights``; None where it is frozen.
  """

  weights: Weights
  opt_state: Any = None


@flax.struct.dataclass
class TrainState:
  """One pytree that a checkpoint holds.

  Attributes:
    step: int32, training steps done, over all stages; a step may hold many updates.
    networks: by name: "policy"; "reference", frozen, of the KL term and what adapters are added to,
      where something uses it; "reward_model", which learns beside the policy
      (``rl.process.online``); those of signals; snapshots and further policies that are trained,
      whose own networks are called POLICY.NAME (``training.policies``).
  """

  step: Any
  networks: dict[str, Network]

  @property
  def weights(self) -> Weights:
    """Of the policy."""
    return self.networks["policy"].weights

  @property
  def reference(self) -> Any:
    """Parameters of the reference policy; None without one."""
    found = self.networks.get("reference")
    return None if found is None else found.weights.policy

  @property
  def trained(self) -> Any:
    """All trained parameters, for a fingerprint."""
    others = [
      network.weights
      for name, network in sorted(self.networks.items())
      if name != "policy" and network.opt_state is not None
    ]
    return (self.weights, *others)

  def with_network(self, name: str, network: Network) -> TrainState:
    """With another network of that name."""
    return dataclasses.replace(self, networks={**self.networks, name: network})


@dataclasses.dataclass(frozen=True)
class NetworkSpec:
  """What a network beside "policy" is made of.

  Attributes:
    specs: tree of ParamSpec of ``Network.weights``.
    optimizer: what moves it; None leaves it as it starts.
    start: "random"; "policy" for a copy of the present policy with adapters added in (a value head
      is random); "trained" for a copy of what is trained of it, adapters where there are any; or
      what gives the weights that it begins the stage with.
    of: the policy that ``start`` copies; its own spec comes first.
  """

  specs: Weights
  optimizer: optax.GradientTransformation | None = None
  start: Callable[[], Weights] | Literal["random", "policy", "trained"] = "random"
  of: str = "policy"


def network_specs(config: ModelConfig, critic: bool, lora: LoraConfig | None = None) -> Weights:
  """ParamSpecs of the trained parameters of a policy; of a LoRA policy the adapters alone."""
  policy = param_specs(config)
  return Weights(
    policy=policy if lora is None else lora_specs(policy, lora),
    value=value_specs(config) if critic else None,
  )


def full_policy(weights: Weights, reference: Any, lora: LoraConfig | None) -> Any:
  """What the model runs with: the trained policy, or ``reference`` with the adapters beside it."""
  return weights.policy if lora is None else adapt(reference, weights.policy, lora)


def merged_policy(weights: Weights, reference: Any, lora: LoraConfig | None) -> Any:
  """The same as plain parameters, adapters added in."""
  return weights.policy if lora is None else merge_lora(reference, weights.policy, lora)


@dataclasses.dataclass(frozen=True, eq=False)
class StateSpec:
  """What the TrainState of a stage is made of, and where it lies.

  Attributes:
    model: of the policy.
    optimizer: of the policy.
    mesh: to place on.
    critic, reference: whether the policy has a value head, and whether there is a reference policy.
    lora: trains adapters, fresh ones, on the policy that would be trained otherwise.
    further: other networks by name.
  """

  model: ModelConfig
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  critic: bool = False
  reference: bool = False
  lora: LoraConfig | None = None
  further: Mapping[str, NetworkSpec] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def placed(self) -> TrainState:
    """NamedShardings: moments are placed as their parameters, scalars replicated."""
    policy = network_specs(self.model, self.critic, self.lora)
    networks = {"policy": network_shardings(policy, self.optimizer, self.mesh)}
    if self.reference or self.lora is not None:
      networks["reference"] = Network(Weights(shardings(param_specs(self.model), self.mesh)))
    for name, spec in self.further.items():
      networks[name] = network_shardings(spec.specs, spec.optimizer, self.mesh)
    return TrainState(replicated(self.mesh), networks)

  def create(self, key: Array, weights: Weights | None = None) -> TrainState:
    """Parameters and a fresh optimiser, created in place on the mesh.

    Networks of ``further`` whose ``start`` gives weights are random until ``begin_stage``.

    Args:
      key: addresses all initial values; the value head folds in its own number.
      weights: parameters to start from, whose buffers are taken over; a value head that they lack
        is random, and so is everything where this is None.
    """
    return jax.jit(self._build, out_shardings=self.placed, donate_argnums=1)(key, weights)

  def abstract(self) -> TrainState:
    """Shapes, dtypes and shardings of what ``create`` makes, without making it."""
    shapes = jax.eval_shape(self._build, jax.random.key(0), None)
    return with_shardings(shapes, self.placed)

  def begin_stage(self, state: TrainState, key: Array) -> TrainState:
    """State at the start of a stage: fresh optimiser, reference set to the present policy.

    With ``lora`` the reference stays what the adapters are added to. Networks of ``further`` begin
    with their ``start``; ``key`` addresses what is random of them.
    """
    starts = {name: spec.start() for name, spec in self.further.items() if callable(spec.start)}

    def restart(state: TrainState, starts: dict[str, Weights]) -> TrainState:
      networks = {"policy": _fresh(state.weights, self.optimizer)}
      if "reference" in self.placed.networks:
        frozen = state.reference
        if self.lora is None:
          frozen = jax.tree.map(jnp.copy, state.weights.policy)
        networks["reference"] = Network(Weights(frozen))
      return self._with_further(TrainState(state.step, networks), starts, key)

    return jax.jit(restart, out_shardings=self.placed, donate_argnums=0)(state, starts)

  def _build(self, key: Array, given: Weights | None) -> TrainState:
    policy, value = (None, None) if given is None else (given.policy, given.value)
    if policy is None:
      policy = init(self.model, jax.random.fold_in(key, 0))
    if self.critic and value is None:
      value = init_params(value_specs(self.model), jax.random.fold_in(key, 1))
    networks = {}
    if self.lora is not None:
      networks["reference"] = Network(Weights(policy))
      policy = init_lora(param_specs(self.model), self.lora, jax.random.fold_in(key, 2))
    elif self.reference:
      # A copy: donated buffers must not appear twice in one state.
      networks["reference"] = Network(Weights(jax.tree.map(jnp.copy, policy)))
    networks["policy"] = _fresh(Weights(policy, value), self.optimizer)
    return self._with_further(TrainState(jnp.zeros((), jnp.int32), networks), {}, key)

  def _with_further(
    self, state: TrainState, starts: Mapping[str, Weights], key: Array
  ) -> TrainState:
    for name, spec in self.further.items():
      weights = starts[name] if name in starts else _begin(name, spec, state, self.lora, key)
      state = state.with_network(name, _fresh(weights, spec.optimizer))
    return state


def network_shardings(
  specs: Weights, optimizer: optax.GradientTransformation | None, mesh: jax.sharding.Mesh
) -> Network:
  """NamedShardings of one network: see ``StateSpec.placed``."""
  placed = shardings(specs, mesh)
  if optimizer is None:
    return Network(placed)
  everywhere = replicated(mesh)
  opt_shapes = jax.eval_shape(optimizer.init, abstract(specs))
  opt_shardings = optax.tree_utils.tree_map_params(
    optimizer.init,
    lambda moment, sharding: moment if is_masked(moment) else sharding,
    opt_shapes,
    placed,
    transform_non_params=lambda _: everywhere,
    is_leaf=is_masked,
  )
  return Network(placed, opt_shardings)


def _begin(
  name: str, spec: NetworkSpec, state: TrainState, lora: LoraConfig | None, key: Array
) -> Weights:
  own = init_params(spec.specs, jax.random.fold_in(key, zlib.crc32(name.encode())))
  if spec.start not in ("policy", "trained"):
    return own
  copied = state.networks[spec.of].weights
  if spec.start == "trained":
    return Weights(jax.tree.map(jnp.copy, copied.policy), own.value)
  policy = merged_policy(copied, state.reference, lora)
  # A critic has no use for parts such as prediction heads, which its specs leave out.
  fields = [field.name for field in dataclasses.fields(policy)]
  unused = [name for name in fields if getattr(spec.specs.policy, name) is None]
  kept = dataclasses.replace(policy, **dict.fromkeys(unused))
  return Weights(jax.tree.map(jnp.copy, kept), own.value)


def _fresh(weights: Weights, optimizer: optax.GradientTransformation | None) -> Network:
  return Network(weights, None if optimizer is None else optimizer.init(weights))
