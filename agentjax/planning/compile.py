"""The run's own training and decoding steps, compiled for devices that are only described."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine.home import make_homes
from agentjax.engine.programs import programs_of_lane
from agentjax.models.attend import CACHE_BLOCK
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
)
from agentjax.signals.critic import critic_spec
from agentjax.signals.teacher import TeacherHead, TeacherTargets
from agentjax.training.experiment import Experiment
from agentjax.training.optimizer import build_optimizer
from agentjax.training.phases import update_settings
from agentjax.training.policies import trained_networks
from agentjax.training.snapshots import snapshot_networks
from agentjax.training.state import (
  NetworkSpec,
  Weights,
  abstract_state,
  network_specs,
  state_shardings,
)
from agentjax.training.update import UpdateBatch, make_update, split_rows
from agentjax.trajectory.batch import abstract_batch

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
  """One program on one device.

  Attributes:
    rows: rows (training) or slots (decoding) over all devices.
    parts: bytes of its arguments, by what they are.
    temporary: bytes of activations and other intermediates, at the peak.
    peak: bytes altogether.
    fits: whether that is at most what a device has.
    cost: of one run; None where the temporaries alone are too many to compile.
  """

  rows: int
  parts: dict[str, int]
  temporary: int
  peak: int
  fits: bool
  cost: ProgramCost | None


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
  # No TPU is looked for, neither here nor at a cloud's metadata server.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # Nor is one taken for ourselves.
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


def plan_training(
  experiment: Experiment, devices: Sequence[jax.Device], rows: int, capacity: int
) -> Plan:
  """The update of the RL stage on one micro-batch of ``rows`` rows.

  A teacher's output projection is taken to be of the student's size; the rest of the teacher, which
  the update does not see, is not counted. Of a reward model that learns beside the policy the state
  is; its own update, much like this one, is not compiled.

  Args:
    experiment: validated; its mesh is laid over ``devices``.
    devices: from ``describe_devices``.
    rows: of one micro-batch, over all devices.
    capacity: bytes of memory of a device.

  Raises:
    ConfigError: arrays or rows that do not divide over the mesh.
  """
  stage, model = experiment.rl, experiment.model
  mesh = make_mesh(experiment.mesh, devices)
  critic, reference = stage.has_value_head, stage.objective.needs_reference
  reference = reference or any(signal.needs_reference for signal in stage.every_signal)
  specs = network_specs(model, critic, experiment.lora)
  optimizer = build_optimizer(stage.optimizer, stage.steps, specs)
  further = _further_networks(experiment, specs, optimizer, reference)
  placed = state_shardings(
    model,
    optimizer,
    mesh,
    critic=critic,
    reference=reference,
    lora=experiment.lora,
    further=further,
  )
  state = abstract_state(model, optimizer, placed, experiment.lora, further)
  update = make_update(
    model,
    optimizer,
    policy_objective(stage.objective),
    dataclasses.replace(
      update_settings(stage, experiment.lora), distillation=stage.objective.distillation
    ),
    placed,
  )
  rows_first = jax.sharding.NamedSharding(mesh, jax.P(None, *batch_sharding(mesh).spec))
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows_first),
    _abstract_update_batch(experiment, rows),
  )
  with jax.set_mesh(mesh):
    return _compile(
      update,
      (
        state,
        batch,
        jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh)),
        _abstract_head(experiment, mesh),
      ),
      parts={
        "parameters": state.weights,
        "optimiser": state.networks["policy"].opt_state,
        "reference": state.reference,
        "further networks": {name: state.networks[name] for name in further},
        "batch": batch,
      },
      rows=rows,
      capacity=capacity,
    )


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


def plan_decoding(
  experiment: Experiment, devices: Sequence[jax.Device], slots: int, capacity: int
) -> Plan:
  """The decoding program of one lane of the run's engine.

  Costs are those of a dispatch, ``engine.chunk_tokens`` tokens for every slot, with slots that are
  full: attention reads a cache block by block, as far as its longest context.

  Args:
    experiment: validated; its ``engine.mesh`` is laid over ``devices``.
    devices: from ``describe_lane``.
    slots: of the lane.
    capacity: bytes of memory of a device.

  Raises:
    ConfigError: there are fewer devices than the mesh of a lane has.
  """
  engine = dataclasses.replace(experiment.engine, slots=slots, lanes=1)
  engine.validate("config.engine")
  home = make_homes(engine, devices)[0]
  programs = programs_of_lane(experiment.model, engine, None, home.mesh)
  adapters, specs = None, models.param_specs(experiment.model)
  if experiment.lora is not None:
    _, adapters = split_adapters(adapt(specs, lora_specs(specs, experiment.lora), experiment.lora))
  state, params, plan = programs.abstract_arguments(home, adapters)
  return _compile(
    programs.decode,
    (state, params, plan),
    parts={"parameters": params, "cache": state},
    rows=slots,
    capacity=capacity,
    dynamic_trips=-(-engine.max_length // CACHE_BLOCK),
  )


def largest_rows(
  plan: Callable[[int], Plan], first: Plan, step: int, capacity: int, compiles: int = 6
) -> Plan | None:
  """The plan with the most rows found to fit, to about an eighth; None where not one does.

  Args:
    plan: compiles for a number of rows.
    first: result for some rows.
    step: rows must be a multiple of this.
    capacity: bytes of a device, from which guesses are made; what fits the compiler says.
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
  dynamic_trips: int = 1,
) -> Plan:
  sizes = {name: _bytes_a_device(tree) for name, tree in parts.items() if jax.tree.leaves(tree)}
  lowered = function.trace(*arguments).lower(lowering_platforms=("tpu",))
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    needed = re.search(r"temporaries \(([\d.]+)([GM])\)", str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or needed is None:
      raise
    temporary = int(float(needed.group(1)) * (_GIB if needed.group(2) == "G" else 2**20))
    return Plan(rows, sizes, temporary, sum(sizes.values()) + temporary, False, None)
  memory = compiled.memory_analysis()
  peak = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.generated_code_size_in_bytes
  )
  return Plan(
    rows=rows,
    parts=sizes,
    temporary=memory.temp_size_in_bytes,
    peak=peak,
    # The compiler itself minds temporaries only.
    fits=peak <= capacity,
    cost=program_cost(compiled.as_text(), dynamic_trips=dynamic_trips),
  )


def _abstract_update_batch(experiment: Experiment, rows: int) -> UpdateBatch:
  """[2, rows, T] shapes of what ``Learner`` hands to an update.

  Two micro-batches: the compiler would treat a single one as a constant of the loop over them.
  """
  stage, time = experiment.rl, experiment.rl.row_length
  micro, rows = rows, 2 * rows
  batch = abstract_batch(rows, time, sequences=rows)
  prepared = abstract_prepared(
    stage.objective,
    batch,
    recomputed=stage.old_log_probs == "recomputed",
    token_rewards=stage.process is not None,
  )
  whole = UpdateBatch(batch.token_ids, batch.positions, prepared)
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
      few = (rows, count, taught.top_k)
      targets = TeacherTargets(
        ids=jax.ShapeDtypeStruct(few, jnp.int32),  # type: ignore[arg-type]
        log_probs=jax.ShapeDtypeStruct(few, jnp.float32),  # type: ignore[arg-type]
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


def _placed(shapes: Any, placements: Any) -> Any:
  return jax.tree.map(
    lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, placements
  )


def _bytes_a_device(tree: Any) -> int:
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
