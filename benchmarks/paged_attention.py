r"""Speed of paged attention on this machine: decoding, a prefill, pools of 8 bits.

  python benchmarks/paged_attention.py [--tiny] [--implementations=xla,pallas_gpu] [--repeats=11]

Rows hold from half of their pages to all of them, which lie in random order. Implementations take
turns; a time is the median of calls that are waited for, on a CPU in CPU seconds. Tokens are those
of the queries. Bytes are what has to be read and written at least: keys, values and scales that a
query sees, queries and results. Beside them stands the share of the rate at which a large array is
read and written. On a CPU the cache of slots that ``attend_cache`` reads takes turns with pages.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention, quantize_tokens
from pallas_kernels.paged_attention.shapes import CHECKED, TIMED, TIMED_ON_CPU, Shape

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Case:
  """One call: sizes, dtype of queries, dtype of the pools where they are quantised."""

  name: str
  shape: Shape
  dtype: str
  quantised: str | None = None

  @property
  def pools(self) -> str:
    return self.quantised or self.dtype

  def call(self, implementation: str | None) -> Callable[..., Array]:
    return functools.partial(
      paged_attention,
      scale=self.shape.width**-0.5,
      window=self.shape.window,
      value_dim=self.shape.value_dim if self.shape.latent else None,
      implementation=implementation,
    )

  def draw(self) -> dict[str, Array | None]:
    return draw(self)


def checked(tiny: bool) -> list[Case]:
  """Every size that the tests check, in float32, bfloat16 and 8 bits; ``tiny`` a few of them."""
  shapes = {k: v for k, v in CHECKED.items() if not tiny or k in ("a step", "latent")}
  kinds = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"))
  return [Case(k, v, *kind) for k, v in shapes.items() for kind in kinds]


def timed(tiny: bool) -> list[Case]:
  """What is timed; ``tiny`` sizes are those that tests check."""
  on_cpu = jax.default_backend() == "cpu"
  shapes = TIMED_ON_CPU if on_cpu else TIMED
  if tiny:
    shapes = {name: CHECKED["a step"] for name in shapes}
  dtypes = ("float32",) if on_cpu else ("bfloat16", "float32")
  found = [Case(name, shape, dtype) for name, shape in shapes.items() for dtype in dtypes]
  return [*found, Case("decode, int8", shapes["decode"], dtypes[0], "int8")]


def draw(case: Case) -> dict[str, Array | None]:
  """Named arguments; places of pages are random."""
  shape, rng = case.shape, np.random.default_rng(0)
  number = shape.rows * shape.pages
  lead = (number, shape.kv_heads, shape.page)
  keys = iter(jax.random.split(jax.random.key(0), 3))
  room = shape.pages * shape.page - shape.time
  made: dict[str, Array | None] = {
    "query": jax.random.normal(
      next(keys), (shape.rows, shape.time, shape.heads, shape.width), case.dtype
    ),
    "keys": jax.random.normal(next(keys), (*lead, shape.width), case.dtype),
    "values": None,
    "page_table": jnp.asarray(rng.permutation(number).reshape(shape.rows, -1), jnp.int32),
    "starts": jnp.asarray(np.linspace(room // 2, room, shape.rows), jnp.int32),
    "counts": jnp.full(shape.rows, shape.time, jnp.int32),
  }
  if not shape.latent:
    made["values"] = jax.random.normal(next(keys), (*lead, shape.value_dim), case.dtype)
  if case.quantised is not None:
    for name in ("key", "value"):
      pool = made[f"{name}s"]
      if pool is not None:
        made[f"{name}s"], made[f"{name}_scales"] = quantize_tokens(pool, case.quantised)
  return made


def work(case: Case, arguments: Mapping[str, Any]) -> tuple[float, float]:
  """Bytes that must move and FLOPs of the formula."""
  shape = case.shape
  starts = np.asarray(arguments["starts"], np.int64)[:, None]
  at = starts + np.arange(shape.time)
  back = at + 1 if shape.window is None else np.minimum(at + 1, shape.window)
  held = np.sum(at[:, -1] + 1 - np.maximum(at[:, 0] + 1 - back[:, 0], 0))
  pools = [shape.width] if shape.latent else [shape.width, shape.value_dim]
  scale = 4 * len(pools) if case.quantised else 0
  token = shape.kv_heads * (sum(pools) * jnp.dtype(case.pools).itemsize + scale)
  both = shape.width + shape.value_dim
  queries = shape.rows * shape.time * shape.heads * both * jnp.dtype(case.dtype).itemsize
  return float(held * token + queries), 2.0 * shape.heads * both * float(np.sum(back))


def dense_call(case: Case, arguments: Mapping[str, Any]) -> Callable[[], Array]:
  """The same over a cache of slots."""
  from agentjax.models.attend import attend_cache

  def slots(pool: Array) -> Array:
    held = jnp.swapaxes(pool[arguments["page_table"]], 1, 2)
    return held.reshape(*held.shape[:2], -1, held.shape[-1])

  read = jax.jit(functools.partial(attend_cache, scale=case.shape.width**-0.5))
  keys = slots(arguments["keys"])
  values = keys if case.shape.latent else slots(arguments["values"])
  positions = arguments["starts"][:, None] + jnp.arange(case.shape.time)
  width = case.shape.value_dim
  return lambda: read(arguments["query"], keys, values, positions=positions)[..., :width]


def medians(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
  """Seconds of calls that take turns; the first one of each compiles."""
  clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for turn in range(repeats + 1):
    for name, call in calls.items():
      begin = clock()
      jax.block_until_ready(call())
      if turn:
        seconds[name].append(clock() - begin)
  return {name: statistics.median(v) for name, v in seconds.items()}


def copy_rate(tiny: bool, repeats: int) -> float:
  """Bytes a second, read and written, of 2 GiB that are changed in place (of 64 MiB on a CPU)."""
  number = 1 << (16 if tiny else 24 if jax.default_backend() == "cpu" else 29)
  held = [jnp.arange(number, dtype=jnp.float32)]
  add = jax.jit(lambda v: v + 1, donate_argnums=0)

  def step() -> Array:
    held[0] = add(held[0])
    return held[0]

  return 8.0 * number / medians({"copy": step}, repeats)["copy"]


def main(argv: list[str], settings: flags.FlagValues) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments: {argv[1:]}")
  backend = jax.default_backend()
  names = settings.implementations or [
    n for n in IMPLEMENTATIONS if n == "xla" or n == f"pallas_{backend}"
  ]
  rate = copy_rate(settings.tiny, settings.repeats)
  print(f"{jax.devices()[0].device_kind}, a copy moves {rate / 1e9:.1f} GB/s\n")
  print("| case | pools | implementation | ms | tokens/s | GB/s | of a copy's rate |")
  print("|---" * 7 + "|")
  for case in timed(settings.tiny):
    arguments = case.draw()
    calls: dict[str, Callable[[], Any]] = {
      name: functools.partial(jax.jit(case.call(name)), **arguments) for name in names
    }
    if backend == "cpu" and case.quantised is None:
      calls["dense cache"] = dense_call(case, arguments)
    moved, _ = work(case, arguments)
    tokens = case.shape.rows * case.shape.time
    for name, seconds in medians(calls, settings.repeats).items():
      print(
        f"| {case.name} | {case.pools} | {name} | {1e3 * seconds:.2f} | {tokens / seconds:,.0f} |"
        f" {moved / seconds / 1e9:.2f} | {moved / seconds / rate:.0%} |",
        flush=True,
      )


if __name__ == "__main__":
  flags.DEFINE_bool("tiny", False, "Small sizes, times without meaning.")
  flags.DEFINE_integer("repeats", 11, "Timed calls of each function.", lower_bound=1)
  flags.DEFINE_list("implementations", [], "Names; xla and this backend's kernel by default.")
  app.run(functools.partial(main, settings=flags.FLAGS))
