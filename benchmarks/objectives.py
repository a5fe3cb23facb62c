r"""Updates with log-probs of chunks of logits, beside those that hold all; and losses alone.

  JAX_PLATFORMS=cpu python benchmarks/objectives.py [--trl_python=PATH] [--side=fused]

"memory": what XLA plans for the whole update (its temporary buffers, from ``memory_analysis``; the
parameters are the same) on ``--memory_rows`` x ``--memory_time`` tokens in one micro-batch; nothing
is computed. "fused" is ``models.score_tokens``: the logits of ``--logits_chunk`` time steps at
once, made again in the backward pass. "naive" takes a log-softmax of all logits.

"time": the same two updates on ``--rows`` x ``--time`` tokens, in turn, after their results were
compared; ``--side=fused`` leaves out the other, whose logits may not fit, and
``--microbatch_rows`` takes fewer rows at once on all sides. With ``--trl_python``, a
Python that has torch and trl, its update (benchmarks/trl_update.py) is timed in turn with them; the
memory of ours is then what the process took above its parameters, and not only what is planned.
Another ``--trl_script`` takes the same flags and prints the same JSON.

"losses": value and gradient of presets by the log-probs alone, on ``--memory_rows`` x
``--memory_time`` tokens: what a loss adds to an update.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from agentjax.models import ModelConfig, forward
from agentjax.models.heads import TokenScores, compute_logits
from agentjax.objectives import policy_objective, prepare, preset
from agentjax.sharding import MeshConfig, make_mesh, split_rows
from agentjax.training import OptimizerConfig, update
from agentjax.training.optimizer import build_optimizer
from agentjax.training.state import StateSpec, network_specs
from agentjax.training.update import UpdateBatch, UpdateSettings, make_update
from agentjax.trajectory.packing import PackedSequence, pack

PARTS = ("memory", "time", "losses")
SIDES = ("fused", "naive")
_PARTS = flags.DEFINE_multi_enum("part", list(PARTS), PARTS, "Parts to run; repeat the flag.")
_TINY = flags.DEFINE_bool("tiny", False, "Sizes that only show that it runs.")
_ROWS = flags.DEFINE_integer("rows", 8, "Rows of the updates that are timed.")
_TIME = flags.DEFINE_integer("time", 512, "Tokens a row of the updates that are timed.")
_AT_ONCE = flags.DEFINE_integer(
  "microbatch_rows",
  None,
  "Rows of a micro-batch of those; a divisor of --rows. All at once if not.",
)
_MEMORY_ROWS = flags.DEFINE_integer("memory_rows", 64, "Rows of the updates that are planned.")
_MEMORY_TIME = flags.DEFINE_integer("memory_time", 2048, "Tokens a row of those.")
_VOCAB = flags.DEFINE_integer("vocab", 32768, "Tokens of the vocabulary.")
_WIDTH = flags.DEFINE_integer("d_model", 128, "Width of the policy.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers, each attention and an MLP.")
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads, all with keys of their own.")
_CHUNK = flags.DEFINE_integer("logits_chunk", 128, "Time steps whose logits are held at once.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds of timing; in each, every side once.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed updates of a side in a round.")
_PRESETS = flags.DEFINE_list(
  "presets", ["grpo", "gspo", "cispo", "sppo", "self_play_preference"], "Losses that are timed."
)
_TRL = flags.DEFINE_string("trl_python", None, "Python with trl.")
_TRL_SCRIPT = flags.DEFINE_string(
  "trl_script", os.path.join(os.path.dirname(__file__), "trl_update.py"), "What it runs."
)
_SIDES = flags.DEFINE_multi_enum("side", list(SIDES), SIDES, "Sides that are timed; repeatable.")


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How much of everything."""

  rows: int
  time: int
  memory_rows: int
  memory_time: int
  vocab: int
  d_model: int
  layers: int
  heads: int
  logits_chunk: int


TINY = Sizes(
  rows=2, time=16, memory_rows=4, memory_time=32, vocab=64, d_model=8, layers=1, heads=2,
  logits_chunk=8,
)  # fmt: skip


def naive_scores(
  params: Any,
  config: ModelConfig,
  token_ids: Any,
  segment_ids: Any,
  positions: Any,
  *,
  temperature: float = 1.0,
  **unused: Any,
) -> TokenScores:
  """``score_tokens`` by a log-softmax of all logits, [B, T, vocab]."""
  del unused
  out = forward(params, config, token_ids, segment_ids, positions)
  logits = compute_logits(params, config, out.hidden)[:, :-1] / temperature
  every = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(every, token_ids[:, 1:, None], axis=-1)[..., 0]
  entropies = -jnp.sum(jnp.exp(every) * every, axis=-1)
  follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
  log_probs, entropies, normalizers = (
    jnp.pad(jnp.where(follows, v, 0.0), ((0, 0), (1, 0)))
    for v in (chosen, entropies, jax.nn.logsumexp(logits, axis=-1))
  )
  return TokenScores.of(out, (log_probs, entropies, normalizers))


def policy(sizes: Sizes) -> ModelConfig:
  return ModelConfig(
    vocab_size=sizes.vocab,
    d_model=sizes.d_model,
    pattern="*-" * sizes.layers,
    num_heads=sizes.heads,
    num_kv_heads=sizes.heads,
    head_dim=sizes.d_model // sizes.heads,
    d_mlp=4 * sizes.d_model,
    mlp_activation="swiglu",
    logits_chunk=sizes.logits_chunk,
  )


def packed(sizes: Sizes, rows: int, length: int) -> Any:
  """Rows of one sequence each, the first eighth its prompt, in groups of four."""
  rng = np.random.default_rng(0)
  drawn = (np.arange(length) >= max(1, length // 8)).astype(np.float32)
  sequences = [
    PackedSequence(
      name=str(i),
      token_ids=rng.integers(8, sizes.vocab, length).astype(np.int32),
      weights=drawn,
      behaviour_log_probs=(-rng.random(length) * drawn).astype(np.float32),
      entropies=rng.random(length).astype(np.float32),
      versions=np.where(drawn > 0, 0, -1).astype(np.int32),
      turns=np.zeros(length, np.int32),
      reward=float(i % 2),
      group=i // 4,
    )
    for i in range(rows)
  ]
  return pack(sequences, row_length=length, pad_id=0, rows=rows)


class Updates:
  """The update of both sides on rows of one size."""

  def __init__(self, sizes: Sizes, rows: int, length: int, at_once: int | None = None):
    self.config, self.rows = policy(sizes), rows
    specs = network_specs(self.config, critic=False)
    self.optimizer = build_optimizer(OptimizerConfig(), 1000, specs)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    self.spec = StateSpec(self.config, self.optimizer, mesh)
    batch = packed(sizes, rows, length)
    prepared, _ = prepare(batch, preset("dapo"))
    whole = UpdateBatch(batch.token_ids, batch.positions, prepared)
    self.batch = split_rows(whole, at_once or rows)
    self.count = jnp.int32(rows // (at_once or rows))

  def compiled(self, side: str) -> Any:
    made = make_update(
      self.config,
      self.optimizer,
      policy_objective(preset("dapo")),
      UpdateSettings(),
      self.spec.placed,
    )
    score = update.score_tokens if side == "fused" else naive_scores
    with mock.patch.object(update, "score_tokens", score):
      return made.lower(self.spec.abstract(), self.batch, self.count, None).compile()

  def state(self) -> Any:
    return self.spec.create(jax.random.key(0))


def run_memory(sizes: Sizes) -> None:
  updates = Updates(sizes, sizes.memory_rows, sizes.memory_time)
  found = []
  for side in SIDES:
    found.append(updates.compiled(side).memory_analysis().temp_size_in_bytes / 2**20)
    shape = f"update, {sizes.memory_rows} x {sizes.memory_time} x {sizes.vocab}"
    print(f"{shape:34s} {side:9s} {found[-1]:12,.2f} MiB of temporary buffers", flush=True)
  print(f"  naive / fused: {found[1] / found[0]:.2f} memory")


@dataclasses.dataclass
class Timing:
  """Wall and CPU seconds of calls of one thing."""

  wall: list[float] = dataclasses.field(default_factory=list)
  cpu: list[float] = dataclasses.field(default_factory=list)

  def run(self, work: Callable[[], Any]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(work())
    self.wall.append(time.perf_counter() - wall)
    self.cpu.append(time.process_time() - cpu)

  @property
  def figures(self) -> tuple[float, float, float]:
    return min(self.wall), statistics.median(self.wall), statistics.median(self.cpu)


def resident_mib() -> float:
  """What the process holds in memory."""
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def show(what: str, side: str, figures: tuple[float, float, float], note: str = "") -> None:
  best, median, cpu = figures
  load = os.getloadavg()[0]
  print(
    f"{what:34s} {side:9s} {best:9.4f} {median:9.4f} {cpu:9.4f} {load:5.1f}  {note}", flush=True
  )


def run_time(sizes: Sizes) -> None:
  updates = Updates(sizes, sizes.rows, sizes.time, _AT_ONCE.value)
  sides = [side for side in SIDES if side in _SIDES.value]
  compiled = {side: updates.compiled(side) for side in sides}
  states = {side: updates.state() for side in sides}
  before, log_probs = resident_mib(), {}
  for side, call in compiled.items():
    states[side], _, log_probs[side] = call(states[side], updates.batch, updates.count, None)
  note = ""
  if len(sides) == 2:
    gap = float(jnp.max(jnp.abs(log_probs["fused"] - log_probs["naive"])))
    if not gap < 1e-4:
      raise RuntimeError(f"log-probs of the two sides differ by {gap}")
    note = f"log-probs agree to {gap:.1e}"
  timings = {side: Timing() for side in sides}
  peers: list[dict[str, float]] = []
  for _ in range(_ROUNDS.value):
    for side, timing in timings.items():
      for _ in range(_REPEATS.value):

        def step(side: str = side) -> Any:
          states[side], metrics, _ = compiled[side](
            states[side], updates.batch, updates.count, None
          )
          return metrics

        timing.run(step)
    peers += peer_rows(sizes)
  what = f"update, {sizes.rows} x {sizes.time} x {sizes.vocab}"
  if len(sides) == 1:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    note = f"peak {own:,.1f} MiB above its model"
  for side, timing in timings.items():
    show(what, side, timing.figures, note if side == sides[-1] else "")
  first = timings[sides[0]].figures
  if len(sides) == 2:
    naive = timings["naive"].figures
    print(f"  naive / fused: {naive[1] / first[1]:.2f} median, {naive[2] / first[2]:.2f} CPU")
  if peers:
    theirs = (
      min(p["best_s"] for p in peers),
      statistics.median(p["median_s"] for p in peers),
      statistics.median(p["cpu_s_median"] for p in peers),
    )
    peak = max(p["peak_mib"] for p in peers)
    show(what, "trl", theirs, f"peak {peak:,.1f} MiB above its model")
    planned = compiled[sides[0]].memory_analysis().temp_size_in_bytes / 2**20
    print(
      f"  trl / {sides[0]}: {theirs[1] / first[1]:.2f} median, {theirs[2] / first[2]:.2f} CPU, "
      f"{peak / planned:.2f} memory beside the {planned:,.1f} MiB planned"
    )


def peer_rows(sizes: Sizes) -> list[dict[str, float]]:
  """The JSON objects that a peer prints; none where no peer is given."""
  if _TRL.value is None:
    return []
  names = ("rows", "time", "vocab", "d_model", "layers", "heads")
  arguments = [f"--{name}={getattr(sizes, name)}" for name in names]
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      [
        _TRL.value,
        os.path.abspath(_TRL_SCRIPT.value),
        *arguments,
        f"--repeats={_REPEATS.value}",
        f"--microbatch_rows={_AT_ONCE.value or sizes.rows}",
      ],
      cwd=folder,
      capture_output=True,
      text=True,
      env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
  rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
  if done.returncode or not rows:
    raise RuntimeError(
      f"{_TRL_SCRIPT.value} ended with {done.returncode} and {len(rows)} results: "
      f"{done.stderr[-2000:]}"
    )
  return rows


def run_losses(sizes: Sizes) -> None:
  rows, length = sizes.memory_rows, sizes.memory_time
  batch = packed(sizes, rows, length)
  values = jnp.zeros((rows, length))
  now = batch.behaviour_log_probs - 0.01
  for name in _PRESETS.value:
    config = preset(name)
    extra: dict[str, Any] = {"values": values} if config.needs_values else {}
    if config.needs_reference:
      extra["reference_log_probs"] = jnp.asarray(batch.behaviour_log_probs)
    prepared, _ = jax.jit(lambda b, e, c=config: prepare(b, c, **e))(batch, extra)
    objective = policy_objective(config)
    critic = values if config.needs_values else None

    @jax.jit
    def slope(now: Any, prepared: Any, critic: Any, objective: Any = objective) -> Any:
      return jax.value_and_grad(
        lambda x: objective(prepared.with_scores(x, jnp.ones_like(x), critic))[0]
      )(now)

    jax.block_until_ready(slope(now, prepared, critic))
    timing = Timing()
    for _ in range(_ROUNDS.value * _REPEATS.value):
      timing.run(lambda p=prepared, c=critic, f=slope: f(now, p, c))
    show(f"loss, {rows} x {length}", name[:9], timing.figures, name)


def main(argv: list[str]) -> None:
  del argv
  names = [field.name for field in dataclasses.fields(Sizes)]
  sizes = TINY if _TINY.value else Sizes(**{name: flags.FLAGS[name].value for name in names})
  print(f"jax {jax.__version__} on {jax.default_backend()}, {os.cpu_count()} cores")
  header = ("", "side", "best s", "median s", "CPU s", "load")
  print("{:34s} {:9s} {:>9s} {:>9s} {:>9s} {:>5s}".format(*header))
  parts = {"memory": run_memory, "time": run_time, "losses": run_losses}
  for name in dict.fromkeys(_PARTS.value):
    parts[name](sizes)


if __name__ == "__main__":
  app.run(main)
