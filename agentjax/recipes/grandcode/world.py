"""The code world with seats: conjecture, solve, summarise and generate tests, one stage at a time.

An episode goes through ``stages``, each of one agent. With the sampler ``ChainSampler`` an episode
plays one stage only and the world remembers what it left: the next episode of the same task and
sample plays the next stage. So a group of a stage is trained on before the group of the next stage
begins. Evaluations have no such sampler and play all stages in one episode.

The summariser may act within the solver's stage: the solver then goes on from the summary alone, on
a new branch of the record.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentjax.adapters.unit_tests.boxed.plain import decode, encode
from agentjax.adapters.unit_tests.scorer import UNIT_TESTS, UnitTests
from agentjax.config import ConfigError, PositiveInt, check
from agentjax.data import DataConfig, TaskSplits
from agentjax.recipes.grandcode.checks import judge_examples
from agentjax.recipes.grandcode.inputs import Domain, Problem, read_problem
from agentjax.recipes.grandcode.pool import (
  PoolConfig,
  PoolTest,
  TestMaker,
  expect_the_vote,
  failed_by,
  is_value,
  texts_of,
)
from agentjax.recipes.grandcode.rewards import joint_reward
from agentjax.recipes.grandcode.runner import Runner, open_runner
from agentjax.recipes.grandcode.settings import (
  AGENTS,
  HYPOTHESIS,
  SOLVER,
  SUMMARISER,
  TESTER,
  SeatsConfig,
  check_stages,
)
from agentjax.recipes.grandcode.stages import (
  CompressionStage,
  Desk,
  HypothesisStage,
  SolverStage,
  Stage,
  TesterStage,
  compression_request,
  messages,
  summary_paid,
)
from agentjax.recipes.grandcode.wrong import wrong_candidates
from agentjax.sandbox.config import DEFAULT
from agentjax.tools.build import ToolsConfig
from agentjax.trajectory.record import Reward, Status, Task, Trajectory
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.code.cheats import code_cheats
from agentjax.worlds.code.code_block import mark_code
from agentjax.worlds.code.function_tasks import FunctionTaskConfig
from agentjax.worlds.code.sources import CodeTaskSource

SAMPLE = "grandcode_sample"  # in the metadata of a task: the chain of an episode of one stage


@dataclasses.dataclass(unsafe_hash=True)
class GrandCodeConfig(WorldConfig):
  """Settings of the seats on function-writing tasks; figures are ours.

  Attributes:
    tasks: as in the world "code".
    stages: in their order; the reward of the last one is the outcome that earlier ones led to. A
      stage "summariser" compresses one trace of wrong attempts, from which the solver goes on.
    judge: "tests" knows the reference program and the task's own tests, for training. "shown" knows
      the examples alone, as in a contest: solutions are held to the examples, and to the tests of
      the pool with the answers that most accepted solutions give.
    accepted: solutions that a task's pool is made of, the latest.
    seats: what they may do and are paid.
    pool: how tests are made.
    cpu_seconds: CPU time of one call. wall_seconds: of all calls of one program.
    concurrency: programs at once.
    sandbox: name of the sandbox, in ``config.sandboxes``.
  """

  tasks: CodeTaskSource = dataclasses.field(default_factory=FunctionTaskConfig)
  stages: tuple[str, ...] = (HYPOTHESIS, SOLVER)
  judge: Literal["tests", "shown"] = "tests"
  accepted: PositiveInt = 12
  seats: SeatsConfig = dataclasses.field(default_factory=SeatsConfig)
  pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
  cpu_seconds: PositiveInt = 1
  wall_seconds: PositiveInt = 30
  concurrency: PositiveInt = 4
  sandbox: str = DEFAULT

  def validate(self, path: str = "config.world") -> None:
    super().validate(path)
    check_stages(self.stages, f"{path}.stages")
    after, tries = self.seats.summarise_after, self.seats.solutions
    check(
      not after or after < tries, f"{path}.seats.summarise_after", after, f"< solutions={tries}"
    )
    traces = SUMMARISER not in self.stages or self.judge == "tests"
    check(traces, f"{path}.judge", self.judge, "'tests' with a stage 'summariser'")

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    if data.source is None:
      self.tasks.check_data(data, f"{path}.data")

  def build(self, site: Site) -> World:
    runner = open_runner(
      site.sandboxes,
      sandbox=self.sandbox,
      cpu_seconds=self.cpu_seconds,
      wall_seconds=self.wall_seconds,
      concurrency=self.concurrency,
    )
    return GrandCodeWorld(self, runner)


@dataclasses.dataclass
class Chain:
  """What a task's stages have left so far; plain JSON.

  Attributes:
    stage: the one that is played next. rounds: how often all were played.
    left: text by agent and sample, of the present round.
    accepted: solutions that pass the examples, the latest.
    tests: of the pool: encoded arguments, kind, expected.
    without: scores of the latest solvers that saw no conjecture.
  """

  stage: int = 0
  rounds: int = 0
  left: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
  accepted: list[str] = dataclasses.field(default_factory=list)
  tests: list[list[Any]] = dataclasses.field(default_factory=list)
  without: list[float] = dataclasses.field(default_factory=list)

  def pool(self) -> list[PoolTest]:
    return [PoolTest(tuple(decode(a)), kind, expected) for a, kind, expected in self.tests]

  def keep_tests(self, tests: Sequence[PoolTest], most: int) -> None:
    """Adds tests; one of the same input takes the place of the former. The latest ``most`` stay."""
    rows = [[encode(list(t.arguments)), t.kind, t.expected] for t in tests]
    known: dict[str, list[Any]] = {}
    for row in (*self.tests, *rows):
      known.pop(json.dumps(row[0]), None)
      known[json.dumps(row[0])] = row
    self.tests = list(known.values())[-most:]


class GrandCodeWorld(World):
  """Function-writing tasks whose episodes go through stages.

  Args:
    config: see GrandCodeConfig.
    runner: owned and closed by this.
  """

  def __init__(self, config: GrandCodeConfig, runner: Runner):
    self.config, self.runner = config, runner
    self._chains: dict[int, Chain] = {}
    self._tasks: dict[int, Task] = {}

  def tasks(self, data: DataConfig) -> TaskSplits:
    """Those of the source from which a problem can be read."""
    splits = self.config.tasks.load(data)
    usable = TaskSplits(
      *([t for t in part if read_problem(t)] for part in (splits.train, splits.test))
    )
    if not usable.train:
      raise ConfigError(
        "config.world.tasks has no task with a shown assert on plain values; allowed: shown_tests "
        ">= 1."
      )
    # Of a group that was journaled before a restart no environment is made, and it is learnt from.
    self._tasks |= {t.id: t for t in usable.train}
    return usable

  def environment(self, task: Task) -> Environment:
    problem = read_problem(task)
    if problem is None:
      raise ConfigError(f"task {task.id} of {task.source!r} shows no assert on plain values.")
    self._tasks.setdefault(task.id, task)
    sample = task.metadata.get(SAMPLE)
    # A copy: what is learnt from other episodes meanwhile is for later ones.
    chain = copy.deepcopy(self.chain(task.id))
    return StagedEnvironment(self, task, problem, chain, sample)

  def chain(self, task: int) -> Chain:
    """What the stages of a task have left."""
    return self._chains.get(task, Chain())

  def maker(self, task: Task, problem: Problem, reference: str | None) -> TestMaker:
    """Makes tests for a task."""
    return TestMaker(
      Domain(problem),
      self.runner.of(problem.function),
      self.config.pool,
      reference=reference,
      salt=task.id,
    )

  def reference(self, task: Task) -> str | None:
    """A right program, where the settings allow to know one."""
    return task.answer if self.config.judge == "tests" else None

  async def learn(self, finished: Sequence[Trajectory]) -> None:
    """Keeps what the stages left, and makes the pool anew after solutions."""
    by_task: dict[int, list[Trajectory]] = {}
    for one in finished:
      by_task.setdefault(one.task_id, []).append(one)
    for number, own in sorted(by_task.items()):
      chain = self._chains.setdefault(number, Chain())
      stage = self.config.stages[chain.stage]
      left = {str(t.sample): t.answer for t in own if t.answer and t.status is Status.OK}
      single = all(tuple(t.agents) == agents_of(self.config, (stage,)) for t in own)
      # What episodes of all stages, and of a summary, leave at their end is a solution.
      kind = stage if single and stage != SUMMARISER else SOLVER
      if number in self._tasks:
        await self._learn_tests(self._tasks[number], chain, kind, list(left.values()))
      if not single:
        scores = [s for one in own if (s := _score_without(one)) is not None]
        chain.without = [*chain.without, *scores][-self.config.accepted :]
        continue
      chain.left[stage] = left if kind == stage else {}
      chain.stage += 1
      if chain.stage == len(self.config.stages):
        chain.stage, chain.rounds, chain.left = 0, chain.rounds + 1, {}

  async def _learn_tests(self, task: Task, chain: Chain, stage: str, left: Sequence[str]) -> None:
    problem = read_problem(task)
    assert problem is not None
    most = 3 * self.config.pool.kept
    if stage == TESTER and left:
      maker = self.maker(task, problem, self.reference(task))
      found = [await self.runner.inputs(code, chain.rounds) for code in left]
      domain = Domain(problem)
      inputs = [tuple(a) for own in found for a in own if domain.refusal(a) is None]
      candidates = [*chain.accepted, *self.wrong(task, problem)]
      tests = await maker.by_difference(candidates, inputs)
      if maker.reference is None and tests:
        tests, _ = await expect_the_vote(tests, candidates, self.runner.of(problem.function))
      chain.keep_tests([t for t in tests if t.expected is not None], most)
    if stage == SOLVER and left:
      seen = [await judge_examples(code, problem, self.runner) for code in dict.fromkeys(left)]
      new = [c for c, s in zip(dict.fromkeys(left), seen, strict=True) if s.outcome == "right"]
      chain.accepted = list(dict.fromkeys([*chain.accepted, *new]))[-self.config.accepted :]
      tests = await pool_of(self, task, problem, chain.accepted)
      chain.keep_tests([t for t in tests if t.expected is not None], most)
    if stage in (TESTER, SOLVER) and left and chain.accepted and self.reference(task) is None:
      await self._settle(problem, chain)

  async def _settle(self, problem: Problem, chain: Chain) -> None:
    """Gives all tests of the pool the answers of one program, the winner of the present vote.

    Otherwise tests of earlier votes could contradict later ones, and no program would pass.
    """
    ask = self.runner.of(problem.function)
    small = [t for t in chain.pool() if t.kind != "size"]
    _, winner = await expect_the_vote(small, chain.accepted, ask)
    # Large inputs last: what stands behind a call without an answer is not asked.
    tests = [*small, *(t for t in chain.pool() if t.kind == "size")]
    texts = texts_of(await ask(chain.accepted[winner or 0], [t.arguments for t in tests]))
    chain.tests = []
    settled = [
      dataclasses.replace(t, expected=x) for t, x in zip(tests, texts, strict=True) if is_value(x)
    ]
    chain.keep_tests(settled, len(settled))

  def wrong(self, task: Task, problem: Problem) -> list[str]:
    """Wrong programs that a test generator has to separate; none without a reference."""
    reference = self.reference(task)
    if reference is None:
      return []
    made = wrong_candidates(
      reference, problem.function, most=self.config.seats.wrong, seed=self.config.pool.seed
    )
    return [one.code for one in made]

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    """Those of the world "code" where the solver is the only seat; else none are known."""
    return code_cheats(task, setting) if self.config.stages == (SOLVER,) else {}

  def solution(self, task: Task, setting: Setting) -> Turns:
    return task.demonstration if self.config.stages == (SOLVER,) else ()

  def get_state(self) -> bytes:
    chains = {str(k): dataclasses.asdict(v) for k, v in sorted(self._chains.items())}
    return json.dumps(chains, sort_keys=True).encode()

  def set_state(self, state: bytes) -> None:
    found = json.loads(state) if state else {}
    self._chains = {int(k): Chain(**v) for k, v in found.items()}

  async def close(self) -> None:
    await self.runner.close()


def _score_without(episode: Trajectory) -> float | None:
  """What the solver earned in an episode without a conjecture; None in any other."""
  if HYPOTHESIS not in episode.agents or SOLVER not in episode.agents:
    return None
  if any(segment.agent == HYPOTHESIS for segment in episode.segments):
    return None
  return episode.agents[SOLVER].reward.value


async def pool_of(
  world: GrandCodeWorld, task: Task, problem: Problem, accepted: Sequence[str]
) -> list[PoolTest]:
  """Tests of all three kinds from accepted solutions; [] without any.

  Attacked are the solutions that the tests of differences accept. Without a reference the winner of
  a vote over differences takes its place for attack and size.
  """
  if not accepted:
    return []
  maker = world.maker(task, problem, world.reference(task))
  tests = await maker.by_difference(accepted)
  if maker.reference is None:
    tests, winner = await expect_the_vote(tests, accepted, world.runner.of(problem.function))
    if winner is None:  # nothing differs
      winner = 0
    maker = world.maker(task, problem, accepted[winner])
    accepted = [code for i, code in enumerate(accepted) if i != winner]
  ask, around = world.runner.of(problem.function), [t.arguments for t in tests]
  for code in accepted:
    texts = texts_of(await ask(code, around)) if around else []
    found = None if failed_by(tests, texts) else await maker.by_attack(code, around)
    if found is not None:
      tests, around = [*tests, found], [*around, found.arguments]
  return [*tests, *(await maker.by_size(accepted) if accepted else [])]


def agents_of(config: GrandCodeConfig, stages: Sequence[str]) -> tuple[str, ...]:
  """Who may act in an episode of these stages."""
  acting = {*stages}
  if SUMMARISER in acting or (SOLVER in acting and config.seats.summarise_after):
    acting |= {SUMMARISER, SOLVER}
  return tuple(agent for agent in AGENTS if agent in acting)


class Restart(Observation):
  """The whole new history of the next agent, in the place of what it has seen."""


async def restarts(episode: Any, observation: Observation) -> Observation | None:
  """The context manager of these episodes (``config.rollout.program.context``)."""
  del episode
  return observation if isinstance(observation, Restart) else None


class StagedEnvironment(Environment):
  """An episode of all stages, or of the one that is next in its chain.

  Args:
    world: settings, runner.
    task, problem: to be solved.
    chain: what earlier episodes left.
    sample: of the chain; None plays all stages.
  """

  def __init__(
    self, world: GrandCodeWorld, task: Task, problem: Problem, chain: Chain, sample: int | None
  ):
    self._world, self._task, self._problem = world, task, problem
    self._chain, self._sample = chain, sample
    self._waiting: SolverStage | None = None  # while the summariser acts within its stage
    stages = world.config.stages if sample is None else (world.config.stages[chain.stage],)
    if stages[-1] == SUMMARISER:  # somebody reads the summary
      stages = (*stages, SOLVER)
    self._left, self._answer = list(stages), ""
    self.agents = agents_of(world.config, stages)
    self._stage: Stage | None = None  # under way
    self._acted: set[str] = set()

  async def reset(self, task: Task, key: int) -> Observation:
    del task
    world, reference = self._world, self._world.reference(self._task)
    own = UnitTests.from_metadata(self._task.metadata[UNIT_TESTS]) if reference else None
    self._desk = Desk(
      self._problem,
      reference,
      own,
      self._chain.pool(),
      [*self._chain.accepted, *world.wrong(self._task, self._problem)],
      world.maker(self._task, self._problem, reference),
      world.runner,
      world.config.seats,
      key & 0x7FFFFFFF,
    )
    if self._sample is not None:
      for agent, left in self._chain.left.items():
        if str(self._sample) in left:
          self._desk.earlier[agent] = left[str(self._sample)]
    seats = world.config.seats
    alone = random.Random(f"without {key}").random() < seats.without
    if self._sample is None and seats.beta and alone and {HYPOTHESIS, SOLVER} <= {*self._left}:
      self._left.remove(HYPOTHESIS)
    return await self._begin()

  async def step(self, action: Action) -> Step:
    self._acted.add(action.agent)
    if action.truncated:
      paid = self._unpaid() | self._summary_paid(0.0)
      if SOLVER in self._left or isinstance(self._stage, SolverStage):  # no solution will come
        paid |= self._joint_paid(0.0) if action.agent != HYPOTHESIS else {}
      return Step(
        Observation(()), Reward(0.0), truncated=True, status=Status.TRUNCATED, rewards=paid
      )
    if self._waiting is not None:
      solver, self._waiting = self._waiting, None
      self._desk.earlier[SUMMARISER] = action.text.strip()
      return Step(Restart(messages(solver.open()), next=SOLVER))
    stage = self._stage
    assert stage is not None  # after reset
    reply = await stage.act(action.text)
    if reply.compress:
      assert isinstance(stage, SolverStage)
      self._waiting = stage
      request = compression_request(self._desk, reply.compress)
      return Step(Restart(messages(request), next=SUMMARISER))
    if not reply.ended:
      return Step(Observation(messages(reply.feedback), next=stage.agent))
    if stage.agent == SOLVER or self._sample is not None:
      self._answer = reply.left or self._answer
    self._desk.earlier[stage.agent] = reply.left
    reward = None if reply.reward is None else Reward(reply.reward)
    paid = {}
    if stage.agent == SOLVER:
      paid = self._summary_paid(reply.reward or 0.0) | self._joint_paid(reply.reward or 0.0)
    if self._left:
      return Step(await self._begin(), reward, rewards=paid)
    paid = self._unpaid() | paid
    return Step(Observation(()), reward, terminated=True, answer=self._answer or None, rewards=paid)

  def _unpaid(self) -> dict[str, Reward]:
    """0 for agents whose turn never came: nothing of theirs is trained on."""
    return {a: Reward(0.0) for a in self.agents if a not in self._acted}

  def _summary_paid(self, score: float) -> dict[str, Reward]:
    """What the summariser earns by what the solver makes of its summary, if it wrote one."""
    if not isinstance(self._stage, SolverStage) or SUMMARISER not in self._acted:
      return {}
    return {SUMMARISER: Reward(summary_paid(self._desk, score))}

  def _joint_paid(self, score: float) -> dict[str, Reward]:
    """What the conjecture earns besides by what the solver made of it."""
    beta = self._world.config.seats.beta
    if not beta or HYPOTHESIS not in self._acted:
      return {}
    return {HYPOTHESIS: Reward(joint_reward(score, self._chain.without, beta))}

  async def _begin(self) -> Observation:
    """The first messages of the next stage."""
    stage = self._stage = await self._make(self._left.pop(0))
    return Observation(messages(stage.open()), next=stage.agent)

  async def _make(self, agent: str) -> Stage:
    if agent == HYPOTHESIS:
      return HypothesisStage(self._desk)
    if agent == SOLVER:
      return SolverStage(self._desk)
    if agent == TESTER:
      return TesterStage(self._desk)
    return CompressionStage(self._desk, await self._trace())

  async def _trace(self) -> str:
    """Wrong attempts at the task and what became of them, the same for the whole group."""
    world, attempts = self._world, self._world.config.seats.trace_attempts
    draw = random.Random(f"trace {world.config.pool.seed} {self._task.id} {self._chain.rounds}")
    codes = [c for c in self._desk.candidates if c != self._desk.reference]
    draw.shuffle(codes)
    chosen = codes[:attempts]
    seen = await asyncio.gather(
      *(judge_examples(code, self._problem, world.runner) for code in chosen)
    )
    said = [
      f"{mark_code(code)}\n{found.failure or 'All examples are right.'}"
      for code, found in zip(chosen, seen, strict=True)
    ]
    return "\n\n".join(said) or "Nothing was tried yet."
