r"""Time, memory and growth in T of the state space kernels on this machine.

  python benchmarks/state_space.py [--max_time=65536] [--kernels=ssd,selective_scan,causal_conv1d]
    [--implementations=xla,reference] [--repeats=3] [--peer_python=PATH]

One row of T tokens, float32, T from 512 to ``max_time``; all implementations of a kernel take turns
(A B A B), medians. GFLOP/s count the work of the recurrence, token by token, whatever form computed
it. Slower implementations are left out from the T on at which a call would take longer than
``--seconds``, all of them where one takes more memory than ``--max_gib``. PATH is a Python with
ejkernel 0.0.78, whose Mamba-2 scan then takes turns with ``ssd``. At the end stand the figures that
the kernels are held to.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# The model sizes: heads, head width, groups and state of Mamba-2; channels and state of Mamba-1;
# channels and taps of the convolution.
HEADS, WIDTH, GROUPS, STATE = 8, 64, 1, 128
CHANNELS, CHANNEL_STATE = 512, 16
CONVOLVED, TAPS = 768, 4

FIRST_TIME = 512
_PEER = "ejkernel"
_INTERPRETED = "interpreted on this backend; name it in --implementations to time it all the same"


@dataclasses.dataclass(frozen=True)
class Settings:
  max_time: int = 65536
  kernels: tuple[str, ...] = ("ssd", "selective_scan", "causal_conv1d")
  implementations: tuple[str, ...] = ()  # none named: those made for the backend
  repeats: int = 3
  seconds: float = 1.0
  max_gib: float = 4.0
  peer_python: str | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
  """How to call a kernel and what a token costs."""

  sizes: str
  make: Callable[[int], dict[str, np.ndarray]]  # named arguments of T tokens
  forward_flops: int  # of a token
  gradient_flops: int  # of a token, forward and backward


def _normals(*names_and_shapes: tuple[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {name: rng.normal(size=shape).astype(np.float32) for name, shape in names_and_shapes}


def _steps(raw: np.ndarray) -> np.ndarray:
  return np.logaddexp(0.0, raw - 2.0).astype(np.float32)


def ssd_arguments(tokens: int) -> dict[str, np.ndarray]:
  made = _normals(
    ("x", (1, tokens, HEADS, WIDTH)),
    ("dt", (1, tokens, HEADS)),
    ("a", (HEADS,)),
    ("b", (1, tokens, GROUPS, STATE)),
    ("c", (1, tokens, GROUPS, STATE)),
    ("d", (HEADS,)),
  )
  return {**made, "dt": _steps(made["dt"]), "a": -np.exp(made["a"])}


def selective_scan_arguments(tokens: int) -> dict[str, np.ndarray]:
  made = _normals(
    ("x", (1, tokens, CHANNELS)),
    ("dt", (1, tokens, CHANNELS)),
    ("b", (1, tokens, 1, CHANNEL_STATE)),
    ("c", (1, tokens, 1, CHANNEL_STATE)),
    ("d", (CHANNELS,)),
  )
  rates = -np.arange(1.0, CHANNEL_STATE + 1.0, dtype=np.float32)
  a = np.broadcast_to(rates, (CHANNELS, CHANNEL_STATE))
  return {**made, "dt": _steps(made["dt"]), "a": np.ascontiguousarray(a)}


def causal_conv1d_arguments(tokens: int) -> dict[str, np.ndarray]:
  return _normals(("x", (1, tokens, CONVOLVED)), ("w", (TAPS, CONVOLVED)), ("bias", (CONVOLVED,)))


# Of ssd: the state is 3 (decay, outer product, sum) and the output 2 an entry; backward the state
# again, its gradient, and 2 each for those of x, b, c and the decay. Of selective_scan: decays are
# computed an entry too. Of causal_conv1d: 2 a tap and 4 of SiLU; backward again, for x, and for w.
KERNELS: Mapping[str, Kernel] = {
  "ssd": Kernel(
    f"H={HEADS} P={WIDTH} G={GROUPS} N={STATE}",
    ssd_arguments,
    5 * HEADS * WIDTH * STATE,
    19 * HEADS * WIDTH * STATE,
  ),
  "selective_scan": Kernel(
    f"D={CHANNELS} N={CHANNEL_STATE}",
    selective_scan_arguments,
    7 * CHANNELS * CHANNEL_STATE,
    23 * CHANNELS * CHANNEL_STATE,
  ),
  "causal_conv1d": Kernel(
    f"C={CONVOLVED} K={TAPS}, SiLU",
    causal_conv1d_arguments,
    (2 * TAPS + 4) * CONVOLVED,
    (8 * TAPS + 12) * CONVOLVED,
  ),
}


def times(max_time: int) -> list[int]:
  """512, 2048, ... and ``max_time``."""
  steps = [FIRST_TIME]
  while 4 * steps[-1] < max_time:
    steps.append(4 * steps[-1])
  return steps if steps[-1] >= max_time else [*steps, max_time]


def growth(tokens: Sequence[int], seconds: Sequence[float]) -> float:
  """Least squares slope of log seconds over log tokens: 1 where time is linear in T."""
  return float(np.polyfit(np.log(tokens), np.log(seconds), 1)[0])


class _Timed(abc.ABC):
  """Timed calls and their medians."""

  megabytes: float

  def __init__(self) -> None:
    self._walls: list[float] = []
    self._cpus: list[float] = []

  @abc.abstractmethod
  def call(self) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""

  def step(self) -> None:
    wall, cpu = self.call()
    self._walls.append(wall)
    self._cpus.append(cpu)

  @property
  def wall(self) -> float:
    return statistics.median(self._walls)

  @property
  def cpu(self) -> float:
    return statistics.median(self._cpus)


class Case(_Timed):
  """A compiled call in this process."""

  def __init__(self, run: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    import jax

    super().__init__()
    self._held = jax.tree.map(jax.numpy.asarray, dict(arguments))
    self._run = jax.jit(run).lower(self._held).compile()
    self.megabytes = self._run.memory_analysis().temp_size_in_bytes / 1e6

  def call(self) -> tuple[float, float]:
    import jax

    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(self._run(self._held))
    return time.perf_counter() - wall, time.process_time() - cpu

  def close(self) -> None:
    del self._run, self._held


class PeerCase(_Timed):
  """One in a process of its own, which answers every line with the seconds of a call."""

  def __init__(self, python: str, tokens: int, gradient: bool) -> None:
    super().__init__()
    command = [python, __file__, "--worker", str(tokens), str(int(gradient))]
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self.megabytes = self._read()["megabytes"]

  def call(self) -> tuple[float, float]:
    assert self._process.stdin is not None
    self._process.stdin.write("\n")
    self._process.stdin.flush()
    answer = self._read()
    return answer["wall"], answer["cpu"]

  def _read(self) -> dict[str, float]:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f"the peer ended with {self._process.wait()}; see what it wrote above.")
    return json.loads(line)

  def close(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait()


def take_turns(cases: Sequence[Case | PeerCase], repeats: int) -> None:
  for _ in range(repeats):
    for case in cases:
      case.step()


def with_gradient(run: Callable[..., Any]) -> Callable[..., Any]:
  """Output and the gradients of its sum with a fixed array, by all arguments."""
  import jax

  def both(arguments: Mapping[str, Any]) -> Any:
    y, pull = jax.vjp(run, arguments)
    return y, pull(jax.numpy.ones_like(y))

  return both


def call(kernel: str, implementation: str | None) -> Callable[..., Any]:
  """The output of a kernel, as a function of its named arguments."""
  function = getattr(importlib.import_module(f"pallas_kernels.{kernel}"), kernel)
  if kernel == "causal_conv1d":
    function = functools.partial(function, activation="silu")
  return lambda arguments: function(**arguments, implementation=implementation)[0]


def chosen(available: Sequence[str], named: Sequence[str], backend: str) -> list[str]:
  """Implementations to time, fastest to be expected first; says what is left out."""
  if named:
    return [name for name in named if name in available]
  native = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}.get(backend)
  for name in available:
    if name.startswith("pallas") and name != native:
      print(f"  {name}: {_INTERPRETED}")
  return [name for name in ("xla", native, "reference") if name in available]


def time_kernel(name: str, settings: Settings) -> None:
  """Prints a line for every T, pass and implementation, then how time grows."""
  import jax

  kernel = KERNELS[name]
  available = importlib.import_module(f"pallas_kernels.{name}").IMPLEMENTATIONS
  print(f"\n{name}  B=1 {kernel.sizes}, float32")
  sides = chosen(list(available), settings.implementations, jax.default_backend())
  if name == "ssd" and settings.peer_python is not None:
    sides.append(_PEER)
  print("      T  pass      implementation     wall s      CPU s    temp MB   GFLOP/s")
  seen: dict[tuple[str, str], list[tuple[int, Case | PeerCase]]] = {}
  left_out: set[tuple[str, str]] = set()
  for tokens in times(settings.max_time):
    for label, flops in (("forward", kernel.forward_flops), ("gradient", kernel.gradient_flops)):
      cases: dict[str, Case | PeerCase] = {}
      for side in sides:
        points = seen.setdefault((side, label), [])
        expected = points[-1][1].wall * tokens / points[-1][0] if points else 0.0
        if (side, label) in left_out or side != sides[0] and expected > settings.seconds:
          continue
        case = _case(name, side, tokens, label == "gradient", settings)
        if case.megabytes > 1024 * settings.max_gib:
          left_out.add((side, label))
          print(f"{tokens:7,}  {label:8s}  {side:15s}  left out: {case.megabytes:,.0f} MB")
          case.close()
          continue
        case.call()
        cases[side] = case
        points.append((tokens, case))
      take_turns(list(cases.values()), settings.repeats)
      for side, case in cases.items():
        case.close()
        print(
          f"{tokens:7,}  {label:8s}  {side:15s} {case.wall:9.4f}  {case.cpu:9.4f}"
          f"  {case.megabytes:9,.1f}  {tokens * flops / case.wall / 1e9:8.2f}"
        )
  for (side, label), points in seen.items():
    if len(points) > 1:
      tokens_of = [tokens for tokens, _ in points]
      wall, cpu = (
        growth(tokens_of, [getattr(case, kind) for _, case in points]) for kind in ("wall", "cpu")
      )
      print(f"{name} {side} {label}: T^{wall:.2f} in wall seconds, T^{cpu:.2f} in CPU seconds")


def _case(name: str, side: str, tokens: int, gradient: bool, settings: Settings) -> Case | PeerCase:
  if side == _PEER:
    assert settings.peer_python is not None
    return PeerCase(settings.peer_python, tokens, gradient)
  run = call(name, side)
  return Case(with_gradient(run) if gradient else run, KERNELS[name].make(tokens))


def held_to(settings: Settings) -> None:
  """The figures that ssd is held to: memory, training beside a token loop, decoding, rests."""
  tokens, chunk = 2048, 64
  print(f"\nssd, B=1 T={tokens} {KERNELS['ssd'].sizes}, float32")

  def gradient(tokens: int, implementation: str) -> Case:
    return Case(with_gradient(call("ssd", implementation)), ssd_arguments(tokens))

  def ratio(one: Case, other: Case) -> float:
    one.call(), other.call()
    take_turns([one, other], settings.repeats)
    return one.cpu / other.cpu

  xla = gradient(tokens, "xla")
  print(f"temporary memory, forward and backward: {xla.megabytes:.1f} MB (goal: at most 100)")
  loop = ratio(gradient(tokens, "reference"), xla)
  print(f"a lax.scan over tokens / xla in training: {loop:.1f} (goal: at least 10)")
  rest = ratio(gradient(tokens + 1, "xla"), gradient(tokens + chunk, "xla"))
  print(f"T={tokens + 1} / T={tokens + chunk}, chunk {chunk}: {rest:.2f} (goal: about 1)")
  step = ratio(*_decoding_steps())
  print(f"ssd_step / the recurrence written out, 8 rows: {step:.2f} (goal: at most 1)")


def _decoding_steps() -> tuple[Case, Case]:
  """200 tokens of 8 rows by ``ssd_step``, and by the formula."""
  import jax
  import jax.numpy as jnp

  from pallas_kernels.ssd import ssd_step

  rows, tokens = 8, 200
  made = ssd_arguments(tokens)
  state = np.zeros((rows, HEADS, WIDTH, STATE), np.float32)

  def written_out(x, dt, a, b, c, d, state):
    b, c = (jnp.repeat(v, HEADS // GROUPS, axis=1) for v in (b, c))
    decay = jnp.exp(dt * a)[..., None, None]
    state = decay * state + (dt[..., None] * x)[..., None] * b[:, :, None]
    return jnp.sum(state * c[:, :, None], axis=-1) + d[:, None] * x, state

  def walk(step: Callable[..., Any]) -> Case:
    def run(arguments: Mapping[str, Any]) -> Any:
      def body(state: Any, token: tuple[Any, ...]) -> tuple[Any, Any]:
        x, dt, b, c = (jnp.broadcast_to(v, (rows, *v.shape[1:])) for v in token)
        y, state = step(x, dt, arguments["a"], b, c, arguments["d"], state)
        return state, y

      by_token = tuple(jnp.swapaxes(arguments[n], 0, 1)[:, None, 0] for n in ("x", "dt", "b", "c"))
      return jax.lax.scan(body, arguments["state"], by_token)

    return Case(run, {**made, "state": state})

  return walk(ssd_step), walk(written_out)


def worker(tokens: int, gradient: bool) -> None:
  """ejkernel's scan: answers every line of stdin with the seconds of one call."""
  from ejkernel.kernels._xla.state_space_v2 import state_space_v2

  def run(v: Mapping[str, Any]) -> Any:
    return state_space_v2(v["x"], v["a"], v["b"], v["c"], v["d"], v["dt"], n_groups=GROUPS)[0]

  case = Case(with_gradient(run) if gradient else run, ssd_arguments(tokens))
  print(json.dumps({"megabytes": case.megabytes}), flush=True)
  for _ in sys.stdin:
    wall, cpu = case.call()
    print(json.dumps({"wall": wall, "cpu": cpu}), flush=True)


def run(settings: Settings) -> None:
  import jax

  if settings.max_time < FIRST_TIME:
    raise ValueError(f"--max_time={settings.max_time}; allowed: at least {FIRST_TIME}.")
  unknown = set(settings.kernels) - set(KERNELS)
  if unknown:
    raise ValueError(f"--kernels={','.join(sorted(unknown))}; allowed: {', '.join(KERNELS)}.")
  print(f"jax {jax.__version__} on {jax.default_backend()}")
  for name in settings.kernels:
    time_kernel(name, settings)
  if "ssd" in settings.kernels:
    held_to(settings)


if __name__ == "__main__":
  if sys.argv[1:2] == ["--worker"]:
    worker(int(sys.argv[2]), bool(int(sys.argv[3])))
  else:
    from absl import app, flags

    defaults = Settings()
    flags.DEFINE_integer("max_time", defaults.max_time, "Longest row, in tokens.")
    flags.DEFINE_list("kernels", list(defaults.kernels), "Kernels to time.")
    flags.DEFINE_list("implementations", [], "Implementations; none: those of the backend.")
    flags.DEFINE_integer("repeats", defaults.repeats, "Timed calls of each.")
    flags.DEFINE_float("seconds", defaults.seconds, "Longest call of a slower implementation.")
    flags.DEFINE_float("max_gib", defaults.max_gib, "Most temporary memory of a call, GiB.")
    flags.DEFINE_string("peer_python", None, "Python with ejkernel.")

    def main(argv: list[str]) -> None:
      del argv
      given = flags.FLAGS
      run(
        Settings(
          max_time=given.max_time,
          kernels=tuple(given.kernels),
          implementations=tuple(given.implementations),
          repeats=given.repeats,
          seconds=given.seconds,
          max_gib=given.max_gib,
          peer_python=given.peer_python,
        )
      )

    app.run(main)
