"""The search for the largest batch, and the tables of a plan compiled for a TPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from agentjax import models
from agentjax.config import ConfigError, Table
from agentjax.engine import SlotEngine
from agentjax.planning import compile as compilation
from agentjax.planning import parse_topology
from agentjax.planning.chips import parts_of
from agentjax.planning.compile import LanePlans, Plan, describe_devices, largest_rows
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.seat_config import SnapshotSeat, TrainedSeat
from agentjax.signals.signal import SignalConfig
from agentjax.training.state import NetworkSpec, network_specs
from tests.training.stages import staged_experiment

ROOT = pathlib.Path(__file__).parents[2]
LIBTPU = importlib.util.find_spec("libtpu") is not None


def fake(capacity: int, fixed: int, a_row: int, curve: int = 0):
  """Plans of a program that takes ``fixed + a_row * rows + curve * rows²`` bytes."""
  tried = []

  def plan(rows: int) -> Plan:
    tried.append(rows)
    temporary = a_row * rows + curve * rows**2
    peak = fixed + temporary
    return Plan(rows, {"parameters": fixed}, temporary, peak, peak <= capacity)

  return plan, tried


@pytest.mark.parametrize("first", [8, 64, 512])
@pytest.mark.parametrize(("a_row", "curve"), [(7, 0), (7, 1), (1, 3)])
def test_the_largest_batch_fits_and_a_much_larger_one_does_not(first, a_row, curve):
  plan, tried = fake(1000 + 5000, 1000, a_row, curve)
  best = largest_rows(plan, plan(first), 8, 6000)
  assert best is not None and best.fits and best.rows % 8 == 0
  assert not plan(best.rows + max(8, best.rows // 3)).fits
  assert len(tried) <= 8


def test_no_batch_fits_where_the_weights_do_not():
  plan, _ = fake(500, 1000, 1)
  assert largest_rows(plan, plan(8), 8, 500) is None


def test_topologies_are_checked():
  assert parse_topology("v5p:8x8x8")[0] == "v5p:8x8x8"
  assert parse_topology("v6e")[0] == "v6e:2x4"
  with pytest.raises(ConfigError, match=r"v4:2x2.*v5e, v5p, v6e, tpu7x"):
    parse_topology("v4:2x2")
  with pytest.raises(ConfigError, match="topology"):
    parse_topology("v5e:many")


def test_a_lane_is_planned_on_the_smallest_part_of_the_pod():
  assert parts_of("v5e:4x4") == ("v5e:2x2", "v5e:2x4", "v5e:4x4")
  assert parts_of("v5p:2x2x1") == ("v5p:2x2x1",)


@pytest.mark.skipif(LIBTPU, reason="libtpu is installed")
def test_without_libtpu_the_error_names_the_extra():
  with pytest.raises(ConfigError, match=r"agentjax\[tpu\]"):
    describe_devices("v5e:2x2")


@pytest.mark.tpu
@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
def test_a_hybrid_is_planned_for_a_tpu():
  result = subprocess.run(
    [
      *(sys.executable, "-m", "agentjax.plan", "--config=configs/quickstart.py"),
      *("--topology=v5e:2x2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"),
      *("--config.engine.mesh.tensor=4", "--price_per_chip_hour=3600"),
    ],
    cwd=ROOT,
    env=os.environ | {"COLUMNS": "100"},
    capture_output=True,
    text=True,
    check=True,
  )
  lines = [line.strip("│").split("│") for line in result.stdout.splitlines()]
  cells = {line[0].strip(): [c.strip() for c in line[1:]] for line in lines if len(line) > 1}
  # 0.5M parameters, 16 rows of 256 tokens, six operations each, over four devices: about 3 G.
  assert 0.002 < float(cells["update, 16 rows"][0].removesuffix(" T")) < 0.012
  assert {"cast", "publish", "decode", "optimiser", "extend 16"} <= set(cells)
  assert "all together: fits" in result.stdout
  total, paid = (cells[name][1:] for name in ("all", "price, 4 chips at 3600 an hour"))
  for seconds, price in zip(total, paid, strict=True):
    assert float(price) == pytest.approx(4 * float(seconds.removesuffix(" s")), abs=0.02)


@dataclasses.dataclass(unsafe_hash=True)
class FrozenConfig(SignalConfig):
  """A signal with a frozen copy of the policy."""

  def networks(self, model, updates):
    return {"frozen": NetworkSpec(network_specs(model, critic=False), start="policy")}


def test_networks_of_seats_and_signals_are_counted(monkeypatch):
  monkeypatch.setattr(compilation, "_compile", lambda function, arguments, parts, **sizes: parts)

  def planned(seats, *signals):
    experiment = staged_experiment(ScheduleConfig(), seats=Table(seats))
    experiment.rl.signals = signals
    devices = jax.devices()[:1]
    return compilation.plan_training(experiment.freeze(), devices, rows=8, capacity=0)

  def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

  plain = planned({})
  counted = planned({"white": SnapshotSeat(), "black": SnapshotSeat(every=1)}, FrozenConfig())
  assert bytes_of(plain["further networks"]) == 0
  assert bytes_of(counted["further networks"]) == 3 * bytes_of(plain["parameters"])
  # Its weights, its moments, and the frozen network of a signal for each of the two policies.
  two = planned({"white": TrainedSeat()}, FrozenConfig())
  parts = 3 * bytes_of(plain["parameters"]) + bytes_of(plain["optimiser"])
  assert bytes_of(two["further networks"]) == parts


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_the_plan_compiles_the_programs_of_the_engine(monkeypatch, speculate):
  """The very functions, for arguments of the very shapes."""
  seen = []
  monkeypatch.setattr(
    compilation, "_compile", lambda function, arguments, *_: seen.append((function, arguments))
  )
  experiment = staged_experiment(ScheduleConfig())
  experiment.engine.speculate = speculate
  lane = LanePlans.of(experiment.freeze(), jax.devices()[:1], capacity=0)
  lane.decode()
  buckets = experiment.engine.extend_buckets
  for tokens in buckets:
    lane.extend(tokens)
  settings = dataclasses.replace(experiment.engine, lanes=1)
  settings.slots = experiment.engine.slots // experiment.engine.lanes
  engine = SlotEngine(experiment.model, settings, home=None)
  programs = engine.programs
  assert [f for f, _ in seen] == [programs.decode, *(programs.extend[n] for n in buckets)]
  params = programs.prepare(models.init(experiment.model, jax.random.key(0)))
  state = engine.device.state
  real = [(state, params, engine.idle_plan())]
  real += [(state, params, *engine._rows([], programs.extend_rows[n], n)) for n in buckets]
  assert [jax.tree.map(_kind, a) for _, a in seen] == [jax.tree.map(_kind, a) for a in real]
  memory = lane.memory()
  assert memory.state == sum(v.nbytes for v in jax.tree.leaves(state))
  assert memory.weights == sum(v.nbytes for v in jax.tree.leaves(params))
  block = memory.block_tokens
  assert memory.tokens == programs.ways * (programs.layers[0].pages - 1) * block
  assert memory.tokens >= settings.slots * settings.max_length
  cached = sum(v.nbytes for v in jax.tree.leaves(state.cache.blocks))
  assert memory.token * (memory.tokens + block) == pytest.approx(cached, rel=1e-6)
  assert memory.more_tokens(int(2.9 * block * memory.token)) == 2 * block


def _kind(x):
  return x.shape, x.dtype
