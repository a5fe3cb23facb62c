r"""Correctness and speed of the GPU kernels and of a small model on this machine's GPU.

  benchmarks/gpu_suite.sh [--tiny] [--repeats=20] [--parts=checks ...]

Every kernel of ``pallas_kernels`` is run in each implementation for GPUs and in XLA's, and compared
with the token loop in float64 on the CPU: values and every gradient, over packed sequences, as the
largest error over the largest value. A speed is the median of repeated calls that are waited for;
beside it stand the bytes that must move at least and the FLOPs of the formula, and the share of the
time that either would take at the rates of a copy and of a matrix product measured just before.
Where torch and mamba_ssm (or causal_conv1d) can be imported, their kernels are timed too. Attention
over pages has no gradient; its cases are in ``paged_attention.py`` and ``packet_attention.py``.

Then whole GRPO steps with random weights, on Qwen3-0.6B and on a Nemotron-H-like model of 1B:
prompts taken in, tokens sampled, weights published, the update. Of sampling, the bytes are the
weights, states, keys and values that its steps must read; of the update, FLOPs are 6 a parameter
and token. Each runs with XLA alone and with the kernels for GPUs, and Qwen3 again with keys, values
and weights in int8; ``mismatch`` is the largest difference between the log-probs of sampler and
trainer.

``--tiny`` is for a CPU: small sizes, the Pallas kernels interpreted, times without meaning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import pkgutil
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packet_attention
import paged_attention
from absl import app, flags
from grpo_step import GrpoSteps, StepSizes, StepTimes

import pallas_kernels
from agentjax import models
from agentjax.models.attend import attend

_TINY = flags.DEFINE_bool("tiny", False, "Small sizes on a CPU; the Pallas kernels interpreted.")
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls of each function.", lower_bound=1)
PARTS = ("checks", "kernels", "model", "steps")
_PARTS = flags.DEFINE_multi_enum("parts", PARTS, PARTS, "What to run; the flag may be repeated.")

Array = jax.Array
Arguments = dict[str, np.ndarray]

# Largest error over the largest value of an array.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
# Of a model's loss and gradients in float32 on two devices, after some ten layers.
MODEL_TOLERANCE = 1e-4
# Kernels that read pages: no gradient, and cases of their own.
PAGED = {"paged_attention": paged_attention, "kv_packet": packet_attention}
# Of timed calls, after which no more of one function are made: the suite ends within ten minutes.
SECONDS = 2.0
# Tokens a chunk in the count of FLOPs of the chunked form, for every implementation alike.
CHUNK = 64


@dataclasses.dataclass
class Row:
  """One line of the report; what does not apply is None."""

  what: str
  sizes: str
  dtype: str
  run: str  # "forward", "gradient" (which includes a forward pass), "check", ...
  implementation: str
  error: float | None = None
  milliseconds: float | None = None
  gigabytes: float | None = None
  gigaflops: float | None = None
  share: float | None = None  # of the roofline
  note: str = ""
  ok: bool = True

  def markdown(self) -> str:
    def number(value: float | None, form: str) -> str:
      return "" if value is None else format(value, form)

    per_second = [None, None]
    if self.milliseconds:
      per_second = [
        None if v is None else v / self.milliseconds for v in (self.gigabytes, self.gigaflops)
      ]
    cells = [
      self.what,
      self.sizes,
      self.dtype,
      self.run,
      self.implementation,
      number(self.error, ".1e"),
      number(self.milliseconds, ".3f"),
      number(self.gigabytes, ".3f"),
      number(self.gigaflops, ".1f"),
      number(per_second[0], ".2f"),
      number(per_second[1], ".1f"),
      number(self.share, ".0%"),
      ("" if self.ok else "WRONG ") + self.note,
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
  "| what | sizes | dtype | run | implementation | error | ms | GB | GFLOP | TB/s | TFLOP/s |"
  " of roofline | note |\n" + "|---" * 13 + "|"
)


class Report:
  """Rows, printed and written as they come: a run that is cut off has said what it found."""

  def __init__(self) -> None:
    self.rows: list[Row] = []
    self._started = time.perf_counter()

  def add(self, row: Row) -> None:
    self.rows.append(row)
    print(row.markdown(), flush=True)
    if "OUT" in os.environ:
      self._write(pathlib.Path(os.environ["OUT"]) / "gpu_suite.json")

  def _write(self, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
      "device": jax.devices()[0].device_kind,
      "jax": jax.__version__,
      "seconds": time.perf_counter() - self._started,
    }
    rows = [dataclasses.asdict(row) for row in self.rows]
    path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class Work:
  """What one call must move and compute at least."""

  bytes: float
  flops: float


@dataclasses.dataclass(frozen=True)
class Rates:
  """Measured ceilings of the device."""

  bytes: float  # a second, read and written, of a large copy
  flops: dict[str, float]  # a second, of a large matrix product

  def share(self, work: Work, dtype: str, seconds: float) -> float:
    return max(work.bytes / self.bytes, work.flops / self.flops[dtype]) / seconds


@dataclasses.dataclass(frozen=True)
class Kernel:
  """How a kernel is called, checked and counted; a draw gives its named arguments."""

  draw: Callable[[tuple[int, ...], np.random.Generator], Arguments]
  narrow: tuple[str, ...]  # arguments in the compute dtype; the others are float32
  checked: tuple[int, ...]
  timed: dict[str, tuple[int, ...]]
  work: Callable[[tuple[int, ...], int], tuple[Work, Work]]  # forward; forward and backward
  on_tensor_cores: bool
  peer_package: str
  peer: Callable[[dict[str, Any]], Callable[[], Any]]  # of torch tensors
  options: dict[str, Any]


def draw_ssd(sizes: tuple[int, ...], rng: np.random.Generator) -> Arguments:
  batch, length, heads, width, groups, state = sizes
  return {
    "x": rng.normal(size=(batch, length, heads, width)),
    "dt": np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (batch, length, heads))),
    "a": -rng.uniform(1, 16, heads),
    "b": rng.normal(size=(batch, length, groups, state)),
    "c": rng.normal(size=(batch, length, groups, state)),
    "d": rng.normal(size=heads),
    "initial_state": rng.normal(size=(batch, heads, width, state)),
  }


def work_of_ssd(sizes: tuple[int, ...], itemsize: int) -> tuple[Work, Work]:
  batch, length, heads, width, groups, state = sizes
  tokens = batch * length
  x, maps, steps = (tokens * n for n in (heads * width, groups * state, heads))
  ends = 2 * 4 * batch * heads * width * state
  forward = Work(
    itemsize * (2 * x + 2 * maps) + 4 * steps + ends,
    2 * tokens * (groups * CHUNK * state + heads * width * (CHUNK + 2 * state)),
  )
  backward = Work(
    itemsize * (3 * x + 4 * maps) + 8 * steps + ends,
    2 * tokens * (3 * groups * CHUNK * state + heads * width * (2 * CHUNK + 5 * state)),
  )
  return forward, Work(forward.bytes + backward.bytes, forward.flops + backward.flops)


def peer_ssd(arguments: dict[str, Any]) -> Callable[[], Any]:
  from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

  a = arguments

  def call():
    return mamba_chunk_scan_combined(
      a["x"], a["dt"], a["a"], a["b"], a["c"], 256, D=a["d"], initial_states=a["initial_state"]
    )

  return call


def draw_selective_scan(sizes: tuple[int, ...], rng: np.random.Generator) -> Arguments:
  batch, length, channels, groups, state = sizes
  return {
    "x": rng.normal(size=(batch, length, channels)),
    "dt": np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (batch, length, channels))),
    "a": -np.broadcast_to(np.arange(1.0, state + 1), (channels, state)).copy(),
    "b": rng.normal(size=(batch, length, groups, state)),
    "c": rng.normal(size=(batch, length, groups, state)),
    "d": rng.normal(size=channels),
    "initial_state": rng.normal(size=(batch, channels, state)),
  }


def work_of_selective_scan(sizes: tuple[int, ...], itemsize: int) -> tuple[Work, Work]:
  batch, length, channels, groups, state = sizes
  tokens = batch * length
  x, maps = tokens * channels, tokens * groups * state
  ends = 2 * 4 * batch * channels * state
  # An update of a state entry and its share of y take 6 operations and an exponential.
  forward = Work(itemsize * (2 * x + 2 * maps) + 4 * x + ends, 7 * x * state)
  backward = Work(itemsize * (3 * x + 4 * maps) + 8 * x + ends, 19 * x * state)
  return forward, Work(forward.bytes + backward.bytes, forward.flops + backward.flops)


def peer_selective_scan(arguments: dict[str, Any]) -> Callable[[], Any]:
  from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

  a = arguments
  last = {k: a[k].transpose(1, 2).contiguous() for k in ("x", "dt")}
  maps = {k: a[k].permute(0, 2, 3, 1).contiguous() for k in ("b", "c")}

  def call():
    return selective_scan_fn(
      last["x"], last["dt"].to(last["x"].dtype), a["a"], maps["b"], maps["c"], a["d"]
    )

  return call


def draw_causal_conv1d(sizes: tuple[int, ...], rng: np.random.Generator) -> Arguments:
  batch, length, channels, taps = sizes
  return {
    "x": rng.normal(size=(batch, length, channels)),
    "w": rng.normal(size=(taps, channels)),
    "bias": rng.normal(size=channels),
    "initial_tail": rng.normal(size=(batch, taps - 1, channels)),
  }


def work_of_causal_conv1d(sizes: tuple[int, ...], itemsize: int) -> tuple[Work, Work]:
  batch, length, channels, taps = sizes
  x = batch * length * channels
  return Work(2 * itemsize * x, 2 * taps * x), Work(5 * itemsize * x, 8 * taps * x)


def peer_causal_conv1d(arguments: dict[str, Any]) -> Callable[[], Any]:
  from causal_conv1d import causal_conv1d_fn

  x = arguments["x"].transpose(1, 2)
  w, bias = (arguments[k].to(x.dtype) for k in ("w", "bias"))
  w = w.T.contiguous()
  return lambda: causal_conv1d_fn(x, w, bias, activation="silu")


def kernels(tiny: bool) -> dict[str, Kernel]:
  """By the name of the folder in ``pallas_kernels``."""
  return {
    "ssd": Kernel(
      draw=draw_ssd,
      narrow=("x", "b", "c"),
      checked=(1, 20, 2, 4, 1, 4) if tiny else (2, 300, 16, 64, 2, 128),
      timed={"tiny": (1, 20, 2, 4, 1, 4)}
      if tiny
      else {
        "Nano": (1, 8192, 64, 64, 8, 128),
        "Nano, 8 rows": (8, 4096, 64, 64, 8, 128),
        "Super, long": (1, 32768, 128, 64, 8, 128),
      },
      work=work_of_ssd,
      on_tensor_cores=True,
      options={"chunk_size": 16 if tiny else 128},
      peer_package="mamba_ssm",
      peer=peer_ssd,
    ),
    "selective_scan": Kernel(
      draw=draw_selective_scan,
      narrow=("x", "b", "c"),
      checked=(1, 20, 4, 1, 4) if tiny else (2, 300, 256, 1, 16),
      timed={"tiny": (1, 20, 4, 1, 4)}
      if tiny
      else {"Mamba 2.8B": (1, 8192, 5120, 1, 16), "Mamba 2.8B, 8 rows": (8, 2048, 5120, 1, 16)},
      work=work_of_selective_scan,
      on_tensor_cores=False,
      options={"chunk_size": 8 if tiny else 64},
      peer_package="mamba_ssm",
      peer=peer_selective_scan,
    ),
    "causal_conv1d": Kernel(
      draw=draw_causal_conv1d,
      narrow=("x", "initial_tail"),
      checked=(1, 20, 4, 4) if tiny else (2, 300, 256, 4),
      timed={"tiny": (1, 20, 4, 4)}
      if tiny
      else {"Nano": (1, 8192, 6144, 4), "Nano, 8 rows": (8, 4096, 6144, 4)},
      work=work_of_causal_conv1d,
      on_tensor_cores=False,
      options={"activation": "silu"},
      peer_package="causal_conv1d",
      peer=peer_causal_conv1d,
    ),
  }


def folders() -> Iterator[tuple[str, Any]]:
  """Kernels of ``pallas_kernels`` with their modules, as they are there now."""
  for found in pkgutil.iter_modules(pallas_kernels.__path__):
    if found.ispkg:
      module = importlib.import_module(f"pallas_kernels.{found.name}")
      if hasattr(module, "IMPLEMENTATIONS"):
        yield found.name, module


def implementations(module: Any) -> list[str]:
  """XLA's first, then all that are made for GPUs."""
  return ["xla", *(name for name in module.IMPLEMENTATIONS if name.endswith("_gpu"))]


def cast(arguments: Arguments, kernel: Kernel, dtype: str) -> dict[str, np.ndarray]:
  return {
    k: v.astype(jnp.dtype(dtype) if k in kernel.narrow else np.float32)
    for k, v in arguments.items()
  }


def packed_ids(batch: int, length: int) -> np.ndarray:
  """Sequences that end inside chunks and on their edges, and padding."""
  place = np.arange(length)
  ids = np.searchsorted([1, 16, 17, 64, 65, 128, 200], place, side="right") + 1
  ids[-3:] = 0
  return np.broadcast_to(ids, (batch, length)).astype(np.int32)


def forward_of(call: Callable[..., Any], kernel: Kernel, name: str) -> Callable[..., Any]:
  """``f(arguments, segment_ids)`` of one implementation."""

  def forward(arguments, segment_ids=None):
    options = {**kernel.options, "segment_ids": segment_ids, "implementation": name}
    return call(**arguments, **options)

  return forward


def gradient_of(forward: Callable[..., Any]) -> Callable[..., Any]:
  """Gradients of a weighted sum of all outputs, and the outputs.

  The weights are whole numbers, so that bfloat16 holds them too.
  """

  def loss(arguments, segment_ids=None):
    outputs = forward(arguments, segment_ids)
    total = 0.0
    for i, out in enumerate(outputs):
      weight = (jnp.arange(out.size) * (7 + i) % 9 - 4).reshape(out.shape).astype(out.dtype)
      total += jnp.sum(out * weight, dtype=jnp.promote_types(out.dtype, jnp.float32))
    return total, outputs

  return jax.grad(loss, has_aux=True)


def truth(call, kernel: Kernel, arguments, segment_ids) -> Any:
  """Gradients and outputs of the token loop in float64 on the CPU."""
  cpu = jax.devices("cpu")[0]
  with jax.enable_x64(True), jax.default_device(cpu):
    wide = {k: jax.device_put(v.astype(np.float64), cpu) for k, v in arguments.items()}
    run = jax.jit(gradient_of(forward_of(call, kernel, "reference")))
    return jax.tree.map(np.asarray, run(wide, jax.device_put(segment_ids, cpu)))


def largest_error(found: Any, expected: Any) -> float:
  """The worst array's largest error, over its largest value."""
  errors = []
  for value, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    value, right = np.asarray(value).astype(np.float64), np.asarray(right)
    worst = np.max(np.abs(value - right))
    errors.append(float(worst / max(np.max(np.abs(right)), 1e-30)) if worst else 0.0)
  # A NaN is the largest error there is.
  return float(np.max(errors))


def check_kernel(report: Report, name: str, module: Any, kernel: Kernel) -> None:
  call, sizes = getattr(module, name), kernel.checked
  arguments = kernel.draw(sizes, np.random.default_rng(0))
  segment_ids = packed_ids(*sizes[:2])
  for dtype, tolerance in TOLERANCES.items():
    given = cast(arguments, kernel, dtype)
    expected = truth(call, kernel, given, segment_ids)
    for implementation in implementations(module):
      row = Row(name, str(sizes), dtype, "check", implementation)
      with recorded(row):
        run = jax.jit(gradient_of(forward_of(call, kernel, implementation)))
        found = run(jax.device_put(given), segment_ids)
        row.error = largest_error(found, expected)
        row.ok = row.error < tolerance
        row.note = f"allowed {tolerance:.0e}"
      report.add(row)


@contextlib.contextmanager
def recorded(row: Row) -> Iterator[None]:
  """Writes a failure into the row and goes on: a GPU is not always at hand."""
  try:
    yield
  except Exception as error:
    traceback.print_exception(error)
    message = f"{type(error).__name__}: {error}"[:200]
    row.ok, row.note = False, message.replace("\n", " ").replace("|", "/")


def median_seconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
  """Of a call that is waited for; the first two compile and warm up, slow ones are timed less."""
  for _ in range(2):
    wait(call())
  times: list[float] = []
  while len(times) < _REPEATS.value and (len(times) < 3 or sum(times) < SECONDS):
    started = time.perf_counter()
    wait(call())
    times.append(time.perf_counter() - started)
  return statistics.median(times)


def time_kernel(report: Report, name: str, module: Any, kernel: Kernel, rates: Rates) -> None:
  call = getattr(module, name)
  for label, sizes in kernel.timed.items():
    arguments = kernel.draw(sizes, np.random.default_rng(0))
    for dtype in ("bfloat16", "float32"):
      given = jax.device_put(cast(arguments, kernel, dtype))
      works = kernel.work(sizes, jnp.dtype(dtype).itemsize)
      # What is not made of matrix products has the rate of float32 at best.
      rated = dtype if kernel.on_tensor_cores else "float32"
      for run, work in zip(("forward", "gradient"), works, strict=True):
        shared = {"gigabytes": work.bytes / 1e9, "gigaflops": work.flops / 1e9}
        for implementation in implementations(module):
          row = Row(name, f"{label} {sizes}", dtype, run, implementation, **shared)
          with recorded(row):
            function = forward_of(call, kernel, implementation)
            function = jax.jit(gradient_of(function) if run == "gradient" else function)
            call_it = functools.partial(function, given)
            seconds = median_seconds(call_it, jax.block_until_ready)
            row.milliseconds = 1e3 * seconds
            row.share = rates.share(work, rated, seconds)
          report.add(row)
        time_peer(report, Row(name, f"{label} {sizes}", dtype, run, "", **shared), kernel, given)


def time_peer(report: Report, row: Row, kernel: Kernel, given: dict[str, Array]) -> None:
  """The CUDA or Triton kernel of the paper's authors, where it is installed."""
  packages = ("torch", kernel.peer_package)
  if any(importlib.util.find_spec(name) is None for name in packages):
    return
  import torch

  row.implementation = kernel.peer_package
  with recorded(row):
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    arguments = {
      k: torch.tensor(np.asarray(v, np.float32), device="cuda").to(dtypes[v.dtype.name])
      for k, v in given.items()
    }
    for value in arguments.values():
      value.requires_grad_(row.run == "gradient")
    call = kernel.peer(arguments)

    def run():
      out = call()
      if row.run == "gradient":
        out.float().sum().backward()

    row.milliseconds = 1e3 * median_seconds(run, lambda _: torch.cuda.synchronize())
  row.ok = True  # what fails there is not wrong here
  report.add(row)


def check_pages(report: Report, name: str, module: Any, tiny: bool) -> None:
  """A kernel that reads pages, against float64."""
  cpu = jax.devices("cpu")[0]
  for case in PAGED[name].checked(tiny):
    given = case.draw()
    with jax.enable_x64(True), jax.default_device(cpu):
      wide = jax.tree.map(functools.partial(_widened, device=cpu), given)
      expected = np.asarray(jax.jit(case.call("reference"))(**wide))
    for implementation in implementations(module):
      row = Row(name, f"{case.name} {tuple(case.shape)}", case.pools, "check", implementation)
      with recorded(row):
        found = jax.jit(case.call(implementation))(**given)
        row.error = largest_error(found, expected)
        row.ok = row.error < TOLERANCES[case.dtype]
        row.note = f"allowed {TOLERANCES[case.dtype]:.0e}"
      report.add(row)


def _widened(value: Array, device: jax.Device) -> Array:
  """Float64 of what the reference multiplies, on the device."""
  array = np.asarray(value)
  narrow = array.dtype.itemsize == 1 or array.dtype == np.int32
  return jax.device_put(array if narrow else array.astype(np.float64), device)


def time_pages(report: Report, name: str, module: Any, tiny: bool, rates: Rates) -> None:
  """Decoding and a prefill over pages; tokens are those of the queries."""
  for case in PAGED[name].timed(tiny):
    arguments, shape = case.draw(), case.shape
    work = Work(*PAGED[name].work(case, arguments))
    for implementation in implementations(module):
      row = Row(
        name,
        f"{case.name} {tuple(shape)}",
        case.pools,
        "forward",
        implementation,
        gigabytes=work.bytes / 1e9,
        gigaflops=work.flops / 1e9,
      )
      with recorded(row):
        call = functools.partial(jax.jit(case.call(implementation)), **arguments)
        seconds = median_seconds(call, jax.block_until_ready)
        row.milliseconds = 1e3 * seconds
        row.share = rates.share(work, case.dtype, seconds)
        row.note = (
          f"{shape.rows * shape.time / seconds:,.0f} tokens/s; "
          f"{work.bytes / rates.bytes / seconds:.0%} of the rate of a copy"
        )
      report.add(row)


def measure_rates(report: Report, tiny: bool) -> Rates:
  def measured(run: str, dtype: str, call: Callable[[Array], Array], given, **work: float) -> float:
    seconds = median_seconds(lambda: call(given), jax.block_until_ready)
    report.add(
      Row("ceiling", str(given.shape), dtype, run, "xla", milliseconds=1e3 * seconds, **work)
    )
    return seconds

  number = 1 << (16 if tiny else 30)
  copied = jnp.arange(number, dtype=jnp.float32)
  moved = 8.0 * number
  seconds = measured("copy", "float32", jax.jit(lambda v: v + 1), copied, gigabytes=moved / 1e9)
  flops = {}
  for dtype, side in (("bfloat16", 8192), ("float32", 4096)):
    side = 64 if tiny else side
    matrix = jax.random.normal(jax.random.key(0), (side, side)).astype(dtype)
    product = jax.jit(functools.partial(_square, precision=_precision(dtype)))
    operations = 2.0 * side**3
    taken = measured("product", dtype, product, matrix, gigaflops=operations / 1e9)
    flops[dtype] = operations / taken
  return Rates(moved / seconds, flops)


def _square(matrix: Array, precision: jax.lax.Precision) -> Array:
  return jnp.matmul(matrix, matrix, precision=precision)


def _precision(dtype: str) -> jax.lax.Precision:
  return jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT


# Rows of more than 16 blocks of queries, and more experts than tokens choose: attention runs in
# tiles, and experts run in sorted blocks.
CHECKED_MODEL = models.ModelConfig(
  vocab_size=41,
  d_model=32,
  pattern="ME*-",
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  attention_block=4,
  d_mlp=40,
  mamba_heads=4,
  mamba_head_dim=8,
  mamba_state=16,
  mamba_groups=2,
  chunk_size=16,
  num_experts=8,
  experts_per_token=2,
  d_expert=16,
  d_shared_expert=16,
  expert_block=8,
)


def check_attention(report: Report, tiny: bool) -> None:
  """Attention of training in bfloat16, values and gradients, against the CPU in float32."""
  cpu, here = jax.devices("cpu")[0], jax.devices()[0]
  batch, length, heads, kv_heads, width = sizes = (1, 64, 2, 1, 16) if tiny else (2, 512, 8, 2, 128)
  rng = np.random.default_rng(0)
  wide = [
    rng.normal(size=(batch, length, number, width)).astype(jnp.bfloat16).astype(np.float32)
    for number in (heads, kv_heads, kv_heads, heads)
  ]
  segments = packed_ids(batch, length)

  def run(kernels: str, dtype: str, device: jax.Device) -> Any:
    def attended(*values: Array) -> Array:
      return attend(*values, segment_ids=segments, scale=width**-0.5, block=64, kernels=kernels) * (
        segments > 0
      )[..., None, None].astype(dtype)

    *values, weights = (jax.device_put(v.astype(dtype), device) for v in wide)
    out, pull = jax.vjp(jax.jit(attended), *values)
    return jax.device_get((out, pull(weights)))

  with jax.default_device(cpu):
    expected = run("xla", "float32", cpu)
  for name in ("xla", "pallas_gpu"):
    row = Row("attention", str(sizes), "bfloat16", "check", name)
    with recorded(row):
      row.error = largest_error(run(name, "bfloat16", here), expected)
      row.ok = row.error < 2 * TOLERANCES["bfloat16"]  # weights are rounded too
      row.note = f"allowed {2 * TOLERANCES['bfloat16']:.0e}; against the CPU"
    report.add(row)


def draw_rows(config: models.ModelConfig, batch: int, length: int) -> tuple[np.ndarray, ...]:
  """Token ids, segment ids and positions of rows that hold two sequences each."""
  ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length), dtype=np.int32)
  first = length * 2 // 3
  place = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
  segments = np.where(place < first, 1, 2).astype(np.int32)
  return ids, segments, np.where(place < first, place, place - first)


def score_loss(params: models.Params, config: models.ModelConfig, rows: Any) -> Array:
  return -jnp.mean(models.score_tokens(params, config, *rows).log_probs)


def check_model(report: Report) -> None:
  """Loss and gradients of a model with all block kinds, here and on the CPU."""
  cpu, here = jax.devices("cpu")[0], jax.devices()[0]
  rows = draw_rows(CHECKED_MODEL, 2, 80)
  loss = jax.jit(jax.value_and_grad(score_loss), static_argnums=1)
  with jax.default_device(cpu):
    params = models.init(CHECKED_MODEL, jax.random.key(0))
    expected = loss(params, dataclasses.replace(CHECKED_MODEL, kernels="xla"), rows)
  for name in ("xla", "pallas_gpu"):
    row = Row("model", CHECKED_MODEL.pattern, "float32", "check", name)
    with recorded(row):
      config = dataclasses.replace(CHECKED_MODEL, kernels=name)
      found = loss(jax.device_put(params, here), config, jax.device_put(rows, here))
      row.error = largest_error(found, jax.tree.map(np.asarray, expected))
      row.ok = row.error < MODEL_TOLERANCE
      row.note = f"allowed {MODEL_TOLERANCE:.0e}; against the CPU"
    report.add(row)


def time_model(report: Report, tiny: bool, rates: Rates) -> None:
  """One step of AdamW on the log-probs of packed rows."""
  config, batch, length = CHECKED_MODEL, 2, 32
  if not tiny:
    batch, length = 8, 4096
    config = models.ModelConfig(
      vocab_size=32768,
      d_model=1024,
      pattern="M-M-M*-M-M-M*-",
      num_heads=16,
      num_kv_heads=4,
      head_dim=64,
      attention_block=512,
      d_mlp=4096,
      mamba_heads=32,
      mamba_head_dim=64,
      mamba_state=128,
      mamba_groups=8,
      chunk_size=128,
      compute_dtype="bfloat16",
      remat="block",
    )
  rows = jax.device_put(draw_rows(config, batch, length))
  optimizer = optax.adamw(1e-4)
  start = models.init(config, jax.random.key(0))
  parameters = models.count(models.param_specs(config))
  work = Work(0.0, 6.0 * parameters * batch * length)

  def step(carry, config):
    params, state = carry
    loss, gradient = jax.value_and_grad(score_loss)(params, config, rows)
    change, state = optimizer.update(gradient, state, params)
    return (optax.apply_updates(params, change), state), loss

  step = jax.jit(step, static_argnums=1)
  for name in ("xla", "pallas_gpu"):
    row = Row(
      "training step",
      f"{parameters / 1e6:.0f}M, {batch} x {length}",
      config.compute_dtype,
      "step",
      name,
      gigaflops=work.flops / 1e9,
    )
    with recorded(row):
      used = dataclasses.replace(config, kernels=name)
      carry = (start, optimizer.init(start))
      seconds = median_seconds(lambda c=carry, u=used: step(c, u), jax.block_until_ready)
      row.milliseconds = 1e3 * seconds
      row.share = rates.share(work, config.compute_dtype, seconds)
      row.note = f"{batch * length / seconds:,.0f} tokens/s; 6 FLOPs a parameter and token"
    report.add(row)


def step_cases(tiny: bool) -> Iterator[tuple[str, models.ModelConfig, StepSizes]]:
  """Policies with the sizes of their steps."""
  if tiny:
    sizes = StepSizes(batch=4, group=2, prompt=16, completion=8)
    qwen3 = dataclasses.replace(CHECKED_MODEL, vocab_size=300, pattern="*-")
    nemotron_h = dataclasses.replace(CHECKED_MODEL, vocab_size=300, pattern="M-*-")
  else:
    sizes = StepSizes(
      batch=128, group=16, prompt=512, completion=512, chunk_tokens=32, extend_rows=8, rows=16
    )
    fast = {"compute_dtype": "bfloat16", "remat": "block", "attention_block": 512}
    qwen3 = dataclasses.replace(models.model_preset("qwen3_0_6b"), **fast)
    nemotron_h = models.ModelConfig(
      vocab_size=32768,
      d_model=2048,
      pattern="M-M-M-M*-" * 3,
      num_heads=16,
      num_kv_heads=8,
      head_dim=128,
      d_mlp=8192,
      mlp_activation="relu2",
      mamba_heads=64,
      mamba_head_dim=64,
      mamba_state=128,
      mamba_groups=8,
      chunk_size=128,
      **fast,
    )
  for kernels in ("xla", "pallas_gpu"):
    yield "GRPO, Qwen3", dataclasses.replace(qwen3, kernels=kernels), sizes
    yield "GRPO, Nemotron-H", dataclasses.replace(nemotron_h, kernels=kernels), sizes
  narrow = dataclasses.replace(sizes, narrow="int8")
  yield "GRPO, Qwen3", dataclasses.replace(qwen3, kernels="pallas_gpu"), narrow


def time_steps(report: Report, tiny: bool, rates: Rates) -> None:
  """Whole steps of reinforcement learning, part by part."""
  for name, config, sizes in step_cases(tiny):
    row = Row(name, _step_sizes(config, sizes), config.compute_dtype, "step", config.kernels or "")
    with recorded(row):
      steps = GrpoSteps(config, sizes)
      try:
        times = list(itertools.islice(steps, 1 if tiny else 3))
        for part in _step_parts(row, steps, times, config, sizes, rates):
          report.add(part)
      finally:
        steps.close()
      seconds = statistics.median(t.publish[0] + t.generate[0] + t.update[0] for t in times)
      row.milliseconds = 1e3 * seconds
      mismatch = max(t.metrics["mismatch/max"] for t in times)
      row.note = f"{sizes.batch * sizes.length / seconds:,.0f} tokens/s; mismatch {mismatch:.1e}"
    report.add(row)


def _step_sizes(config: models.ModelConfig, sizes: StepSizes) -> str:
  millions = models.count(models.param_specs(config)) / 1e6
  narrow = f", {sizes.narrow} in lanes" if sizes.narrow else ""
  return f"{millions:.0f}M, {sizes.batch} x ({sizes.prompt} + {sizes.completion}){narrow}"


def _step_parts(
  row: Row,
  steps: GrpoSteps,
  times: list[StepTimes],
  config: models.ModelConfig,
  sizes: StepSizes,
  rates: Rates,
) -> Iterator[Row]:
  """A row for each part of some steps."""
  parameters = models.count(models.param_specs(config))
  stats, programs = steps.engine.stats, steps.engine.scheduler.lanes[0].slots.programs
  weights = stats.published_bytes / stats.publications
  lookups = 0 if config.tie_embeddings else config.vocab_size * config.d_model
  read = weights * (1 - lookups / parameters)  # by one step: of an embedding, a few rows
  mean = sizes.prompt + sizes.completion // 2
  held = programs.context_bytes(mean) + programs.state_bytes  # read, and the states written
  ids = np.random.default_rng(0).integers(0, 256, (sizes.batch, sizes.prompt), dtype=np.int32)
  prefill = statistics.median(steps.prefill(np.roll(ids, i, axis=1)) for i in range(1, 4))
  tokens = {"prefill": ids.size, "generate": sizes.batch * sizes.completion}
  tokens["update"] = sizes.batch * sizes.length
  for part, seconds, work in (
    ("publish", statistics.median(t.publish[0] for t in times), Work(2 * weights, 0.0)),
    ("prefill", prefill, Work(0.0, 2.0 * parameters * tokens["prefill"])),
    (
      "generate",
      statistics.median(t.generate[0] for t in times),
      Work(sizes.completion * (read + sizes.batch * held), 0.0),
    ),
    (
      "update",
      statistics.median(t.update[0] for t in times),
      Work(0.0, 6.0 * parameters * tokens["update"]),
    ),
  ):
    yield dataclasses.replace(
      row,
      run=part,
      milliseconds=1e3 * seconds,
      gigabytes=work.bytes / 1e9 or None,
      gigaflops=work.flops / 1e9 or None,
      share=rates.share(work, config.compute_dtype, seconds),
      note=f"{tokens[part] / seconds:,.0f} tokens/s" if part in tokens else "",
    )


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments: {argv[1:]}")
  tiny, device = _TINY.value, jax.devices()[0]
  if device.platform != "gpu" and not tiny:
    raise app.UsageError(f"jax sees no GPU but {device.device_kind}; --tiny runs on a CPU.")
  print(f"jax {jax.__version__} on {device.device_kind}\n\n{HEADER}", flush=True)
  report, known, parts = Report(), kernels(tiny), _PARTS.value
  rates = measure_rates(report, tiny)
  found = dict(folders())
  pages = {name: found.pop(name) for name in PAGED}
  if "checks" in parts:
    for name in sorted(set(known) | set(found)):
      if name not in found or name not in known:
        missing = "not in pallas_kernels" if name not in found else "this suite has no case for it"
        report.add(Row(name, "", "", "check", "", ok=False, note=missing))
        continue
      check_kernel(report, name, found[name], known[name])
    for name, module in pages.items():
      check_pages(report, name, module, tiny)
    check_attention(report, tiny)
    check_model(report)
  if "kernels" in parts:
    for name, module in pages.items():
      time_pages(report, name, module, tiny, rates)
    for name in sorted(set(known) & set(found)):
      time_kernel(report, name, found[name], known[name], rates)
  if "model" in parts:
    time_model(report, tiny, rates)
  if "steps" in parts:
    time_steps(report, tiny, rates)
  wrong = [row for row in report.rows if not row.ok]
  print(f"\n{len(report.rows)} rows, {len(wrong)} wrong", flush=True)
  if wrong:
    raise SystemExit(1)


if __name__ == "__main__":
  app.run(main)
