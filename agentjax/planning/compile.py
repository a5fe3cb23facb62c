"""The run's own programs, compiled one by one for devices that are only described."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import EngineConfig
from agentjax.engine.home import Home, make_homes
from agentjax.engine.programs import Programs, programs_of_lane
from agentjax.engine.publish import find_route, portions, reordered, reshard_program
from agentjax.models.lora import adapt, lora_specs, split_adapters
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import abstract_prepared
from agentjax.planning.chips import parts_of
from agentjax.planning.hlo import ProgramCost, program_cost
from agentjax.rollout.seat_config import trained_seats
from agentjax.sharding import (
  batch_sharding,
  make_mesh,
  replicated,
  shardings,
  split_rows,
  with_shardings,
)
from agentjax.signals.critic import critic_spec
from agentjax.signals.teacher import TeacherHead, TeacherTargets
from agentjax.training.experiment import Experiment
from agentjax.training.optimizer import build_optimizer
from agentjax.training.phases import update_settings
from agentjax.training.placement import Placement, place
from agentjax.training.policies import trained_networks
from agentjax.training.snapshots import snapshot_networks
from agentjax.training.state import (
  NetworkSpec,
  StateSpec,
  TrainState,
  Weights,
  full_policy,
  network_specs,
)
from agentjax.training.update import UpdateBatch, make_score, make_update, micro_rows
from agentjax.trajectory.batch import abstract_batch
from agentjax.trajectory.experts import compact_dtype

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
  """One program on one device.

  Attributes:
    rows: rows (training) or slots (decoding) over all devices.
    parts: bytes of its arguments, by name.
    temporary: bytes of everything else at the peak: activations, results and code.
    peak: bytes altogether.
    fits: whether a device has that many.
    fixed, loop: costs of one run without the loops whose number of trips is not in the program, and
      of one trip of them; None if it did not compile because its temporaries are too large.
    results: shardings of its results, likewise.
  """

  rows: int
  parts: dict[str, int]
  temporary: int
  peak: int
  fits: bool
  fixed: ProgramCost | None = None
  loop: ProgramCost | None = None
  results: Any = None

  def cost(self, trips: float = 1) -> ProgramCost | None:
    """Cost of a run with so many trips: an update's micro-batches, or blocks of the cache read."""
    if self.fixed is None or self.loop is None:
      return None
    return self.fixed.plus(self.loop, trips)


def describe_devices(topology: str) -> Sequence[jax.Device]:
  """Devices of a TPU topology such as ``v5p:8x8x8``, for compilation only.

  Raises:
    ConfigError: libtpu is missing, or it knows no such topology.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise ConfigError(
      "agentjax.plan compiles with libtpu, which is not installed; "
      "run: pip install 'agentjax[tpu]'."
    )
  # Look for no TPU, neither here nor at a cloud's metadata server.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # Nor take one for this process.
  from jax.experimental import topologies

  try:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  except jax.errors.JaxRuntimeError as error:
    raise ConfigError(f"--topology={topology!r}: {str(error).splitlines()[0]}") from error


def describe_lane(topology: str, size: int) -> Sequence[jax.Device]:
  """Neighbouring devices of a topology for a lane of the engine.

  Raises:
    ConfigError: the topology has fewer.
  """
  for part in parts_of(topology):
    devices = describe_devices(part)
    if len(devices) >= size:
      return devices[:size]
  raise ConfigError(
    f"config.engine.mesh has {size} devices; allowed: at most {len(devices)}, as --topology="
    f"{topology} has no more."
  )


@dataclasses.dataclass(frozen=True)
class _Training:
  """Shapes and placements of the training state."""

  spec: StateSpec
  state: TrainState

  @property
  def parts(self) -> dict[str, Any]:
    """What lies on the devices between two programs."""
    networks = self.state.networks
    return {
      "parameters": self.state.weights,
      "optimiser": networks["policy"].opt_state,
      "reference": self.state.reference,
      "further networks": {name: networks[name] for name in self.spec.further},
    }

  def policy(self, experiment: Experiment) -> Any:
    """What is scored and published; with adapters, the weights below them as well."""
    return full_policy(self.state.weights, self.state.reference, experiment.lora)


def _training(experiment: Experiment, devices: Sequence[jax.Device]) -> _Training:
  stage, model = experiment.rl, experiment.model
  mesh = make_mesh(experiment.mesh, place(experiment.devices, devices).training)
  critic, reference = stage.has_value_head, stage.objective.needs_reference
  reference = reference or any(signal.needs_reference for signal in stage.every_signal)
  specs = network_specs(model, critic, experiment.lora)
  optimizer = build_optimizer(stage.optimizer, stage.steps, specs)
  further = _further_networks(experiment, specs, optimizer, reference)
  spec = StateSpec(model, optimizer, mesh, critic, reference, experiment.lora, further)
  return _Training(spec, spec.abstract())


def plan_training(
  experiment: Experiment, devices: Sequence[jax.Device], rows: int, capacity: int
) -> Plan:
  """Plans the update of the RL stage; a trip is a micro-batch of ``rows`` rows.

  A teacher's output projection is assumed to have the student's size; the update does not see the
  rest of the teacher, so it is not counted. The state of a reward model that learns with the policy
  is counted; its own update, much like this one, is not compiled.

  Args:
    experiment: validated; its mesh is laid over the ``devices`` that train.
    devices: from ``describe_devices``.
    rows: of one micro-batch, over all devices.
    capacity: bytes of memory of a device.

  Raises:
    ConfigError: arrays or rows that do not divide over the mesh.
  """
  stage, model = experiment.rl, experiment.model
  training = _training(experiment, devices)
  spec, mesh, state = training.spec, training.spec.mesh, training.state
  update = make_update(
    model,
    spec.optimizer,
    policy_objective(stage.objective),
    dataclasses.replace(
      update_settings(stage, experiment.lora), distillation=stage.objective.distillation
    ),
    spec.placed,
  )
  batch = _in_rows(_abstract_update_batch(experiment, rows), mesh)
  count = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
  with jax.set_mesh(mesh):
    return _compile(
      update,
      (state, batch, count, _abstract_head(experiment, mesh)),
      parts=training.parts | {"batch": batch},
      rows=rows,
      capacity=capacity,
    )


def plan_scoring(
  experiment: Experiment, devices: Sequence[jax.Device], rows: int, capacity: int
) -> Plan:
  """Plans the forward pass that recomputes log-probs; arguments as of ``plan_training``."""
  training = _training(experiment, devices)
  mesh = training.spec.mesh
  batch = _in_rows(_abstract_update_batch(experiment, rows), mesh)
  weights = Weights(training.policy(experiment), training.state.weights.value)
  tokens = (batch.token_ids, batch.prepared.segment_ids, batch.positions, batch.experts)
  count = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
  with jax.set_mesh(mesh):
    return _compile(
      make_score(experiment.model, experiment.rl.sampling.temperature or 1.0),
      (weights, *tokens, count),
      parts={"parameters": weights, "batch": tokens},
      rows=rows,
      capacity=capacity,
    )


def plan_publishing(
  experiment: Experiment, devices: Sequence[jax.Device], capacity: int
) -> dict[str, Plan]:
  """Plans what gives lanes new weights: "cast" on the devices that train, "publish" to the lanes.

  "publish" lays them out on the devices that train, if these are several. Lanes on other devices
  are then sent their parts. With adapters these two are of the weights below them, once a run, and
  "cast adapters" and "publish adapters" are what every step does.

  Args:
    experiment, devices, capacity: as of ``plan_training``.
  """
  training, engine = _training(experiment, devices), experiment.sampling_engine
  placement = place(experiment.devices, devices, together=experiment.engine.processes)
  homes = make_homes(engine, placement.rollout)
  programs = programs_of_lane(experiment.model, engine, None, homes[0].mesh)
  base, adapters = split_adapters(training.policy(experiment))
  specs = programs.params_spec
  plans = _plan_publication(
    _Sent("weights", base, specs, programs.prepare), engine.slots, placement, homes, capacity
  )
  if adapters is not None:
    specs = None if specs is None else programs.placed_spec(adapters)
    sent = _Sent("adapters", adapters, specs, programs.prepare_adapters)
    added = _plan_publication(sent, engine.slots, placement, homes, capacity)
    plans |= {f"{name} adapters": plan for name, plan in added.items()}
  return plans


class _Sent(NamedTuple):
  """What is published: ``specs`` say how lanes split it, None for lanes of one device."""

  name: str
  arrays: Any
  specs: Any
  prepare: Callable[..., Any]


def _plan_publication(
  sent: _Sent, slots: int, placement: Placement, homes: Sequence[Home], capacity: int
) -> dict[str, Plan]:
  cast = _compile(sent.prepare, (sent.arrays,), {"parameters": sent.arrays}, slots, capacity)
  if len(placement.training) == 1 or cast.results is None:
    return {"cast": cast}
  route = find_route(homes, placement.training)
  shapes = jax.tree.leaves(jax.eval_shape(sent.prepare, sent.arrays))
  sources = jax.tree.leaves(cast.results)
  specs = jax.tree.leaves(sent.specs, is_leaf=lambda v: isinstance(v, jax.P))
  targets = [jax.sharding.NamedSharding(route.mesh, s) for s in specs or [jax.P()] * len(shapes)]
  given = with_shardings(shapes, [reordered(source, route.mesh) for source in sources])
  plans, beside = [], []
  for part in portions(shapes, route.size):
    plans.append(
      _compile(reshard_program(tuple(targets[part])), (tuple(given[part]),), {}, 0, capacity)
    )
    kept = bytes_a_device(with_shardings(shapes[part], targets[part])) if route.direct else 0
    beside.append(plans[-1].peak - kept)
  parts = {f"cast {sent.name}": bytes_a_device(with_shardings(shapes, sources))}
  if route.direct:
    parts[f"lane's {sent.name}"] = bytes_a_device(with_shardings(shapes, targets))
  peak = sum(parts.values()) + max(beside)
  fixed = [plan.fixed for plan in plans if plan.fixed is not None]
  cost = functools.reduce(ProgramCost.plus, fixed) if len(fixed) == len(plans) else None
  nothing = None if cost is None else cost.plus(cost, -1)
  publish = Plan(slots, parts, max(beside), peak, peak <= capacity, cost, nothing)
  return {"cast": cast, "publish": publish}


def _further_networks(
  experiment: Experiment, specs: Weights, optimizer: Any, reference: bool
) -> dict[str, NetworkSpec]:
  """The networks of signals, snapshots and further policies, by name."""
  stage, model = experiment.rl, experiment.model
  batches = stage.steps * stage.minibatches
  own = critic_spec(stage.critic, model, batches)
  for signal in stage.every_signal:
    own |= signal.networks(model, batches)
  seats = trained_seats(experiment.seats)
  policies = trained_networks(
    seats,
    model,
    specs,
    dict.fromkeys(seats, optimizer),
    dict.fromkeys(seats, own),
    reference=reference and experiment.lora is None,
    load=lambda _: Weights(None),
  )
  return {**own, **policies, **snapshot_networks(experiment, model)}


@dataclasses.dataclass(frozen=True)
class LaneMemory:
  """What a lane keeps on each of its devices between dispatches.

  Attributes:
    weights, state: bytes of the weights, and of all slots with their keys and values.
    parked: most bytes of contexts without a slot (``engine.device_store_mb``).
    tokens: whose keys and values the whole lane can hold.
    token: bytes of one more such token on a device.
    windows: of ``state``, bytes of keys and values in layers that keep the windows of all slots
      only: more tokens do not add to them.
    block_tokens: tokens of a page; room comes in whole pages.
  """

  weights: int
  state: int
  parked: int
  tokens: int
  token: float
  windows: int
  block_tokens: int

  def more_tokens(self, left: int) -> int:
    """Tokens, in whole pages, that fit in ``left`` bytes; 0 where more tokens take no bytes."""
    if not self.token:
      return 0
    return int(max(left, 0) / self.token) // self.block_tokens * self.block_tokens


@dataclasses.dataclass(frozen=True)
class LanePlans:
  """Plans for one lane of the run's engine, of the engine's own programs.

  Attributes:
    model, config: of the lane alone.
    home: on devices of ``describe_lane``.
    capacity: bytes of memory of a device.
    adapters: specs of those that lie beside the weights; None without ``config.lora``.
  """

  model: models.ModelConfig
  config: EngineConfig
  home: Home
  capacity: int
  adapters: Any = None

  @classmethod
  def of(cls, experiment: Experiment, devices: Sequence[jax.Device], capacity: int) -> LanePlans:
    """Plans for an experiment.

    Raises:
      ConfigError: there are fewer devices than the mesh of a lane has.
    """
    every = experiment.sampling_engine
    one = dataclasses.replace(every, slots=every.slots // every.lanes, lanes=1)
    one.validate("config.engine")
    adapters, lora = None, experiment.lora
    if lora is not None:
      specs = models.param_specs(experiment.model)
      _, adapters = split_adapters(adapt(specs, lora_specs(specs, lora), lora))
    return cls(experiment.model, one.freeze(), make_homes(one, devices)[0], capacity, adapters)

  @property
  def programs(self) -> Programs:
    """The jitted functions, not compiled yet."""
    return programs_of_lane(self.model, self.config, None, self.home.mesh)

  def decode(self) -> Plan:
    """A dispatch: ``engine.chunk_tokens`` tokens for every slot; a trip is a block of the cache."""
    arguments = self.programs.abstract_arguments(self.home, self.adapters)
    return self._plan(self.programs.decode, arguments)

  def extend(self, tokens: int) -> Plan:
    """A dispatch of the bucket of ``tokens`` tokens, with all its rows in use; trips likewise."""
    arguments = self.programs.abstract_extension(self.home, tokens, self.adapters)
    return self._plan(self.programs.extend[tokens], arguments)

  def memory(self) -> LaneMemory:
    """What the lane keeps, by the shapes of its state."""
    state, params, _ = self.programs.abstract_arguments(self.home, self.adapters)
    programs, token, windows, whole = self.programs, 0.0, 0, 0
    arrays = list(zip(jax.tree.leaves(state), programs.layers_of(state), strict=True))
    for layers in programs.layers:
      own = bytes_a_device([v for v, found in arrays if found is layers])
      pages = programs.ways * layers.pages
      whole += pages * layers.block_bytes  # on all devices
      token += own / (pages * programs.block_tokens) if layers.follows else 0.0
      windows += 0 if layers.follows else own
    pools = bytes_a_device([v for v, found in arrays if found is not None])
    # One page of a way is of no slot.
    most = max((layers.pages - 1 for layers in programs.layers), default=0)
    return LaneMemory(
      weights=bytes_a_device(params),
      state=bytes_a_device(state),
      parked=int((self.config.device_store_mb << 20) * (pools / whole if whole else 1)),
      tokens=programs.ways * most * programs.block_tokens,
      token=token,
      windows=windows,
      block_tokens=programs.block_tokens,
    )

  def _plan(self, function: Any, arguments: tuple[Any, ...]) -> Plan:
    parts = {"lane's weights": arguments[1], "cache": arguments[0]}
    return _compile(function, arguments, parts, self.programs.slots, self.capacity)


def largest_rows(
  plan: Callable[[int], Plan], first: Plan, step: int, capacity: int, compiles: int = 6
) -> Plan | None:
  """The plan with the most rows found to fit, within about an eighth; None if no rows fit.

  Args:
    plan: compiles for a number of rows.
    first: plan for some number of rows.
    step: rows must be a multiple of this.
    capacity: bytes of a device, for the guesses; the compiler says what fits.
    compiles: programs compiled at most.
  """
  best = first if first.fits else None
  low, high = (first.rows, None) if first.fits else (0, first.rows)
  last = first
  for _ in range(compiles):
    if high is not None and high - low <= max(step, low // 8):
      break
    if high is None or last is first:
      a_row = max(last.temporary, 1) / last.rows
      rows = int((capacity - sum(last.parts.values())) / a_row) // step * step
      rows = min(max(rows, low + step), 16 * low if high is None else high - step)
    else:
      rows = (low + high) // (2 * step) * step
    if rows <= low:
      break
    last = plan(rows)
    if last.fits:
      best, low = last, rows
    else:
      high = rows
  return best


def _compile(
  function: Any,
  arguments: tuple[Any, ...],
  parts: dict[str, Any],
  rows: int,
  capacity: int,
) -> Plan:
  sizes = {name: bytes_a_device(tree) for name, tree in parts.items() if jax.tree.leaves(tree)}
  lowered = function.trace(*arguments).lower(lowering_platforms=("tpu",))
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    needed = re.search(r"temporaries \(([\d.]+)([GM])\)", str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or needed is None:
      raise
    temporary = int(float(needed.group(1)) * (_GIB if needed.group(2) == "G" else 2**20))
    return Plan(rows, sizes, temporary, sum(sizes.values()) + temporary, False)
  memory = compiled.memory_analysis()
  peak = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.generated_code_size_in_bytes
  )
  text = compiled.as_text()
  fixed = program_cost(text, dynamic_trips=0)
  return Plan(
    rows=rows,
    parts=sizes,
    temporary=peak - sum(sizes.values()),
    peak=peak,
    # The compiler itself checks temporaries only.
    fits=peak <= capacity,
    fixed=fixed,
    loop=program_cost(text).plus(fixed, -1),
    results=compiled.output_shardings,
  )


def _in_rows(batch: UpdateBatch, mesh: jax.sharding.Mesh) -> UpdateBatch:
  """[M, rows, T, ...] shapes on a mesh."""
  rows_first = jax.sharding.NamedSharding(mesh, jax.P(None, *batch_sharding(mesh).spec))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows_first), batch)


def _abstract_update_batch(experiment: Experiment, rows: int) -> UpdateBatch:
  """[M, rows, T] shapes of what ``Learner`` hands to an update of full rows.

  At least two micro-batches: a single one would become a constant of the loop over them.
  """
  stage, time = experiment.rl, experiment.rl.row_length
  episodes = stage.tasks_per_step * experiment.rollout.group_size // stage.minibatches
  needed = episodes * min(experiment.rollout.max_total_tokens, time) // time
  micro, rows = rows, max(micro_rows(needed, rows), 2 * rows)
  batch = abstract_batch(rows, time, sequences=rows)
  prepared = abstract_prepared(
    stage.objective,
    batch,
    recomputed=stage.old_log_probs == "recomputed",
    token_rewards=stage.process is not None,
  )
  experts: Any = None
  if stage.replay_experts:
    model = experiment.model
    choices = (rows, time, models.num_routers(model), model.experts_per_token)
    experts = jax.ShapeDtypeStruct(choices, compact_dtype(model.num_experts + model.zero_experts))
  whole = UpdateBatch(batch.token_ids, batch.positions, prepared, experts)
  taught = stage.objective.distillation
  if taught is not None and (taught.keep < 1 or stage.objective.needs_divergences):
    eighth = -(-time // 8)
    count = min(-(-math.ceil(taught.keep * time) // eighth) * eighth, time)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=experiment.model.dtype)
    kept: Any = jax.ShapeDtypeStruct((rows, count), jnp.int32)
    targets = None
    if taught.form == "full":
      targets = TeacherTargets(hidden=shape((rows, count, experiment.model.d_model)))  # type: ignore[arg-type]
    elif taught.form == "top_k":
      few: Any = functools.partial(jax.ShapeDtypeStruct, (rows, count, taught.places))
      targets = TeacherTargets(
        ids=few(jnp.int32),
        log_probs=few(jnp.float32),
        inside=few(jnp.bool_) if taught.of_both else None,
        old_log_probs=None if taught.candidate_loss is None else few(jnp.float32),
      )
    whole = dataclasses.replace(whole, kept=kept, teacher=targets)
  return jax.eval_shape(lambda tree: split_rows(tree, micro), whole)


def _abstract_head(experiment: Experiment, mesh: jax.sharding.Mesh) -> TeacherHead | None:
  taught, model = experiment.rl.objective.distillation, experiment.model
  if taught is None or taught.form != "full":
    return None
  softcap = model.logit_softcap
  spec = models.ParamSpec((model.d_model, model.vocab_size), ("embed", "vocab"))
  weight: Any = jax.ShapeDtypeStruct(spec.shape, model.param_dtype, sharding=shardings(spec, mesh))
  return TeacherHead(weight, softcap)


def bytes_a_device(tree: Any) -> int:
  """Bytes of a tree of abstract arrays on one of the devices that they are placed on."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
