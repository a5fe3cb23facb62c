"""Arguments of attention over packets, their bytes and FLOPs, for tests and ``gpu_suite``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_packet import PageTable, Rotary, packet_attention
from pallas_kernels.kv_packet.shapes import CHECKED, TIMED, Shape


@dataclasses.dataclass(frozen=True)
class Case:
  """One call: sizes, dtype of all arrays."""

  name: str
  shape: Shape
  dtype: str

  @property
  def pools(self) -> str:
    return self.dtype

  def call(self, implementation: str | None) -> Callable[..., jax.Array]:
    return functools.partial(
      packet_attention,
      scale=self.shape.width**-0.5,
      rotary=rotary_of(self.shape),
      window=self.shape.window,
      value_dim=self.shape.value_dim if self.shape.latent else None,
      implementation=implementation,
    )

  def draw(self) -> dict[str, Any]:
    return draw(self.shape, self.dtype)


def checked(tiny: bool) -> list[Case]:
  """Every size that the tests check; ``tiny`` a few of them."""
  shapes = {k: v for k, v in CHECKED.items() if not tiny or k in ("a step", "a step of a group")}
  return [Case(k, v, dtype) for k, v in shapes.items() for dtype in ("float32", "bfloat16")]


def timed(tiny: bool) -> list[Case]:
  """What is timed."""
  shapes = {name: CHECKED["a step"] if tiny else shape for name, shape in TIMED.items()}
  return [Case(name, shape, "float32" if tiny else "bfloat16") for name, shape in shapes.items()]


def work(case: Case, arguments: Mapping[str, Any]) -> tuple[float, float]:
  """Bytes that must move, of shared packets once a group, and FLOPs of the formula."""
  shape, size = case.shape, jnp.dtype(case.dtype).itemsize
  total, counts = sum(shape.packets), np.asarray(arguments["counts"], np.int64)
  tails = np.asarray(arguments["starts"], np.int64) - total + counts
  held = total * (shape.groups or shape.rows) + int(np.sum(tails[counts > 0]))
  both = shape.width + shape.value_dim
  token = shape.kv_heads * (shape.width if shape.latent else both) * size
  queries = int(np.sum(counts)) * shape.heads * both * size
  seen = np.sum(counts * (total + tails) - counts * (counts - 1) // 2)
  return float(held * token + queries), 2.0 * shape.heads * both * float(seen)


def rotary_of(shape: Shape) -> Rotary | None:
  if not shape.turned:
    return None
  frequencies = 50.0 ** (-np.arange(shape.turned // 2) / (shape.turned // 2))
  return Rotary(frequencies.astype(np.float32), shape.first, shape.interleaved)


def pages_of(shape: Shape) -> int:
  return sum(-(-n // shape.page) for n in shape.packets)


def draw(shape: Shape, dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
  """Named arguments. Packets of a group have pages of their own; tails hold fewer tokens or none.

  A packet's keys are those of positions from 0 on.
  """
  rng = np.random.default_rng(seed)
  owners = shape.groups or shape.rows
  used, tail = pages_of(shape), -(-shape.tail // shape.page)
  number = owners * used + shape.rows * tail + 2
  order = rng.permutation(number)
  total = sum(shape.packets)

  def normal(*sizes: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=sizes), dtype)

  firsts, valid, turns, start = [], [], [], 0
  for length in shape.packets:
    for at in range(0, length, shape.page):
      firsts.append(start + at)
      valid.append(min(shape.page, length - at))
      turns.append(start)
    start += length

  def table(pages, *columns) -> PageTable:
    same = (np.broadcast_to(np.array(c), pages.shape) for c in columns)
    return PageTable(*(jnp.asarray(v, jnp.int32) for v in (pages, *same)))

  packets = table(order[: owners * used].reshape(owners, used), firsts, valid, turns)
  at = total + np.arange(tail) * shape.page
  tails = order[owners * used : owners * used + shape.rows * tail].reshape(shape.rows, tail)
  behind = table(tails, at, [shape.page] * tail, [0] * tail)
  if not shape.groups:
    behind = PageTable(*(jnp.concatenate(v, axis=1) for v in zip(packets, behind, strict=True)))
  room = shape.tail - shape.time
  ahead = [room, 0, room // 2, min(3, room)]
  counts = [shape.time, shape.time, 0, max(shape.time - 2, 1)]
  arguments = {
    "query": normal(shape.rows, shape.time, shape.heads, shape.width),
    "keys": normal(number, shape.kv_heads, shape.page, shape.width),
    "values": normal(number, shape.kv_heads, shape.page, shape.value_dim),
    "table": behind,
    "starts": jnp.asarray([total + ahead[r % 4] for r in range(shape.rows)], jnp.int32),
    "counts": jnp.asarray([counts[r % 4] for r in range(shape.rows)], jnp.int32),
  }
  if shape.groups:
    arguments["shared"] = packets
  if shape.latent:
    arguments["values"] = None
  return arguments
