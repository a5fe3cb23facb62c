r"""Rollouts: single turns, agents, recorded traces, slow tools, the host's own cost, a GRPO step.

  JAX_PLATFORMS=cpu python benchmarks/rollout.py
  JAX_PLATFORMS=cpu python benchmarks/rollout.py --part=single --part=agentic \
      --tunix_python=VENV/bin/python --tunix_script=tunix_bench.py
  JAX_PLATFORMS=cpu python benchmarks/rollout.py --part=step \
      --trl_python=VENV/bin/python --trl_script=trl_bench.py

Parts:
  single   16 prompts of 64 tokens, 128 tokens each, dense model of 4.46M parameters.
  agentic  16 episodes of 3 turns of 32 tokens with 16 observed tokens between, same model.
  trace    groups of streams that share a prompt, on a dense and a hybrid model: tokens taken in
           over those that are new. --trace reads a file, --write_trace keeps what was made up.
  latency  episodes whose tools take 0 to 2 s with a heavy tail, few and many for the slots: wall
           over the ideal, which is the slowest episode alone, or all without their tools.
  host     CPU time a turn of the rollout loop with an engine and environments that do nothing, and
           with a real engine whose model is as small as can be.
  step     generation of 16 x 64 tokens and a whole GRPO step (generate, reward, gradient,
           optimiser) of a Qwen3-like and a Nemotron-H-like model.

A peer is a script of your own that prints one JSON object a measurement; it runs in processes of
its own, in turn with ours. `tunix_script --what=sampler|agentic` prints best_s, median_s,
cpu_s_median and tokens, or step_s_median and step_cpu_s_median; `trl_script --parts=gen` prints
model, completion, gen_s, best_gen_s, cpu_gen_s, step_s_median, best_step_s and cpu_step_s. Seconds
are wall seconds, best and median; CPU seconds count all threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from grpo_step import TOKENIZER, GrpoSteps, NoEnvironment, SilentChat, StepSizes, StepTimes

from agentjax import models
from agentjax.engine import (
  Engine,
  EngineConfig,
  Finish,
  Sample,
  SampleRequest,
  SamplingConfig,
  address_key,
)
from agentjax.rewards import Formula, RewardGraph
from agentjax.rollout import RolloutConfig, collect
from agentjax.rollout.program import Player
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.record import Message, Task

PARTS = ("single", "agentic", "trace", "latency", "host", "step")


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How much of everything."""

  batch: int = 16
  prompt: int = 64
  tokens: int = 128
  turns: int = 3
  turn_tokens: int = 32
  observed: int = 16
  d_model: int = 256
  layers: int = 4  # of the dense models
  hybrid: str = "M-M*-M-"
  trace: str = "small"
  slow_slots: int = 16
  slow_episodes: tuple[int, ...] = (16, 48, 192)
  slowest: float = 2.0
  environments: tuple[int, ...] = (2_000, 16_000, 65_000)
  host_turns: int = 4
  completion: int = 64


TINY = Sizes(
  batch=2, prompt=8, tokens=8, turns=2, turn_tokens=4, observed=4, d_model=16, layers=1,
  hybrid="M*-", trace="tiny", slow_slots=2, slow_episodes=(4,), slowest=0.02,
  environments=(8,), host_turns=2, completion=4,
)  # fmt: skip

_PARTS = flags.DEFINE_multi_enum("part", list(PARTS), PARTS, "Parts to run; repeat the flag.")
_TINY = flags.DEFINE_bool("tiny", False, "Sizes that only show that it runs.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds; in each, ours and then every peer runs.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of ours in a round.")
_LANES = flags.DEFINE_integer("lanes", 1, "Lanes of the engine (one where slots are odd).")
_CHUNK = flags.DEFINE_integer("chunk_tokens", 16, "Tokens a decode dispatch.")
_TRACE = flags.DEFINE_string("trace", None, "Trace to run, JSONL, in the place of one made up.")
_WRITE = flags.DEFINE_string("write_trace", None, "Where the trace that was made up is kept.")
_PRESET = flags.DEFINE_string("preset", None, "Kind of trace to make up: tiny, small, long.")
_TUNIX = flags.DEFINE_string("tunix_python", None, "Python with google-tunix.")
_TUNIX_SCRIPT = flags.DEFINE_string("tunix_script", None, "Its benchmark.")
_TRL = flags.DEFINE_string("trl_python", None, "Python with trl.")
_TRL_SCRIPT = flags.DEFINE_string("trl_script", None, "Its benchmark.")


# The table.


@dataclasses.dataclass
class Timing:
  """Wall and CPU seconds of some runs of one thing."""

  wall: list[float] = dataclasses.field(default_factory=list)
  cpu: list[float] = dataclasses.field(default_factory=list)

  def run(self, work: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    self.wall.append(time.perf_counter() - wall)
    self.cpu.append(time.process_time() - cpu)
    return result


def row(what: str, side: str, best: float, median: float, cpu: float, note: str = "") -> str:
  load = os.getloadavg()[0]
  return f"{what:34s} {side:9s} {best:9.3f} {median:9.3f} {cpu:9.3f} {load:5.1f}  {note}"


def show(what: str, timing: Timing, note: str = "", side: str = "agentjax") -> None:
  best, median = min(timing.wall), statistics.median(timing.wall)
  print(row(what, side, best, median, statistics.median(timing.cpu), note), flush=True)


def peer_rows(python: str | None, script: str | None, arguments: Sequence[str]) -> list[dict]:
  """The JSON objects that a peer prints; none where no peer is given."""
  if python is None or script is None:
    return []
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      [python, os.path.abspath(script), *arguments],
      cwd=folder,
      capture_output=True,
      text=True,
      env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
  rows = []
  for line in done.stdout.splitlines():
    if line.startswith("{"):
      rows.append(json.loads(line))
  if done.returncode or not rows:
    raise RuntimeError(
      f"{script} {' '.join(arguments)} ended with {done.returncode} and {len(rows)} results: "
      f"{done.stderr[-2000:]}"
    )
  return rows


# Models.


def dense(sizes: Sizes) -> models.ModelConfig:
  return models.ModelConfig(
    vocab_size=1024,
    d_model=sizes.d_model,
    pattern="*-" * sizes.layers,
    num_heads=4,
    num_kv_heads=2,
    head_dim=sizes.d_model // 4,
    rope_theta=10_000.0,
    d_mlp=4 * sizes.d_model,
    mlp_activation="swiglu",
  )


def hybrid(sizes: Sizes) -> models.ModelConfig:
  return models.ModelConfig(
    vocab_size=512,
    d_model=sizes.d_model // 2,
    pattern=sizes.hybrid,
    num_heads=4,
    num_kv_heads=2,
    head_dim=max(sizes.d_model // 8, 8),
    d_mlp=3 * sizes.d_model // 2,
    mamba_heads=8,
    mamba_head_dim=max(sizes.d_model // 8, 8),
    mamba_state=16,
  )


def qwen3_like(sizes: Sizes) -> models.ModelConfig:
  return dataclasses.replace(dense(sizes), d_mlp=3 * sizes.d_model, qk_norm=True, norm_eps=1e-6)


def nemotron_h_like(sizes: Sizes) -> models.ModelConfig:
  return models.ModelConfig(
    vocab_size=1024,
    d_model=sizes.d_model,
    pattern="MEM*ME",
    num_heads=4,
    num_kv_heads=2,
    head_dim=sizes.d_model // 4,
    d_mlp=3 * sizes.d_model,
    mamba_heads=8,
    mamba_head_dim=sizes.d_model // 4,
    mamba_state=64,
    mamba_groups=2,
    chunk_size=64,
    num_experts=8,
    experts_per_token=2,
    d_expert=sizes.d_model,
    d_shared_expert=sizes.d_model,
  )


def make_engine(config: models.ModelConfig, slots: int, **settings: Any) -> Engine:
  lanes = _LANES.value if slots % _LANES.value == 0 else 1
  settings = {"chunk_tokens": _CHUNK.value, "lanes": lanes} | settings
  engine = Engine(config, EngineConfig(slots=slots, **settings), devices=jax.local_devices()[:1])
  engine.publish(models.init(config, jax.random.key(0)), 0)
  return engine


# Single turns and agents.


def run_single(sizes: Sizes) -> None:
  engine = make_engine(
    dense(sizes),
    sizes.batch,
    max_length=sizes.prompt + sizes.tokens,
    extend_buckets=(sizes.prompt,),
    extend_rows=(min(4, sizes.batch),),
  )
  prompts = np.random.default_rng(0).integers(0, 1024, (sizes.batch, sizes.prompt))

  async def work() -> int:
    async def one(i: int) -> int:
      context = await engine.open_ids(prompts[i])
      sample = await context.generate(SampleRequest(address_key(0, i), sizes.tokens))
      context.close()
      return len(sample.token_ids)

    return sum(await asyncio.gather(*map(one, range(sizes.batch))))

  timing, peers = Timing(), []
  for _ in range(_ROUNDS.value):
    for _ in range(_REPEATS.value):
      tokens = timing.run(lambda: asyncio.run(work()))
    arguments = ["--what=sampler", f"--repeats={_REPEATS.value}"]
    peers += peer_rows(_TUNIX.value, _TUNIX_SCRIPT.value, arguments)
  engine.close()
  name = f"single turn, {sizes.batch} x {sizes.tokens}"
  show(name, timing, f"{tokens / min(timing.wall):.0f} tokens/s")
  if peers:
    best = min(p["best_s"] for p in peers)
    median = statistics.median(p["median_s"] for p in peers)
    cpu = statistics.median(p["cpu_s_median"] for p in peers)
    print(row(name, "tunix", best, median, cpu, f"{peers[0]['tokens'] / best:.0f} tokens/s"))
    ratios(timing, best, median, cpu)


def ratios(ours: Timing, best: float, median: float, cpu: float) -> None:
  print(
    f"  ours / theirs: {min(ours.wall) / best:.2f} best, "
    f"{statistics.median(ours.wall) / median:.2f} median, "
    f"{statistics.median(ours.cpu) / cpu:.2f} CPU"
  )


def run_agentic(sizes: Sizes) -> None:
  longest = sizes.prompt + sizes.turns * (sizes.turn_tokens + sizes.observed)
  engine = make_engine(
    dense(sizes),
    sizes.batch,
    max_length=longest,
    extend_buckets=(sizes.observed, sizes.prompt),
    extend_rows=(min(8, sizes.batch), min(4, sizes.batch)),
  )
  prompts = np.random.default_rng(0).integers(0, 1024, (sizes.batch, sizes.prompt))

  async def work() -> int:
    async def one(i: int) -> int:
      context, tokens = await engine.open_ids(prompts[i]), 0
      for turn in range(sizes.turns):
        if turn:
          await context.extend(prompts[i][: sizes.observed])
        request = SampleRequest(address_key(0, i, turn), sizes.turn_tokens)
        tokens += len((await context.generate(request)).token_ids)
      context.close()
      return tokens

    return sum(await asyncio.gather(*map(one, range(sizes.batch))))

  timing, peers = Timing(), []
  for _ in range(_ROUNDS.value):
    for _ in range(_REPEATS.value):
      tokens = timing.run(lambda: asyncio.run(work()))
    peers += peer_rows(_TUNIX.value, _TUNIX_SCRIPT.value, ["--what=agentic", "--steps=5"])
  engine.close()
  name = f"agentic, {sizes.batch} x {sizes.turns} x {sizes.turn_tokens}"
  show(name, timing, f"{tokens / min(timing.wall):.0f} tokens/s")
  if peers:
    best = min(p["step_s_median"] for p in peers)
    median = statistics.median(p["step_s_median"] for p in peers)
    cpu = statistics.median(p["step_cpu_s_median"] for p in peers)
    note = "its medians of a whole step, update included"
    print(row(name, "tunix", best, median, cpu, note), flush=True)
    ratios(timing, best, median, cpu)


# Traces.


@dataclasses.dataclass(frozen=True)
class Stream:
  """The lengths of one episode.

  Attributes:
    group: streams of one group share their prompt.
    stream: number within the group.
    prompt_len: tokens of the prompt.
    out_lens: tokens the policy draws in each turn.
    obs_lens: tokens observed after each turn but the last.
  """

  group: int
  stream: int
  prompt_len: int
  out_lens: tuple[int, ...]
  obs_lens: tuple[int, ...]

  def __post_init__(self) -> None:
    if len(self.obs_lens) != len(self.out_lens) - 1:
      raise ValueError(
        f"stream {self.stream} of group {self.group} has {len(self.out_lens)} turns and "
        f"{len(self.obs_lens)} observations; allowed: one less than turns."
      )
    if min((self.prompt_len, *self.out_lens, *self.obs_lens)) < 1:
      raise ValueError(f"stream {self.stream} of group {self.group}: lengths must be >= 1.")

  @property
  def length(self) -> int:
    return self.prompt_len + sum(self.out_lens) + sum(self.obs_lens)


def write_trace(path: str, streams: Sequence[Stream]) -> None:
  """One JSON object a line, with the fields of ``Stream``."""
  lines = [json.dumps(dataclasses.asdict(s)) for s in streams]
  pathlib.Path(path).write_text("".join(line + "\n" for line in lines))


def read_trace(path: str) -> list[Stream]:
  """What ``write_trace`` wrote; a line that is none raises ValueError with its number."""
  streams = []
  for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
    try:
      fields = json.loads(line)
      lengths = {k: tuple(fields.pop(k)) for k in ("out_lens", "obs_lens")}
      streams.append(Stream(**fields, **lengths))
    except (ValueError, TypeError, KeyError) as error:
      raise ValueError(f"{path}, line {number}: {error}") from error
  if not streams:
    raise ValueError(f"{path} holds no stream.")
  return streams


@dataclasses.dataclass(frozen=True)
class TraceKind:
  """Ranges that lengths are drawn from, log-uniformly, both ends included."""

  groups: int
  streams: int
  turns: tuple[int, int]
  prompt: tuple[int, int]
  out: tuple[int, int]
  observed: tuple[int, int]


TRACES = {
  "tiny": TraceKind(2, 2, (2, 3), (6, 10), (2, 4), (2, 4)),
  "small": TraceKind(3, 16, (10, 20), (48, 96), (8, 24), (4, 16)),
  "long": TraceKind(8, 16, (10, 100), (512, 2048), (32, 256), (32, 512)),
}


def make_trace(kind: TraceKind, seed: int = 0) -> list[Stream]:
  random = np.random.default_rng(seed)

  def draw(bounds: tuple[int, int]) -> int:
    return int(np.exp(random.uniform(np.log(bounds[0]), np.log(bounds[1] + 1))))

  result = []
  for group in range(kind.groups):
    prompt = draw(kind.prompt)
    for stream in range(kind.streams):
      turns = draw(kind.turns)
      out = tuple(draw(kind.out) for _ in range(turns))
      observed = tuple(draw(kind.observed) for _ in range(turns - 1))
      result.append(Stream(group, stream, prompt, out, observed))
  return result


def new_tokens(streams: Sequence[Stream]) -> int:
  """Tokens that must be taken in: every prompt once a group, every observation once."""
  prompts = {s.group: s.prompt_len for s in streams}
  return sum(prompts.values()) + sum(sum(s.obs_lens) for s in streams)


def run_trace(sizes: Sizes) -> None:
  kind = _PRESET.value or sizes.trace
  streams = read_trace(_TRACE.value) if _TRACE.value else make_trace(TRACES[kind])
  if _WRITE.value:
    write_trace(_WRITE.value, streams)
  longest = max(s.length for s in streams)
  drawn = sum(sum(s.out_lens) for s in streams)
  for name, config in (("dense", dense(sizes)), ("hybrid", hybrid(sizes))):
    # Not all streams have a slot: those that wait are parked.
    engine = make_engine(
      config,
      max(len(streams) // 3 // 2 * 2, 2),
      max_length=longest,
      extend_buckets=(16, 64),
      extend_rows=(16, 4),
    )
    timing = Timing()
    before = engine.stats.extended_tokens
    timing.run(lambda: asyncio.run(_play_trace(engine, streams)))  # noqa: B023
    taken = engine.stats.extended_tokens - before
    engine.close()
    show(
      f"trace, {len(streams)} streams, {name}",
      timing,
      f"{drawn / timing.wall[0]:.0f} tokens/s; taken in / new: {taken}/{new_tokens(streams)} = "
      f"{taken / new_tokens(streams):.3f}; parked {engine.stats.parked} times",
    )


async def _play_trace(engine: Engine, streams: Sequence[Stream]) -> None:
  vocab = engine.model_config.vocab_size
  groups: dict[int, list[Stream]] = {}
  for stream in streams:
    groups.setdefault(stream.group, []).append(stream)

  async def one(stream: Stream, prefix: Any) -> None:
    address = (stream.group, stream.stream)
    context = await engine.open(prefix, priority=address)
    random = np.random.default_rng(address)
    for turn, tokens in enumerate(stream.out_lens):
      if turn:
        await context.extend(random.integers(0, vocab, stream.obs_lens[turn - 1]))
      await context.generate(SampleRequest(address_key(0, *address, turn), tokens))
    context.close()

  async def group(members: Sequence[Stream]) -> None:
    ids = np.random.default_rng(members[0].group).integers(0, vocab, members[0].prompt_len)
    prefix = await engine.prefill(ids, priority=(members[0].group,))
    await asyncio.gather(*(one(s, prefix) for s in members))
    prefix.release()

  await asyncio.gather(*map(group, groups.values()))


# Slow tools.


def tool_seconds(episodes: int, turns: int, slowest: float) -> np.ndarray:
  """[episodes, turns] seconds in 0..slowest: Pareto of index 1.2 from slowest / 40, cut off."""
  draws = np.random.default_rng(1).pareto(1.2, (episodes, turns))
  return np.minimum(draws * slowest / 40, slowest)


def run_latency(sizes: Sizes) -> None:
  for episodes in sizes.slow_episodes:
    _slow_tools(sizes, episodes)


def _slow_tools(sizes: Sizes, episodes: int) -> None:
  slots = sizes.slow_slots
  longest = sizes.prompt + sizes.turns * (sizes.turn_tokens + sizes.observed)
  engine = make_engine(
    dense(sizes),
    slots,
    max_length=longest,
    extend_buckets=(sizes.observed, sizes.prompt),
    extend_rows=(min(8, slots), min(4, slots)),
  )
  delays = tool_seconds(episodes, sizes.turns, sizes.slowest)
  prompts = np.random.default_rng(0).integers(0, 1024, (episodes, sizes.prompt))

  async def one(i: int, seconds: Sequence[float]) -> None:
    context = await engine.open_ids(prompts[i])
    for turn, wait in enumerate(seconds):
      if turn:
        await context.extend(prompts[i][: sizes.observed])
      await context.generate(SampleRequest(address_key(0, i, turn), sizes.turn_tokens))
      await asyncio.sleep(wait)
    context.close()

  async def together(which: Sequence[int], seconds: np.ndarray) -> None:
    await asyncio.gather(*(one(i, seconds[i]) for i in which))

  everyone = range(episodes)
  slowest = int(np.argmax(delays.sum(axis=1)))
  alone, work, whole = Timing(), Timing(), Timing()
  for _ in range(_ROUNDS.value):
    alone.run(lambda: asyncio.run(together([slowest], delays)))
    work.run(lambda: asyncio.run(together(everyone, np.zeros_like(delays))))
    whole.run(lambda: asyncio.run(together(everyone, delays)))
  engine.close()
  chain, device = statistics.median(alone.wall), statistics.median(work.wall)
  show(
    f"slow tools, {episodes} episodes, {slots} slots",
    whole,
    f"wall / ideal: {statistics.median(whole.wall) / max(chain, device):.2f} (longest chain "
    f"{chain:.2f} s, device work {device:.2f} s)",
  )


# The host's own cost.


_TURN = np.array([*TOKENIZER.encode("a turn of some 20 bytes"), TOKENIZER.special.end], np.int32)
_SAMPLE = Sample(
  token_ids=_TURN,
  behaviour_log_probs=np.full(len(_TURN), -1.0, np.float32),
  entropies=np.ones(len(_TURN), np.float32),
  sampling_log_probs=np.full(len(_TURN), -1.0, np.float32),
  versions=np.zeros(len(_TURN), np.int32),
  finish=Finish.STOP,
)


class NoEngine:
  """The face of an engine whose device work is nothing: one turn of the event loop a call."""

  async def prefill(self, token_ids: Any, *, priority: tuple[int, ...] = ()) -> NoPrefix:
    return NoPrefix(len(token_ids))

  async def open(self, prefix: NoPrefix, *, priority: tuple[int, ...] = ()) -> NoContext:
    return NoContext(prefix.length)


@dataclasses.dataclass
class NoPrefix:
  length: int

  def release(self) -> None:
    pass


@dataclasses.dataclass
class NoContext:
  length: int
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return self.length

  async def extend(self, token_ids: Any) -> None:
    self.length += len(token_ids)

  async def generate(self, request: SampleRequest) -> Sample:
    await asyncio.sleep(0)
    self.length += len(_TURN)
    return _SAMPLE

  def close(self) -> None:
    pass


REWARDS = RewardGraph({"one": lambda trajectory, task: 1.0}, Formula("one"))


def _host(engine: Any, environments: int, turns: int, **settings: Any) -> tuple[Timing, int]:
  group = 16 if environments % 16 == 0 else 1
  tasks = [
    Task(i, (Message("user", "What?"),), "4", "nothing") for i in range(environments // group)
  ]
  options = {"max_tokens_per_turn": 64, "max_total_tokens": 10_000} | settings
  player = Player(
    engine=engine,
    chat=SilentChat(TOKENIZER) if isinstance(engine, Engine) else MarkedChat(TOKENIZER),
    sampling=SamplingConfig(),
    config=RolloutConfig(max_turns=turns, concurrency=environments, **options),
    run_seed=0,
  )
  work = collect(
    tasks,
    step=0,
    samples_per_task=group,
    player=player,
    make_environment=lambda task: NoEnvironment(turns),
    rewards=REWARDS,
  )
  timing = Timing()
  gc.collect()
  members = timing.run(lambda: asyncio.run(work))
  return timing, sum(bool(s.sampled.any()) for t in members for s in t.segments)


def run_host(sizes: Sizes) -> None:
  for environments in sizes.environments:
    timing, turns = _host(NoEngine(), environments, sizes.host_turns)
    note = f"{1e3 * timing.cpu[0] / turns:.3f} ms of CPU a turn"
    show(f"host loop, {environments} at once", timing, note)
  least = models.ModelConfig(
    vocab_size=TOKENIZER.vocab_size, d_model=8, pattern="*", num_heads=1, num_kv_heads=1, head_dim=8
  )
  for environments in sizes.environments[:2]:
    engine = make_engine(
      least, 64, lanes=1, max_length=128, extend_buckets=(16,), extend_rows=(64,), chunk_tokens=4,
    )  # fmt: skip
    timing, turns = _host(
      engine, environments, sizes.host_turns, max_tokens_per_turn=4, max_total_tokens=128
    )
    engine.close()
    note = f"{1e3 * timing.cpu[0] / turns:.3f} ms of CPU a turn, parked {engine.stats.parked} times"
    show(f"with an engine, {environments} at once", timing, note)


# A GRPO step.


def run_step(sizes: Sizes) -> None:
  peers: dict[str, list[dict]] = {}
  ours: dict[str, dict[str, Timing]] = {}
  step_sizes = StepSizes(
    batch=sizes.batch,
    group=min(8, sizes.batch),
    prompt=48,
    completion=sizes.completion,
    lanes=_LANES.value if sizes.batch % _LANES.value == 0 else 1,
    chunk_tokens=_CHUNK.value,
  )
  built = {
    "qwen3": GrpoSteps(qwen3_like(sizes), step_sizes),
    "nemotron_h": GrpoSteps(nemotron_h_like(sizes), step_sizes),
  }
  for _ in range(_ROUNDS.value):
    for name, steps in built.items():
      timings = ours.setdefault(name, {k: Timing() for k in ("generate", "update", "step")})
      for times in itertools.islice(steps, _REPEATS.value):
        _record(times, timings)
    for found in peer_rows(_TRL.value, _TRL_SCRIPT.value, ["--parts=gen"]):
      if found.get("completion") == sizes.completion:
        peers.setdefault(found["model"], []).append(found)
  for name, timings in ours.items():
    built[name].close()
    rate = sizes.batch * sizes.completion / min(timings["generate"].wall)
    generate = f"{name}: generate {sizes.batch} x {sizes.completion}"
    show(generate, timings["generate"], f"{rate:.0f} tokens/s")
    show(f"{name}: gradient and optimiser", timings["update"])
    show(f"{name}: whole GRPO step", timings["step"])
    for what, median, best, cpu in (
      ("generate", "gen_s", "best_gen_s", "cpu_gen_s"),
      ("step", "step_s_median", "best_step_s", "cpu_step_s"),
    ):
      if rows := peers.get(name):
        how = ((min, best), (statistics.median, median), (min, cpu))
        values = [of([p[key] for p in rows]) for of, key in how]
        print(row(f"{name}: {what}", "trl", *values))
        ratios(timings[what], *values)


def _record(times: StepTimes, timings: Mapping[str, Timing]) -> None:
  """Generating includes publishing, as it does for peers."""
  generate = np.add(times.publish, times.generate)
  parts = {"generate": generate, "update": times.update, "step": generate + times.update}
  for name, (wall, cpu) in parts.items():
    timings[name].wall.append(wall)
    timings[name].cpu.append(cpu)


RUNS: dict[str, Callable[[Sizes], None]] = {
  "single": run_single,
  "agentic": run_agentic,
  "trace": run_trace,
  "latency": run_latency,
  "host": run_host,
  "step": run_step,
}


def main(argv: list[str]) -> None:
  del argv
  sizes = TINY if _TINY.value else Sizes()
  print(
    f"jax {jax.__version__}, {jax.default_backend()}, {os.cpu_count()} cores, "
    f"lanes {_LANES.value}, chunks of {_CHUNK.value}"
  )
  print(f"{'':34s} {'':9s} {'best s':>9s} {'median s':>9s} {'CPU s':>9s} {'load':>5s}")
  for part in _PARTS.value:
    RUNS[part](sizes)


if __name__ == "__main__":
  app.run(main)
