"""What a fleet and a schedule will do, by simulating events on the host. Numpy only.

The simulator plays the same rules as a run: groups begin and are taken as ``schedule`` says, an
episode holds a slot of one engine while it samples, and gives it up while its tools run. Device
work is replaced by measured rates. Decoding is processor sharing: with n slots active an engine
draws ``rate(n)`` tokens a second, shared evenly; a prefill stops the engine's decoding meanwhile.

  fleet = Fleet(slots=64, decode_rate=((1, 60.0), (16, 800.0), (64, 2000.0)), update_seconds=8.0)
  load = Workload(turns=Fixed(4), turn_tokens=LogNormal(200, 0.5), tool_seconds=LogNormal(1.0, 1.5))
  print(compare(fleet, load, Plan(steps=20, tasks_per_step=16, group_size=8)))
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from agentjax.rollout.schedule import Pending, ScheduleConfig, choose
from agentjax.trajectory.record import Trajectory

SCHEDULES = (
  ScheduleConfig(),
  ScheduleConfig("one_step_off"),
  ScheduleConfig("async", 1),
  ScheduleConfig("async", 2),
  ScheduleConfig("async", 4),
)


class Distribution(Protocol):
  """Something to draw non-negative numbers from."""

  def draw(self, rng: np.random.Generator) -> float: ...


@dataclasses.dataclass(frozen=True)
class Fixed:
  """Always ``value``."""

  value: float

  def draw(self, rng: np.random.Generator) -> float:
    del rng
    return self.value


@dataclasses.dataclass(frozen=True)
class LogNormal:
  """``median * exp(sigma * normal)``, at most ``cap``; mean ``median * exp(sigma^2 / 2)``."""

  median: float
  sigma: float
  cap: float = float("inf")

  def draw(self, rng: np.random.Generator) -> float:
    return min(self.median * float(np.exp(self.sigma * rng.standard_normal())), self.cap)


@dataclasses.dataclass(frozen=True)
class Empirical:
  """One of ``values``, all equally likely."""

  values: tuple[float, ...]

  def draw(self, rng: np.random.Generator) -> float:
    return self.values[int(rng.integers(len(self.values)))]


@dataclasses.dataclass(frozen=True)
class Workload:
  """What episodes are like: so many turns, each of which samples and then waits for its tools.

  Attributes:
    turns: model calls of an episode, rounded, at least 1.
    turn_tokens: tokens drawn in one.
    tool_seconds: what the environment takes to answer a turn, the last one too.
    prompt_tokens: of the prompt that a group shares.
    observation_tokens: taken in before every turn but the first.
  """

  turns: Distribution
  turn_tokens: Distribution
  tool_seconds: Distribution = Fixed(0.0)
  prompt_tokens: Distribution = Fixed(0.0)
  observation_tokens: Distribution = Fixed(0.0)


@dataclasses.dataclass(frozen=True)
class Fleet:
  """The machines.

  Attributes:
    slots: of one engine.
    decode_rate: (active slots, tokens a second of all of them together) pairs as measured, active
      slots rising; between them linear, beyond them flat.
    update_seconds: one training step.
    prefill_seconds: for one token of a prompt or an observation.
    publish_seconds: from the end of an update until the engines have the weights; they stand still.
    engines: how many; an episode stays on the one that had the fewest when it began.
    shared: updates run on the engines' devices, which stand still meanwhile.
  """

  slots: int
  decode_rate: tuple[tuple[int, float], ...]
  update_seconds: float
  prefill_seconds: float = 0.0
  publish_seconds: float = 0.0
  engines: int = 1
  shared: bool = False

  def __post_init__(self) -> None:
    active = [n for n, _ in self.decode_rate]
    if not active or active != sorted(set(active)) or min(r for _, r in self.decode_rate) <= 0:
      raise ValueError(
        f"decode_rate={self.decode_rate}; allowed: (active slots, tokens/s > 0), slots rising."
      )
    if self.slots < 1 or self.engines < 1:
      raise ValueError(f"slots={self.slots}, engines={self.engines}; allowed: at least 1 each.")

  def rate(self, active: int) -> float:
    """Tokens a second of one engine with ``active`` slots."""
    measured = np.array(self.decode_rate, np.float64)
    return float(np.interp(active, measured[:, 0], measured[:, 1]))


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is to be trained: ``config.rl`` and ``config.rollout`` in short."""

  steps: int
  tasks_per_step: int
  group_size: int
  schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
  concurrency: int = 2**31
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class SimulationReport:
  """What happened.

  Attributes:
    seconds: of the whole run.
    step_seconds: from the start, or from the end of the step before, to the end of each update.
    tokens: sampled tokens of the episodes that were trained on.
    tokens_per_second: of the whole run.
    slot_share: share of the fleet's slot-seconds in which a slot was sampling.
    trainer_share: share of the time in which an update ran.
    staleness_mean, staleness_max: over tokens, in updates.
    least_seconds: no schedule can be quicker: the larger of all updates, all sampling with every
      slot active, and the longest episode with one update. Where devices are shared, the first two
      add up.
  """

  seconds: float
  step_seconds: tuple[float, ...]
  tokens: float
  tokens_per_second: float
  slot_share: float
  trainer_share: float
  staleness_mean: float
  staleness_max: float
  least_seconds: float


def workload_of(trajectories: Sequence[Trajectory]) -> Workload:
  """What recorded episodes were like: their turns, tokens and the seconds of their segments.

  The environment's answer to a last turn leaves no segment; ``tool_seconds`` stands for it too.

  Raises:
    ValueError: no trajectory has a sampled token.
  """
  turns, tokens, seconds, prompts, observed = [], [], [], [], []
  for trajectory in trajectories:
    answers: dict[int, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    calls = prompt = 0
    for segment in trajectory.segments:
      if segment.sampled.any():
        calls += 1
        tokens.append(float(len(segment)))
      elif not calls:
        prompt += len(segment)
      else:
        answers[calls][0] += segment.seconds
        answers[calls][1] += len(segment)
    if calls:
      turns.append(float(calls))
      prompts.append(float(prompt))
      seconds += [s for s, _ in answers.values()]
      observed += [n for _, n in answers.values()]
  if not turns:
    raise ValueError(f"none of the {len(trajectories)} trajectories has a sampled token.")
  return Workload(
    turns=Empirical(tuple(turns)),
    turn_tokens=Empirical(tuple(tokens)),
    tool_seconds=Empirical(tuple(seconds) or (0.0,)),
    prompt_tokens=Empirical(tuple(prompts)),
    observation_tokens=Empirical(tuple(observed) or (0.0,)),
  )


def simulate(fleet: Fleet, load: Workload, plan: Plan) -> SimulationReport:
  """Runs a plan to its end. What an episode is like depends on the seed and its place alone.

  Raises:
    ValueError: ``plan.schedule.stale`` is "drop", which is not simulated.
  """
  if plan.schedule.stale == "drop":
    raise ValueError("plan.schedule.stale='drop' is not simulated; allowed: 'wait' or 'mask'.")
  return _Simulation(fleet, load, plan).run()


def compare(
  fleet: Fleet, load: Workload, plan: Plan, schedules: Sequence[ScheduleConfig] = SCHEDULES
) -> str:
  """A table of what the schedules would do, one row each, for ``print``."""
  lines = [
    f"{'schedule':18s} {'s/step':>8s} {'tokens/s':>9s} {'slots':>6s} {'trainer':>8s} "
    f"{'staleness':>10s} {'speed-up':>9s} {'of bound':>9s}"
  ]
  first = None
  for schedule in schedules:
    report = simulate(fleet, load, dataclasses.replace(plan, schedule=schedule))
    first = first or report.seconds
    name = schedule.mode + (f" {schedule.bound}" if schedule.mode == "async" else "")
    lines.append(
      f"{name:18s} {report.seconds / plan.steps:8.3f} {report.tokens_per_second:9.0f} "
      f"{report.slot_share:6.0%} {report.trainer_share:8.0%} "
      f"{report.staleness_mean:5.2f}/{report.staleness_max:3.0f}  "
      f"{first / report.seconds:8.2f}x {report.least_seconds / report.seconds:9.0%}"
    )
  return "\n".join(lines)


class _Episode:
  """One run of a task: what it will do, and where it stands."""

  def __init__(self, group: _Group, sample: int, load: Workload, seed: int) -> None:
    self.group, self.key = group, (group.number, sample)
    rng = np.random.default_rng([seed, group.number, sample])
    turns = max(round(load.turns.draw(rng)), 1)
    self.tokens = [max(load.turn_tokens.draw(rng), 0.0) for _ in range(turns)]
    self.tools = [max(load.tool_seconds.draw(rng), 0.0) for _ in range(turns)]
    self.intake = [0.0] + [load.observation_tokens.draw(rng) for _ in range(turns - 1)]
    if sample == 0:  # the others start from its prefill
      shared = np.random.default_rng([seed, group.number])
      self.intake[0] = load.prompt_tokens.draw(shared)
    self.turn = 0
    self.mark = 0.0  # the engine's progress up to which its tokens are counted
    self.ages: dict[int, float] = collections.defaultdict(float)  # tokens by version
    self.engine: _Engine | None = None

  def __lt__(self, other: _Episode) -> bool:
    return self.key < other.key


class _Group:
  def __init__(self, number: int, version: int, plan: Plan, load: Workload) -> None:
    self.number, self.version = number, version
    self.episodes = [_Episode(self, i, load, plan.seed) for i in range(plan.group_size)]
    self.left = plan.group_size


class _Engine:
  """Slots that share a rate. ``progress`` is what one active slot has drawn since the start."""

  def __init__(self, fleet: Fleet) -> None:
    self.fleet = fleet
    self.active: list[tuple[float, _Episode]] = []  # heap by the progress at which a turn ends
    self.waiting: list[_Episode] = []
    self.members = 0
    self.progress = 0.0
    self.slot_seconds = 0.0
    self.epoch = 0  # events of earlier ones are void
    self._now = self._stalled = 0.0

  def advance(self, now: float) -> None:
    """Draws up to ``now``."""
    count, start = len(self.active), max(self._now, self._stalled)
    if count and now > start:
      self.progress += (now - start) * self.fleet.rate(count) / count
      self.slot_seconds += (now - start) * count
    self._now = now

  def stall(self, seconds: float) -> None:
    """Stands still for a while from now on, or after what it stands still for already."""
    self._stalled = max(self._now, self._stalled) + seconds

  def next_end(self) -> float | None:
    """When the next turn ends if nothing changes."""
    if not self.active:
      return None
    count = len(self.active)
    left = max(self.active[0][0] - self.progress, 0.0)
    return max(self._now, self._stalled) + left * count / self.fleet.rate(count)

  def begin(self, episode: _Episode) -> None:
    """Gives a turn a slot."""
    self.stall(episode.intake[episode.turn] * self.fleet.prefill_seconds)
    episode.mark = self.progress
    heapq.heappush(self.active, (self.progress + episode.tokens[episode.turn], episode))

  def count(self, episode: _Episode, version: int) -> None:
    """Notes the tokens drawn since the last time as of ``version``."""
    episode.ages[version] += self.progress - episode.mark
    episode.mark = self.progress


class _Simulation:
  def __init__(self, fleet: Fleet, load: Workload, plan: Plan) -> None:
    self.fleet, self.load, self.plan = fleet, load, plan
    self.engines = [_Engine(fleet) for _ in range(fleet.engines)]
    self.events: list[tuple[float, int, str, Any]] = []
    self.ticks = itertools.count()
    self.now = 0.0
    self.version = self.step = 0
    self.groups: dict[int, _Group] = {}
    self.begun = 0
    self.queue: collections.deque[_Episode] = collections.deque()  # beyond ``concurrency``
    self.running = 0
    self.training = False
    self.ends: list[float] = []
    self.ages: dict[int, float] = collections.defaultdict(float)
    self.work = 0.0  # seconds of sampling with all slots active
    self.longest = 0.0

  def run(self) -> SimulationReport:
    self._start_step()
    while self.step < self.plan.steps:
      self.now, _, kind, what = heapq.heappop(self.events)
      if kind == "turn":
        engine, epoch = what
        if epoch == engine.epoch:
          self._end_turn(engine)
      elif kind == "tool":
        self._end_tool(what)
      else:
        self._end_update()
    return self._report()

  # The trainer.

  def _start_step(self) -> None:
    """What comes before the wait for a step's groups."""
    schedule, size = self.plan.schedule, self.plan.tasks_per_step
    if schedule.mode != "one_step_off" or self.step == 0:
      self._publish()
    left = self.plan.steps - 1 - self.step
    ahead = 0 if schedule.mode == "one_step_off" else min(schedule.bound, left)
    self._fill((ahead + 1) * size)
    self._try_batch()

  def _try_batch(self) -> None:
    if self.training:
      return
    pending = [Pending(g.number, self._oldest(g), not g.left) for g in self.groups.values()]
    chosen = choose(pending, self.step, self.plan.tasks_per_step, self.plan.schedule)
    if chosen is None:
      return
    for number in chosen:
      for episode in self.groups.pop(number).episodes:
        for version, tokens in episode.ages.items():
          self.ages[self.step - version] += tokens
    if self.plan.schedule.mode == "one_step_off":
      self._publish()
      if self.step + 1 < self.plan.steps:
        self._fill(self.plan.tasks_per_step)
    self.training = True
    if self.fleet.shared:
      self._stall(self.fleet.update_seconds)
    self._at(self.fleet.update_seconds, "update", None)

  def _end_update(self) -> None:
    self.training = False
    self.ends.append(self.now)
    self.step += 1
    if self.step < self.plan.steps:
      self._start_step()

  def _oldest(self, group: _Group) -> int:
    ages = [v for e in group.episodes for v in e.ages] if not group.left else []
    return min(ages, default=group.version)

  def _publish(self) -> None:
    for engine in self.engines:
      engine.advance(self.now)
      for _, episode in engine.active:
        engine.count(episode, self.version)
    self.version = self.step
    if self.step:
      self._stall(self.fleet.publish_seconds)

  def _stall(self, seconds: float) -> None:
    for engine in self.engines:
      engine.advance(self.now)
      engine.stall(seconds)
      self._expect(engine)

  # Episodes.

  def _fill(self, count: int) -> None:
    while len(self.groups) < count:
      group = _Group(self.begun, self.version, self.plan, self.load)
      self.groups[self.begun] = group
      self.begun += 1
      for episode in group.episodes:
        tokens = sum(episode.tokens)
        intake = sum(episode.intake) * self.fleet.prefill_seconds
        self.work += tokens / (self.fleet.rate(self.fleet.slots) * self.fleet.engines)
        self.work += intake / self.fleet.engines
        quickest = max(r / n for n, r in self.fleet.decode_rate)
        alone = tokens / max(quickest, self.fleet.rate(1)) + intake + sum(episode.tools)
        self.longest = max(self.longest, alone)
      self.queue.extend(group.episodes)
    self._begin_episodes()

  def _begin_episodes(self) -> None:
    while self.queue and self.running < self.plan.concurrency:
      self.running += 1
      episode = self.queue.popleft()
      episode.engine = min(self.engines, key=lambda e: e.members)
      episode.engine.members += 1
      self._ask(episode)

  def _ask(self, episode: _Episode) -> None:
    engine = episode.engine
    assert engine is not None
    heapq.heappush(engine.waiting, episode)
    self._admit(engine)

  def _admit(self, engine: _Engine) -> None:
    engine.advance(self.now)
    while engine.waiting and len(engine.active) < self.fleet.slots:
      engine.begin(heapq.heappop(engine.waiting))
    self._expect(engine)

  def _end_turn(self, engine: _Engine) -> None:
    engine.advance(self.now)
    end, episode = heapq.heappop(engine.active)
    engine.progress = max(engine.progress, end)  # rounding
    engine.count(episode, self.version)
    self._at(episode.tools[episode.turn], "tool", episode)
    self._admit(engine)

  def _end_tool(self, episode: _Episode) -> None:
    episode.turn += 1
    if episode.turn < len(episode.tokens):
      self._ask(episode)
      return
    assert episode.engine is not None
    episode.engine.members -= 1
    self.running -= 1
    self._begin_episodes()
    episode.group.left -= 1
    if not episode.group.left:
      self._try_batch()

  def _expect(self, engine: _Engine) -> None:
    engine.epoch += 1
    end = engine.next_end()
    if end is not None:
      self._at(end - self.now, "turn", (engine, engine.epoch))

  def _at(self, seconds: float, kind: Literal["turn", "tool", "update"], what: Any) -> None:
    heapq.heappush(self.events, (self.now + max(seconds, 0.0), next(self.ticks), kind, what))

  def _report(self) -> SimulationReport:
    updates = self.plan.steps * self.fleet.update_seconds
    tokens = sum(self.ages.values())
    slots = self.fleet.slots * self.fleet.engines
    ends = np.array([0.0, *self.ends])
    work = max(updates, self.work)
    if self.fleet.shared:
      work = updates + self.work
    return SimulationReport(
      seconds=self.now,
      step_seconds=tuple(np.diff(ends).tolist()),
      tokens=tokens,
      tokens_per_second=tokens / self.now if self.now else 0.0,
      slot_share=sum(e.slot_seconds for e in self.engines) / (slots * self.now or 1.0),
      trainer_share=updates / self.now if self.now else 0.0,
      staleness_mean=sum(a * n for a, n in self.ages.items()) / tokens if tokens else 0.0,
      staleness_max=float(max((a for a, n in self.ages.items() if n > 0), default=0)),
      least_seconds=max(work, self.longest + self.fleet.update_seconds),
    )
