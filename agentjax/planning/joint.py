"""Whether all programs of a run fit on its devices together, and what a step of them costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from agentjax.models.attend import CACHE_BLOCK
from agentjax.planning.chips import Chip
from agentjax.planning.compile import LaneMemory, Plan
from agentjax.planning.hlo import ProgramCost
from agentjax.training.experiment import Experiment

# Parts of a program's arguments that stay between programs.
_STAYING = ("parameters", "optimiser", "reference", "further networks")


@dataclasses.dataclass(frozen=True)
class Phase:
  """What lies on a device while one of the programs runs.

  Attributes:
    program: its name.
    parts: bytes by name; "temporaries" is what else the program needs.
  """

  program: str
  parts: Mapping[str, int]

  @property
  def size(self) -> int:
    """Bytes of all parts."""
    return sum(self.parts.values())


def phases(
  experiment: Experiment, plans: Mapping[str, Plan], lane: LaneMemory | None
) -> list[Phase]:
  """What lies on a device in each program of a run.

  If devices train and sample in turn, training state and slots stay all the time, and the lanes'
  weights only while they sample (``Engine.release_weights``); in a run with adapters the lanes keep
  the base weights, unless ``engine.keep_base`` is off. Otherwise a lane holds old and new weights
  together for a while.

  Args:
    experiment: validated.
    plans: by "update", "score", "cast", "publish", "decode" and "extend N"; some may be missing.
    lane: None leaves out what lanes keep.
  """
  apart = bool(experiment.devices.training or experiment.devices.rollout)
  in_turn = experiment.samples_in_turn
  trains = next((p.parts for n, p in plans.items() if n == "update"), {})
  staying = {name: size for name, size in trains.items() if name in _STAYING}
  kept = {} if lane is None else {"cache": lane.state, "parked contexts, at most": lane.parked}
  weights = {} if lane is None else {"lane's weights": lane.weights}
  if not in_turn and experiment.lora is None and lane is not None:
    weights = {"lane's weights, old and new": 2 * lane.weights}
  held = {} if apart or in_turn else weights
  found = []
  for name, plan in plans.items():
    own = {part: size for part, size in plan.parts.items() if part not in (*_STAYING, *kept)}
    if name == "decode" or name.startswith("extend"):
      parts = ({} if apart else staying) | weights | kept
    elif apart:
      parts = staying | own
    else:
      # Adapters are sent behind the weights below them.
      parts = staying | (weights if name.endswith(" adapters") else held) | kept | own
    found.append(Phase(name, parts | {"temporaries": plan.temporary}))
  return found


@dataclasses.dataclass(frozen=True)
class StepCost:
  """Seconds of a step on the devices, by program.

  Attributes:
    least: at the chip's peak rates: the longest of products, traffic and receiving from other
      devices, as if all three ran at the same time.
    estimated: the compiler's cycles, and after them what is received.
    runs: how often each program runs; for update and score, the micro-batches.
    sampled: tokens that all lanes sample.
    chips: number that is paid for.
  """

  least: Mapping[str, float]
  estimated: Mapping[str, float]
  runs: Mapping[str, float]
  sampled: int
  chips: int

  @property
  def seconds(self) -> tuple[float, float]:
    """Seconds of a whole step: least and estimated."""
    return sum(self.least.values()), sum(self.estimated.values())

  def price(self, chip_hour: float) -> tuple[float, float]:
    """Price of a step, least and estimated, by the price of a chip-hour."""
    least, estimated = (s / 3600 * self.chips * chip_hour for s in self.seconds)
    return least, estimated


def least_seconds(cost: ProgramCost, chip: Chip) -> float:
  """A program's time at the chip's peak rates."""
  received = sum(cost.collective_bytes.values())
  return max(
    cost.flops / chip.flops, cost.hbm_bytes / chip.hbm_bandwidth, received / chip.link_bandwidth
  )


def estimated_seconds(cost: ProgramCost, chip: Chip) -> float:
  """A program's time by the compiler's cycles, with collectives at the links' peak rate."""
  received = sum(cost.collective_bytes.values())
  return cost.cycles / chip.clock + received / chip.link_bandwidth


def step_cost(
  experiment: Experiment, plans: Mapping[str, Plan], lanes: int, devices: int, chip: Chip
) -> StepCost:
  """Cost of a step whose episodes are as long as the config allows.

  An episode has ``rollout.max_total_tokens`` tokens. It samples at most
  ``max_turns * max_tokens_per_turn`` of them and takes in the others; nothing is shared in a group.
  While it samples, a context is half full. Tools, worlds and the host cost nothing, lanes idle only
  in a last wave of episodes, and rows are packed full.

  Args:
    experiment: validated.
    plans: as in ``phases``; what is missing costs nothing.
    lanes: of all processes.
    devices: all of them.
    chip: what they are.
  """
  rollout, stage, engine = experiment.rollout, experiment.rl, experiment.engine
  total = min(rollout.max_total_tokens, engine.max_length)
  episodes = stage.tasks_per_step * rollout.group_size
  sampled = min(rollout.max_turns * rollout.max_tokens_per_turn, total - 1)
  slots = engine.slots // engine.lanes
  share = math.ceil(episodes / lanes)
  bucket, rows = engine.extend_buckets[-1], engine.extend_rows[-1]
  tokens = math.ceil(episodes / stage.minibatches) * total
  runs: dict[str, float] = {
    "decode": math.ceil(share / slots) * math.ceil(sampled / engine.chunk_tokens),
    f"extend {bucket}": math.ceil(share * (total - sampled) / (bucket * rows)),
    "cast": experiment.lora is None or experiment.samples_in_turn,
    "publish": experiment.lora is None or experiment.samples_in_turn,
    "cast adapters": 1,
    "publish adapters": 1,
  }
  updates = stage.minibatches * stage.epochs
  scorings = (stage.old_log_probs == "recomputed") + stage.objective.needs_reference
  least, estimated, counts = {}, {}, {}
  for name, plan in plans.items():
    if name in ("update", "score"):
      times: float = updates if name == "update" else scorings * stage.minibatches
      trips = math.ceil(tokens / stage.row_length / plan.rows)
      counts[name] = times * trips
    else:
      times, trips = runs.get(name, 0), math.ceil(total / 2 / CACHE_BLOCK)
      counts[name] = times
    cost = plan.cost(trips)
    if cost is not None and times:
      least[name] = times * least_seconds(cost, chip)
      estimated[name] = times * estimated_seconds(cost, chip)
  return StepCost(least, estimated, counts, episodes * sampled, devices // chip.a_chip)
