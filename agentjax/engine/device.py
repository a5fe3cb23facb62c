"""What one lane has on its devices, and the programs that work on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.engine.home import Home, readable
from agentjax.engine.programs import Programs
from agentjax.engine.publish import Weights
from agentjax.engine.request import Chunk, DecodePlan, EngineError


class LaneDevice:
  """The slots of a lane on its devices. Every call dispatches programs and waits for none.

  What it takes and gives are arrays of the host, or of the devices where it gave them before.

  Args:
    programs: of the lane.
    home: its devices.

  Attributes:
    state: all that the slots and pages hold.
    weights: those in use.
    dispatches: programs run so far, by name.
    first_dispatch: ``time.perf_counter`` of the first of them since it was last None.
  """

  def __init__(self, programs: Programs, home: Home) -> None:
    self.programs, self.home = programs, home
    self.weights: Weights | None = None
    self.dispatches = dict.fromkeys(self.executables(), 0)
    self.first_dispatch: float | None = None
    with jax.default_device(home.local_devices[0]):
      self.state = programs.initial()
      if home.mesh is None:
        self.state = home.put(self.state)
    self._fillers: list[tuple[tuple[Any, ...], ...]] = []
    for layers in programs.layers:
      none = np.zeros(programs.transfer_blocks, np.int32)
      filler = layers.read_blocks(self.state, none)
      self._fillers.append(filler if home.mesh else home.put(filler))

  def executables(self) -> tuple[str, ...]:
    """Names of all compiled programs."""
    moving = (p for each in self.programs.layers for p in (each.copy, each.write, each.read_blocks))
    programs = (*moving, self.programs.decode, *self.programs.extend.values())
    return ("place", "read", *(program.__name__ for program in programs))

  @property
  def in_use(self) -> Weights:
    """The weights in use.

    Raises:
      EngineError: there are none.
    """
    if self.weights is None:
      raise EngineError("no weights yet: call publish(params, version) first.")
    return self.weights

  def use(self, weights: Weights | None) -> None:
    """Switches to published weights; None lets go of those in use."""
    self.weights = weights

  def put(self, tree: Any) -> Any:
    """Arrays of the host, whole on every device."""
    return self.home.put(tree)

  def fetch(self, arrays: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Arrays of the host with what these hold; waits for it."""
    return tuple(np.asarray(v) for v in jax.device_get(readable(arrays)))

  def read(self, slot: int) -> tuple[Any, ...]:
    """The part of a context that lies in its slot."""
    self._count(self.programs.read)
    return self.programs.read(self.state, np.int32(slot))

  def place(self, arrays: Sequence[Any], slots: Sequence[int]) -> None:
    """Puts what ``read`` gave into some slots, at most ``Programs.place_width``."""
    rows = np.zeros(self.programs.place_width, np.int32)
    rows[: len(slots)] = slots
    state = self.home.put(tuple(arrays), self.programs.state_spec)
    self.state = self.programs.place(self.state, state, rows, np.int32(len(slots)))
    self._count(self.programs.place)

  def copy(self, number: int, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies pages of ``Programs.layers[number]`` to others, at most ``Programs.copies``."""
    both = np.zeros((2, self.programs.copies), np.int32)
    for i, pair in enumerate(pairs):
      both[:, i] = pair
    layers = self.programs.layers[number]
    self.state = layers.copy(self.state, *both, np.int32(len(pairs)))
    self._count(layers.copy)

  def write(self, number: int, pairs: Sequence[tuple[Any, int]]) -> None:
    """Writes what ``read_pages`` gave into pages, at most ``Programs.transfer_blocks``."""
    layers = self.programs.layers[number]
    targets = np.zeros(self.programs.transfer_blocks, np.int32)
    targets[: len(pairs)] = [page for _, page in pairs]
    blocks = [tuple(arrays) for arrays, _ in pairs]
    blocks = self.home.put(blocks, [layers.block_spec] * len(blocks))
    filled = (*blocks, *self._fillers[number][len(blocks) :])
    self.state = layers.write(self.state, filled, targets, np.int32(len(pairs)))
    self._count(layers.write)

  def read_pages(self, number: int, pages: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
    """Contents of ``Programs.transfer_blocks`` pages, the first of which are ``pages``."""
    layers = self.programs.layers[number]
    wanted = np.zeros(self.programs.transfer_blocks, np.int32)
    wanted[: len(pages)] = pages
    self._count(layers.read_blocks)
    return layers.read_blocks(self.state, wanted)

  def extend(self, tokens: int, given: Sequence[np.ndarray | None]) -> Any:
    """Runs ``Programs.extend[tokens]``; gives what the routers chose, where recorded."""
    program = self.programs.extend[tokens]
    self.state, experts = program(self.state, self.in_use.params, *given)
    self._count(program)
    return experts

  def decode(self, plan: DecodePlan) -> Chunk:
    """Runs ``Programs.decode``."""
    self.state, chunk = self.programs.decode(self.state, self.in_use.params, plan)
    self._count(self.programs.decode)
    return chunk

  def _count(self, program: Any) -> None:
    self.dispatches[program.__name__] += 1
    self.first_dispatch = self.first_dispatch or time.perf_counter()
