"""TPU generations: names, memory and peak rates.

From cloud.google.com/tpu/docs/v5e (197 TFLOP/s, 16 GB, 819 GB/s, 400 GB/s between chips) and
cloud.google.com/tpu/docs/tpu7x, whose table has v5p (459, 95 GiB, 2765, 1200), v6e (918, 32 GiB,
1638, 800) and TPU7x (2307, 192 GiB, 7380, 1200). Memory is what the compiler gives to a program.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from agentjax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device as jax counts them.

  Attributes:
    hbm_bytes: memory that the compiler gives to a program.
    flops: peak bfloat16 products and sums a second.
    hbm_bandwidth: bytes a second.
    link_bandwidth: bytes a second that it receives from other chips, over all links: half of what
      is published, which counts both directions.
    clock: cycles a second, by which the compiler's cycle counts become seconds. Ours: peak rate
      over the multiply-adds that its matrix units do in a cycle.
    smallest: the topology a bare name stands for.
    a_chip: devices of a chip; prices are those of chips.
  """

  hbm_bytes: int
  flops: float
  hbm_bandwidth: float
  link_bandwidth: float
  clock: float
  smallest: str
  a_chip: int = 1


_GIB = 2**30
CHIPS: Mapping[str, Chip] = {
  "v5e": Chip(int(15.75 * _GIB), 197e12, 819e9, 200e9, 1.5e9, "2x4"),
  "v5p": Chip(int(95.74 * _GIB), 459e12, 2765e9, 600e9, 1.75e9, "2x2x1"),
  "v6e": Chip(int(31.25 * _GIB), 918e12, 1638e9, 400e9, 1.75e9, "2x4"),
  "tpu7x": Chip(int(94.75 * _GIB), 1153e12, 3690e9, 300e9, 2.2e9, "2x2x1", 2),
}


# Parts of a pod with the wiring of a lane of neighbours, the smallest first.
_PARTS = {
  2: ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
  3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}


def parts_of(topology: str) -> tuple[str, ...]:
  """Smaller topologies of the same chip, the smallest first, and then ``topology`` itself."""
  name, _, shape = topology.partition(":")
  sizes = [int(n) for n in shape.split("x")]
  smaller = [
    part for part in _PARTS[len(sizes)] if math.prod(map(int, part.split("x"))) < math.prod(sizes)
  ]
  return (*(f"{name}:{part}" for part in smaller), topology)


def parse_topology(text: str) -> tuple[str, Chip]:
  """``"v5p:8x8x8"`` as libtpu spells it, and its chip; a bare name is the chip's smallest topology.

  Raises:
    ConfigError: another spelling or an unknown chip.
  """
  name, _, shape = text.partition(":")
  if name not in CHIPS or (shape and not re.fullmatch(r"\d+(x\d+){1,2}", shape)):
    raise ConfigError(
      f"--topology={text!r}; allowed: {', '.join(CHIPS)}, each with an optional shape, "
      "as in v5e:16x16 or v5p:8x8x8."
    )
  chip = CHIPS[name]
  return f"{name}:{shape or chip.smallest}", chip
