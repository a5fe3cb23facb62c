"""The programs that a plan compiles for publishing are those by which an engine publishes."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import jax
import optax

from agentjax.engine import Engine, publish
from agentjax.models.lora import LoraConfig
from agentjax.planning import compile as compilation
from agentjax.planning.compile import Plan, plan_publishing
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.training.state import StateSpec, full_policy
from tests.sharding.conftest import on_eight_devices  # noqa: F401
from tests.training.stages import staged_experiment


def test_the_plan_and_the_engine_publish_by_one_program(on_eight_devices):  # noqa: F811
  on_eight_devices(__file__)


def check() -> None:
  for lora in (None, LoraConfig(rank=2)):
    check_publishing(lora)


def check_publishing(lora: LoraConfig | None) -> None:
  """The same jitted functions, for arguments of the same shapes, dtypes and places."""
  order = [jax.devices()[i] for i in (0, 2, 4, 6, 7, 5, 3, 1)]  # as on a torus
  planned, used = [], []

  def compiled(function, arguments, *_):
    planned.append((function, jax.tree.map(_kind, arguments)))
    made = function.lower(*arguments).compile()
    peak = made.memory_analysis().argument_size_in_bytes
    peak += made.memory_analysis().output_size_in_bytes
    return Plan(1, {}, 0, peak, fits=True, results=made.output_shardings)

  compilation._compile = compiled
  compilation.make_mesh = lambda config, devices: make_mesh(config, order)
  experiment = staged_experiment(ScheduleConfig(), mesh=MeshConfig(fsdp=4, tensor=2))
  experiment.lora = lora
  changes = {"lanes": 2, "mesh": MeshConfig(fsdp=1, tensor=4), "warmup": False}
  experiment.engine = dataclasses.replace(experiment.engine, **changes)
  publish._AT_ONCE = 2**10  # several programs for a small model
  plans = plan_publishing(experiment.freeze(), jax.devices(), 0)
  names = ["cast", "publish"]
  names += [] if lora is None else ["cast adapters", "publish adapters"]
  assert list(plans) == names and len(planned) > 3
  # Besides all weights in both layouts there is a part of them in the lanes' order.
  parts = plans["publish"].parts
  assert 0 < plans["publish"].temporary < parts["cast weights"] < parts["lane's weights"]

  program = publish.reshard_program

  def noted(targets):
    def call(leaves):
      used.append((program(targets), jax.tree.map(_kind, (leaves,))))
      return program(targets)(leaves)

    return call

  mesh = make_mesh(experiment.mesh, order)
  spec = StateSpec(experiment.model, optax.identity(), mesh, lora=lora)
  state = spec.create(jax.random.key(0))
  params = full_policy(state.weights, state.reference, lora)
  engine = Engine(experiment.model, experiment.sampling_engine)
  programs = engine.scheduler.lanes[0].slots.programs
  with contextlib.ExitStack() as stack:  # the programs are shared with later engines
    stack.enter_context(mock.patch.object(publish, "reshard_program", noted))
    for name in ("prepare", "prepare_adapters"):
      seen = noting(getattr(programs, name), used)
      stack.enter_context(mock.patch.object(programs, name, seen))
    engine.publish(params, 0)
  engine.close()
  assert planned == used


def noting(function, used):
  def call(arrays):
    used.append((function, jax.tree.map(_kind, (arrays,))))
    return function(arrays)

  return call


def _kind(x):
  return x.shape, x.dtype, x.sharding


if __name__ == "__main__":
  check()
