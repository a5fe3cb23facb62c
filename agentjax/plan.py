r"""What a run needs on TPUs that are not there, from the compiler itself.

  python -m agentjax.plan --config=configs/models/qwen3_8b.py --topology=v5e:4x4 \
      --price_per_chip_hour=1.2

Compiles the run's own programs for the topology on this machine's CPU: the update and the scoring
of log-probs on the mesh, the extension and decoding of one lane of the engine, and the two that
give lanes new weights. Prints for one device what each needs and does, whether all of them fit
together, how many tokens of cache are left, and what a step costs in seconds and money. Needs
libtpu: ``pip install 'agentjax[tpu]'``.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # Before jax: the TPU is only described.

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from agentjax.command import main
from agentjax.config import check
from agentjax.models.attend import CACHE_BLOCK
from agentjax.planning.chips import Chip, parse_topology
from agentjax.planning.compile import (
  LaneMemory,
  LanePlans,
  Plan,
  describe_devices,
  describe_lane,
  largest_rows,
  plan_publishing,
  plan_scoring,
  plan_training,
)
from agentjax.planning.joint import (
  Phase,
  StepCost,
  estimated_seconds,
  least_seconds,
  phases,
  step_cost,
)
from agentjax.schedules import at_most
from agentjax.sharding import make_mesh, row_multiple
from agentjax.training.experiment import Experiment, check_model_features
from agentjax.training.flags import define_config_flag
from agentjax.training.placement import place

_PROGRAMS = ("update", "score", "publish", "decode", "extend")
_CONFIG = define_config_flag()
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "TPU topology, as v5e:16x16, v5p:8x8x8, v6e or tpu7x.", required=True
)
_ROWS = flags.DEFINE_integer(
  "rows", None, "Rows of a micro-batch over all devices; default rl.microbatch_rows.", lower_bound=1
)
_CHOSEN = flags.DEFINE_multi_enum(
  "program", list(_PROGRAMS), _PROGRAMS, "Programs to compile; what is left out costs nothing."
)
_LARGEST = flags.DEFINE_bool("largest", False, "Also look for the largest micro-batch that fits.")
_PRICE = flags.DEFINE_float(
  "price_per_chip_hour", None, "Price of a chip for an hour; a step is then priced.", lower_bound=0
)


def run(argv: list[str]) -> None:
  """Plans the config of the flags and prints the tables."""
  del argv
  # What was compiled for a described device cannot be read back.
  jax.config.update("jax_enable_compilation_cache", False)
  experiment: Experiment = _CONFIG.value
  # What else a run needs, tasks and weights, a plan does without.
  for name in ("model", "mesh", "engine", "rollout", "rl", "devices"):
    getattr(experiment, name).validate(f"config.{name}")
  check_model_features(experiment, experiment.model)
  own = experiment.likelihood
  check(own.in_order, "config.likelihood", own.chosen, "from left to right: others are not planned")
  experiment = at_most(experiment).freeze()
  topology, chip = parse_topology(_TOPOLOGY.value)
  devices = describe_devices(topology)
  console = Console(width=110)
  engine = experiment.engine
  hosts = len({device.process_index for device in devices})
  lanes = engine.lanes * hosts // engine.processes
  shape = ", ".join(f"{axis}={n}" for axis, n in engine.mesh.to_dict().items() if n > 1)
  console.print(
    f"{experiment.name} on {topology}: {len(devices)} devices, {lanes} lanes of "
    f"{shape or 'one device'}, each with {engine.slots // engine.lanes} slots of "
    f"{engine.max_length} tokens. Bytes of one device."
  )
  rows = _ROWS.value or experiment.rl.microbatch_rows
  plans, memory = _compiled(experiment, topology, chip, rows)
  console.print(_programs_table(experiment, plans, chip))
  found = phases(experiment, plans, memory)
  console.print(_fit_table(found, chip))
  largest = max(found, key=lambda phase: phase.size)
  left = chip.hbm_bytes - largest.size
  together = "fits" if left >= 0 else "DOES NOT FIT"
  console.print(f"all together: {together}, {_bytes(abs(left))} {'left' if left >= 0 else 'over'}")
  if memory is not None:
    windows = f", and {_bytes(memory.windows)} of windows" if memory.windows else ""
    console.print(
      f"cache of a lane: {memory.tokens:,} tokens of {memory.token / 1024:,.1f} KiB{windows}; "
      f"{memory.more_tokens(left):,} more fit"
    )
  cost = step_cost(experiment, plans, lanes, len(devices), chip)
  console.print(_step_table(cost, _PRICE.value))
  if _LARGEST.value and "update" in plans:
    beside = next(p.size for p in found if p.program == "update") - plans["update"].peak
    room = chip.hbm_bytes - beside
    first = dataclasses.replace(plans["update"], fits=plans["update"].peak <= room)
    plan = functools.partial(plan_training, experiment, devices, capacity=room)
    mesh = make_mesh(experiment.mesh, place(experiment.devices, devices).training)
    best = largest_rows(plan, first, row_multiple(mesh), room)
    unit = f"rows x {experiment.rl.row_length} tokens"
    console.print(
      "no micro-batch fits: split the model over more devices or recompute more."
      if best is None
      else f"the largest micro-batch that fits: {best.rows} {unit}, {_bytes(best.temporary)} of "
      "temporaries"
    )


def _compiled(
  experiment: Experiment, topology: str, chip: Chip, rows: int
) -> tuple[dict[str, Plan], LaneMemory | None]:
  """The programs that the flag names, and what a lane keeps if there is one among them."""
  devices, chosen = describe_devices(topology), _CHOSEN.value
  plans: dict[str, Plan] = {}
  if "update" in chosen:
    plans["update"] = plan_training(experiment, devices, rows, chip.hbm_bytes)
  stage = experiment.rl
  if "score" in chosen and (stage.old_log_probs == "recomputed" or stage.objective.needs_reference):
    plans["score"] = plan_scoring(experiment, devices, rows, chip.hbm_bytes)
  if "publish" in chosen:
    plans |= plan_publishing(experiment, devices, chip.hbm_bytes)
  if not {"decode", "extend"} & set(chosen):
    return plans, None
  size = experiment.engine.mesh.size
  lane = LanePlans.of(experiment, describe_lane(topology, size), chip.hbm_bytes)
  if "extend" in chosen:
    plans |= {f"extend {n}": lane.extend(n) for n in experiment.engine.extend_buckets}
  if "decode" in chosen:
    plans["decode"] = lane.decode()
  return plans, lane.memory()


def _programs_table(experiment: Experiment, plans: Mapping[str, Plan], chip: Chip) -> Table:
  """What each program does, with slots that are full."""
  table = _table("", "FLOPs", "memory traffic", "received", "least", "compiler's")
  blocks = -(-experiment.engine.max_length // CACHE_BLOCK)
  for name, plan in plans.items():
    costs = {name: plan.cost(blocks)}
    if name in ("update", "score"):
      costs = {f"{name}, {plan.rows} rows": plan.loop}
    if name == "update":
      costs["optimiser"] = plan.fixed
    for shown, cost in costs.items():
      if cost is not None:
        table.add_row(
          shown,
          f"{cost.flops / 1e12:,.3g} T",
          _bytes(cost.hbm_bytes),
          _bytes(sum(cost.collective_bytes.values())),
          _seconds(least_seconds(cost, chip)),
          _seconds(estimated_seconds(cost, chip)),
        )
  return table


def _fit_table(found: Sequence[Phase], chip: Chip) -> Table:
  """What lies on a device in each program."""
  table = _table("", *(phase.program for phase in found))
  for part in dict.fromkeys(part for phase in found for part in phase.parts):
    table.add_row(part, *(_bytes(p.parts[part]) if part in p.parts else "" for p in found))
  table.add_row("all", *(_bytes(phase.size) for phase in found))
  table.add_row(
    f"of {_bytes(chip.hbm_bytes)}", *(f"{phase.size / chip.hbm_bytes:.0%}" for phase in found)
  )
  return table


def _step_table(cost: StepCost, price: float | None) -> Table:
  """Seconds, tokens a second and money of a step."""
  table = _table("a step", "runs", "least", "compiler's")
  for name, least in cost.least.items():
    estimated = cost.estimated[name]
    table.add_row(name, f"{cost.runs[name]:,.0f}", _seconds(least), _seconds(estimated))
  table.add_row("all", "", *map(_seconds, cost.seconds))
  if "decode" in cost.least:
    rates = (cost.sampled / seconds["decode"] for seconds in (cost.least, cost.estimated))
    table.add_row("tokens/s while decoding", "", *(f"{rate:,.0f}" for rate in rates))
  if price is not None:
    paid = (f"{amount:,.2f}" for amount in cost.price(price))
    table.add_row(f"price, {cost.chips} chips at {price:g} an hour", "", *paid)
  return table


def _table(*columns: str) -> Table:
  table = Table()
  for i, name in enumerate(columns):
    table.add_column(name, justify="right" if i else "left")
  return table


def _bytes(size: float) -> str:
  return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"


def _seconds(seconds: float) -> str:
  return f"{seconds:,.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


if __name__ == "__main__":
  main(run)
