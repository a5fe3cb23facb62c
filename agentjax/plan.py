r"""What a run needs on TPUs that are not there, from the compiler itself.

  python -m agentjax.plan --config=configs/models/qwen3_8b.py --topology=v5e:4x4

Compiles the sharded update of the RL stage and a decoding step for the topology on this machine's
CPU and prints, for one device, memory, work and collectives, whether it fits, and the largest batch
that does. Needs libtpu: ``pip install 'agentjax[tpu]'``.

The engine does not run decoding on a mesh yet: each of its lanes is one device with the whole
model. A plan of a decoding step that splits the model says so.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # Before jax: the TPU is only described.

import functools
from collections.abc import Callable

from absl import flags
from rich.console import Console
from rich.table import Table

from agentjax.command import main
from agentjax.planning.chips import Chip, parse_topology
from agentjax.planning.compile import (
  Plan,
  describe_devices,
  describe_lane,
  largest_rows,
  plan_decoding,
  plan_training,
)
from agentjax.sharding import make_mesh, row_multiple
from agentjax.training.experiment import Experiment
from agentjax.training.flags import define_config_flag

_CONFIG = define_config_flag()
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "TPU topology, as v5e:16x16, v5p:8x8x8, v6e or tpu7x.", required=True
)
_ROWS = flags.DEFINE_integer(
  "rows", None, "Rows of a micro-batch over all devices; default rl.microbatch_rows.", lower_bound=1
)
_LARGEST = flags.DEFINE_bool("largest", True, "Also look for the largest batch that fits.")
_UPDATE = flags.DEFINE_bool("update", True, "Plan the update.")
_DECODE = flags.DEFINE_bool("decode", True, "Plan a decoding step.")
_SLOTS = flags.DEFINE_integer(
  "slots", None, "Contexts of a lane; default engine.slots / engine.lanes."
)


def run(argv: list[str]) -> None:
  """Plans the config of the flags and prints the tables."""
  del argv
  experiment: Experiment = _CONFIG.value
  # What else a run needs, tasks and weights, a plan does without.
  for name in ("model", "mesh", "engine", "rl"):
    getattr(experiment, name).validate(f"config.{name}")
  experiment.freeze()
  topology, chip = parse_topology(_TOPOLOGY.value)
  devices = describe_devices(topology)
  console = Console(width=100)
  console.print(f"{experiment.name} on {topology}, {len(devices)} devices, bytes a device")

  if _UPDATE.value:
    rows, tokens = _ROWS.value or experiment.rl.microbatch_rows, experiment.rl.row_length
    _report(
      console,
      functools.partial(plan_training, experiment, devices, capacity=chip.hbm_bytes),
      rows,
      row_multiple(make_mesh(experiment.mesh, devices)),
      chip,
      ("update, micro-batch of", f"rows x {tokens} tokens"),
    )
  if _DECODE.value:
    engine = experiment.engine
    place = describe_lane(topology, engine.mesh.size)
    lane = ", ".join(f"{axis}={n}" for axis, n in engine.mesh.to_dict().items() if n > 1)
    _report(
      console,
      functools.partial(plan_decoding, experiment, place, capacity=chip.hbm_bytes),
      _SLOTS.value or engine.slots // engine.lanes,
      engine.mesh.data * engine.mesh.expert,
      chip,
      (
        f"decoding step, {engine.chunk_tokens} tokens on a lane of {lane or 'one device'},",
        f"slots of {engine.max_length} tokens",
      ),
    )


def _report(
  console: Console,
  plan: Callable[[int], Plan],
  rows: int,
  step: int,
  chip: Chip,
  words: tuple[str, str],
) -> None:
  """Prints the plan for ``rows``, and that of the most that fit."""
  what, unit = words
  first = plan(rows)
  console.print(_table(f"{what} {rows} {unit}", first, chip))
  if not _LARGEST.value:
    return
  best = largest_rows(plan, first, step, chip.hbm_bytes)
  if best is None:
    console.print("no batch fits: split the model over more devices or recompute more.\n")
  elif best.rows == first.rows:
    console.print(f"the largest that fits: this, {best.rows} {unit}.\n")
  else:
    console.print(_table(f"the largest that fits: {best.rows} {unit}", best, chip))


def _table(title: str, plan: Plan, chip: Chip) -> Table:
  table = Table(title=title, title_justify="left", show_header=False)
  for name, size in plan.parts.items():
    table.add_row(name, _bytes(size))
  table.add_row("activations and temporaries", _bytes(plan.temporary))
  share = plan.peak / chip.hbm_bytes
  table.add_row("peak", f"{_bytes(plan.peak)}, {share:.0%} of {_bytes(chip.hbm_bytes)}")
  table.add_row("fits", "yes" if plan.fits else "no")
  if plan.cost is not None:
    cost = plan.cost
    table.add_row("FLOPs", f"{cost.flops / 1e9:,.2f} G")
    table.add_row("bytes from and to memory", _bytes(cost.hbm_bytes))
    for kind, received in cost.collective_bytes.items():
      table.add_row(f"{kind} bytes", _bytes(received))
    table.add_row("compiler's time, without collectives", f"{cost.cycles / chip.clock:,.4g} s")
    table.add_row("least time for the FLOPs", f"{cost.flops / chip.flops:,.4g} s")
    table.add_row("least time for the bytes", f"{cost.hbm_bytes / chip.hbm_bandwidth:,.4g} s")
  return table


def _bytes(size: float) -> str:
  return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.2f} MiB"


if __name__ == "__main__":
  main(run)
