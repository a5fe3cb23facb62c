"""The stages of an episode: what a seat is shown, and what becomes of what it writes.

A stage belongs to one agent. ``open`` gives the messages it begins with; ``act`` takes a turn of
the agent and says what follows. What a finished stage leaves is text that later stages are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from agentjax.adapters.unit_tests.scorer import UnitTests
from agentjax.recipes.grandcode.checks import (
  HOLDS,
  Judgement,
  SmallCase,
  check_conjecture,
  judge_examples,
  judge_own,
  judge_tests,
  run_generator,
  small_cases,
)
from agentjax.recipes.grandcode.inputs import Problem
from agentjax.recipes.grandcode.pool import PoolTest, TestMaker
from agentjax.recipes.grandcode.rewards import (
  generator_reward,
  hypothesis_reward,
  solution_reward,
  summary_reward,
)
from agentjax.recipes.grandcode.runner import GENERATOR, Runner
from agentjax.recipes.grandcode.settings import (
  HYPOTHESIS,
  SOLVER,
  SUMMARISER,
  TESTER,
  SeatsConfig,
)
from agentjax.trajectory.record import Message
from agentjax.worlds.code.code_block import read_code

_MOST_LEFT = 4_000  # characters of a stage's text that later stages are shown

_CONJECTURE = (
  "State a conjecture about the structure of right results, first in one sentence, then as code in "
  f"one ```python block that defines `{HOLDS}(arguments, result)`. It returns True where the "
  "result may be right for the list of arguments and False where it is wrong. It is checked on "
  "small cases."
)
_GENERATE = (
  f"Write a generator of test inputs in one ```python block that defines `{GENERATOR}(seed)`. It "
  "returns a list of tuples, each with the arguments of one call. Good inputs are valid and tell "
  "wrong programs from right ones: edges, special cases, large sizes."
)
_COMPRESS = (
  "Others have worked on this. Write a summary that lets somebody else go on without reading it: "
  "what was tried, which inputs failed and why, what to do next. Leave out all else."
)


@dataclasses.dataclass(frozen=True)
class Reply:
  """What follows a turn.

  Attributes:
    ended: the stage is over.
    feedback: for the same agent, who goes on.
    reward: of the agent, when the stage is over.
    left: for later stages, when it is over.
    compress: a trace that the summariser is to compress before the agent goes on, or "".
  """

  ended: bool
  feedback: str = ""
  reward: float | None = None
  left: str = ""
  compress: str = ""


@dataclasses.dataclass
class Desk:
  """What the stages of one episode share.

  Attributes:
    problem: to be solved.
    reference: a right program; None at test time.
    own: the task's own tests; None at test time.
    tests: of the pool, with expected answers.
    candidates: programs that are wrong, or not known to be right, for the test generator.
    maker: of tests.
    runner: of the sandbox.
    config: see SeatsConfig.
    seed: of the episode.
    earlier: what earlier stages left, by agent.
  """

  problem: Problem
  reference: str | None
  own: UnitTests | None
  tests: Sequence[PoolTest]
  candidates: Sequence[str]
  maker: TestMaker
  runner: Runner
  config: SeatsConfig
  seed: int
  earlier: dict[str, str] = dataclasses.field(default_factory=dict)

  async def judge_hidden(self, code: str) -> Judgement:
    """A solution against the pool, and the task's own tests where they may be used."""
    found = await judge_tests(code, self.problem, self.tests, self.runner)
    if found.outcome == "right" and self.own is not None:
      found = await judge_own(code, self.own, self.runner)
    return found

  async def times(self, code: str) -> tuple[float, float]:
    """CPU seconds of code and reference on the largest input of the pool; 0, 0 without both."""
    large = [t for t in self.tests if t.kind == "size"]
    if self.reference is None or not large or not self.config.speed:
      return 0.0, 0.0
    ask, inputs = self.runner.of(self.problem.function), [large[-1].arguments]
    own, brute = [(await ask(one, inputs))[0] for one in (code, self.reference)]
    return own.seconds, brute.seconds


class Stage(Protocol):
  """One stage of an episode."""

  agent: str

  def open(self) -> str:
    """What the agent is shown first."""
    ...

  async def act(self, text: str) -> Reply:
    """What follows its turn."""
    ...


class HypothesisStage:
  """A conjecture, checked on small cases; a counter-example is shown and another try given."""

  agent = HYPOTHESIS

  def __init__(self, desk: Desk):
    self._desk, self._tries = desk, 0
    self._cases: list[SmallCase] | None = None  # the same for all tries

  def open(self) -> str:
    return f"{self._desk.problem.text}\n\nDo not solve it. {_CONJECTURE}"

  async def act(self, text: str) -> Reply:
    desk, config = self._desk, self._desk.config
    self._tries += 1
    if self._cases is None:
      self._cases = await small_cases(
        desk.problem, desk.runner, desk.reference, count=config.checks, seed=desk.seed
      )
    found = await check_conjecture(read_code(text), self._cases, desk.runner)
    if found.passed < found.checks and self._tries < config.conjectures:
      return Reply(False, f"It does not hold: {found.counterexample}. State a better conjecture.")
    reward = hypothesis_reward(found.passed, found.checks, caught=found.caught, decoys=found.decoys)
    note = f"(It held on {found.passed} of {found.checks} small cases.)"
    return Reply(True, reward=reward, left=f"{text.strip()[:_MOST_LEFT]}\n{note}")


class SolverStage:
  """A solution, tried on the examples; after some failures the trace is compressed."""

  agent = SOLVER

  def __init__(self, desk: Desk):
    self._desk, self._tries = desk, 0
    self._trace: list[str] = []

  def open(self) -> str:
    parts = [self._desk.problem.text]
    if HYPOTHESIS in self._desk.earlier:
      parts.append(f"A conjecture about it, which may be wrong:\n{self._desk.earlier[HYPOTHESIS]}")
    if SUMMARISER in self._desk.earlier:
      parts.append(f"What was found out so far:\n{self._desk.earlier[SUMMARISER]}")
    return "\n\n".join(parts)

  async def act(self, text: str) -> Reply:
    desk, code = self._desk, read_code(text)
    self._tries += 1
    seen = await judge_examples(code, desk.problem, desk.runner)
    if seen.outcome != "right" and self._tries < desk.config.solutions:
      self._trace += [text.strip(), seen.failure]
      after = desk.config.summarise_after
      if after and self._tries % after == 0:
        trace, self._trace = "\n\n".join(self._trace), []
        return Reply(False, compress=trace)
      return Reply(False, f"{seen.failure}. Answer again with the whole code.")
    found, own, brute = seen, 0.0, 0.0
    if code is not None and found.outcome == "right":
      found = await desk.judge_hidden(code)
      if found.outcome == "right":
        own, brute = await desk.times(code)
    reward = solution_reward(
      found.outcome,
      seconds=own,
      brute_seconds=brute,
      full_speedup=desk.config.full_speedup,
      late=desk.config.late,
    )
    return Reply(True, reward=reward, left=code or "")


class CompressionStage:
  """One compression of a trace; the solver goes on from the summary, which pays for both."""

  agent = SUMMARISER

  def __init__(self, desk: Desk, trace: str):
    self._desk, self._trace = desk, trace

  def open(self) -> str:
    return compression_request(self._desk, self._trace)

  async def act(self, text: str) -> Reply:
    return Reply(True, left=text.strip()[:_MOST_LEFT])


class TesterStage:
  """A generator of inputs, paid for the wrong candidates that its valid inputs separate."""

  agent = TESTER

  def __init__(self, desk: Desk):
    self._desk, self._tries = desk, 0

  def open(self) -> str:
    return f"{self._desk.problem.text}\n\nDo not solve it. {_GENERATE}"

  async def act(self, text: str) -> Reply:
    desk, code = self._desk, read_code(text)
    self._tries += 1
    found = await run_generator(
      code, desk.problem, desk.candidates, desk.maker, desk.runner, seed=desk.seed
    )
    if found.refusal and self._tries < desk.config.generators:
      return Reply(False, f"An input is not valid: {found.refusal}. Write a better generator.")
    desk.tests = [*desk.tests, *found.tests]
    reward = generator_reward(
      found.valid,
      found.proposed,
      found.separated,
      found.wrong,
      invalid_cost=desk.config.invalid_cost,
    )
    return Reply(True, reward=reward, left=code or "")


def compression_request(desk: Desk, trace: str) -> str:
  """What the summariser is shown: the problem, the summary so far, and what was done since."""
  parts = [desk.problem.text, _COMPRESS]
  if SUMMARISER in desk.earlier:
    parts.append(f"Summary so far:\n{desk.earlier[SUMMARISER]}")
  return "\n\n".join([*parts, f"What was done:\n{trace[-desk.config.trace_characters :]}"])


def summary_paid(desk: Desk, score: float) -> float:
  """The reward of the summary that the solver read last; see ``rewards.summary_reward``.

  Words are counted in the place of tokens, as environments know none.
  """
  words = len(desk.earlier.get(SUMMARISER, "").split())
  return summary_reward(score, words, desk.config.summary_words, cost=desk.config.summary_cost)


def messages(text: str) -> tuple[Message, ...]:
  return (Message("user", text),)
