"""Seats act in their order, are paid what they earned, and leave what later stages read."""

import asyncio
import dataclasses

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.data.errors import DataError
from agentjax.recipes.grandcode.inputs import read_problem
from agentjax.recipes.grandcode.one_problem import (
  OneProblemConfig,
  choose_solution,
  digest,
  problem_task,
)
from agentjax.recipes.grandcode.pool import PoolConfig
from agentjax.recipes.grandcode.settings import HYPOTHESIS, SOLVER, SUMMARISER, TESTER, SeatsConfig
from agentjax.recipes.grandcode.world import (
  SAMPLE,
  Chain,
  GrandCodeConfig,
  GrandCodeWorld,
  Restart,
  restarts,
)
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Outcome, Reward, Status
from agentjax.world.environment import Action
from agentjax.worlds.code.code_block import mark_code
from agentjax.worlds.code.function_tasks import FunctionTaskConfig
from agentjax.worlds.code.tasks import code_task
from tests.recipes.grandcode.local import LocalRunner

_RIGHT = "def top(xs):\n  return max(xs, default=0)\n"
_FIRST = "def top(xs):\n  return xs[0] if len(xs) > 3 else max(xs, default=0)\n"
_BROKEN = "def top(xs):\n  return xs"
_TASK = code_task(
  id=3,
  source="x",
  text="Give the largest.",
  reference=_RIGHT,
  tests=["assert top([3, 1]) == 3", "assert top([1, 2, 9]) == 9", "assert top([1, 2, 3, 4]) == 4"],
  shown=2,
)
_HOLDS = mark_code("def holds(arguments, result):\n  return result in (arguments[0] or [0])")
_ALWAYS = mark_code("def holds(arguments, result):\n  return True")


def _world(**changes):
  config = GrandCodeConfig(pool=PoolConfig(proposals=20, sizes=(400,)), **changes)
  config.validate()
  return GrandCodeWorld(config, LocalRunner())


def _start(world, sample=None, task=_TASK):
  if sample is not None:
    task = dataclasses.replace(task, metadata={**task.metadata, SAMPLE: sample})
  environment = world.environment(task)
  return environment, asyncio.run(environment.reset(task, 5))


def _say(environment, agent, text, **more):
  return asyncio.run(environment.step(Action(text, agent=agent, **more)))


def test_an_episode_goes_from_conjecture_to_solution_and_pays_each():
  environment, first = _start(_world())
  assert environment.agents == (HYPOTHESIS, SOLVER) and first.next == HYPOTHESIS
  step = _say(environment, HYPOTHESIS, f"It is one of them.\n{_HOLDS}")
  assert step.reward == Reward(1.0) and step.observation.next == SOLVER
  shown = step.observation.messages[0].content
  assert "It is one of them." in shown and "held on 8 of 8 small cases" in shown
  step = _say(environment, SOLVER, mark_code(_RIGHT))
  assert step.terminated and step.reward == Reward(1.0) and step.answer == _RIGHT


def test_a_counterexample_is_shown_and_a_second_conjecture_is_paid():
  environment, _ = _start(_world())
  wrong = mark_code("def holds(arguments, result):\n  return result == arguments[0][0]")
  step = _say(environment, HYPOTHESIS, wrong)
  assert step.reward is None and step.observation.next == HYPOTHESIS
  assert "for the input ([1, 2, 9]) the result is 9" in step.observation.messages[0].content
  assert _say(environment, HYPOTHESIS, _ALWAYS).reward == Reward(0.0)


@pytest.mark.parametrize(
  ("text", "reward"),
  [
    (mark_code(_FIRST), 0.0),  # the hidden assert
    (mark_code(_BROKEN), 0.0),
    ("no code", 0.0),
    (mark_code("def top(xs:"), 0.0),
    (mark_code("def top(xs):\n  raise Hangs"), 0.1),
    (mark_code(_RIGHT), 1.0),
  ],
)
def test_a_solution_is_held_to_examples_and_hidden_tests(text, reward):
  environment, _ = _start(_world(stages=(SOLVER,), seats=SeatsConfig(solutions=1)))
  step = _say(environment, SOLVER, text)
  assert step.terminated and step.reward == Reward(reward)


def test_a_failed_try_is_told_of_the_examples_alone():
  environment, _ = _start(_world(stages=(SOLVER,)))
  step = _say(environment, SOLVER, mark_code(_BROKEN))
  said = step.observation.messages[0].content
  assert "for the input ([3, 1]) the answer was" in said and "value 3" in said
  step = _say(environment, SOLVER, mark_code(_FIRST))  # right on all that is shown
  assert step.terminated and not step.observation.messages


def test_a_cut_turn_ends_the_episode_and_pays_nobody():
  environment, _ = _start(_world())
  step = _say(environment, HYPOTHESIS, "It", truncated=True)
  assert step.truncated and step.status is Status.TRUNCATED and step.reward == Reward(0.0)
  assert step.rewards == {SOLVER: Reward(0.0)}


def test_after_failures_the_solver_goes_on_from_a_summary_alone():
  seats = SeatsConfig(solutions=3, summarise_after=1, summary_words=3, summary_cost=0.5)
  environment, _ = _start(_world(stages=(SOLVER,), seats=seats))
  assert environment.agents == (SOLVER, SUMMARISER)
  step = _say(environment, SOLVER, mark_code(_BROKEN))
  assert isinstance(step.observation, Restart) and step.observation.next == SUMMARISER
  assert "return xs" in step.observation.messages[0].content
  step = _say(environment, SUMMARISER, "Take the largest, not the list.")
  shown = step.observation.messages[0].content
  assert isinstance(step.observation, Restart) and step.observation.next == SOLVER
  assert "Take the largest" in shown and "return xs" not in shown
  assert asyncio.run(restarts(None, step.observation)) is step.observation
  step = _say(environment, SOLVER, mark_code(_RIGHT))
  assert step.reward == Reward(1.0)
  assert step.rewards == {SUMMARISER: Reward(0.5)}  # six words are twice the budget


def test_the_second_summary_builds_on_the_first():
  seats = SeatsConfig(solutions=4, summarise_after=1)
  environment, _ = _start(_world(stages=(SOLVER,), seats=seats))
  _say(environment, SOLVER, mark_code(_BROKEN))
  _say(environment, SUMMARISER, "First lesson.")
  step = _say(environment, SOLVER, "no code at all")
  asked = step.observation.messages[0].content
  assert "Summary so far:\nFirst lesson." in asked and "no code at all" in asked
  assert "return xs" not in asked


def test_a_single_compression_is_paid_by_who_reads_it_and_its_trace_is_one_for_the_group():
  world = _world(stages=(SUMMARISER,), seats=SeatsConfig(solutions=1))
  traces = set()
  for key in range(3):
    environment = world.environment(_TASK)
    traces.add(asyncio.run(environment.reset(_TASK, key)).messages[0].content)
  assert len(traces) == 1 and "```python" in traces.pop()
  step = _say(environment, SUMMARISER, "Use max.")
  assert step.reward is None and step.observation.next == SOLVER
  assert "Use max." in step.observation.messages[0].content
  assert _say(environment, SOLVER, mark_code(_RIGHT)).rewards == {SUMMARISER: Reward(1.0)}


_GOOD = mark_code("def inputs(seed):\n  return [([1, 2, 3, 4],), ([2, 1],), ([5, 6, 7, 8, seed],)]")
_HUGE = mark_code("def inputs(seed):\n  return [([10**5000],)]")
_INVALID = mark_code("def inputs(seed):\n  return [('a',), ([1], 2), 7, ([1, 2, 3, 5],)]")


def test_a_generator_is_paid_for_separating_and_told_of_invalid_inputs():
  world = _world(stages=(TESTER,), seats=SeatsConfig(generators=2))
  environment, _ = _start(world)
  step = _say(environment, TESTER, _INVALID)
  assert not step.terminated and "a str where examples have list" in str(step.observation)
  good = _say(environment, TESTER, _GOOD).reward.value
  step = _say(_start(world)[0], TESTER, _HUGE)
  assert not step.terminated and "a number of more than" in str(step.observation)
  environment, _ = _start(world)
  _say(environment, TESTER, _INVALID)
  bad = _say(environment, TESTER, _INVALID).reward.value
  assert 0 <= bad < good


@pytest.mark.parametrize("body", ["raise Hangs", "return 5", "return []", ""])
def test_a_generator_that_gives_no_inputs_earns_nothing(body):
  text = mark_code(f"def inputs(seed):\n  {body}")
  environment, _ = _start(_world(stages=(TESTER,), seats=SeatsConfig(generators=1)))
  step = _say(environment, TESTER, text)
  assert step.terminated and step.reward == Reward(0.0)


def _played(world, stage, answers, task=_TASK, status=Status.OK):
  made = []
  for sample, answer in enumerate(answers):
    builder = TrajectoryBuilder(step=1, task_id=task.id, sample=sample, source=task.source)
    agents = world.environment(task).agents if stage is None else (stage,)
    outcomes = {agent: Outcome(True, Reward(1.0), {}) for agent in agents}
    made.append(builder.build(answer=answer, agents=outcomes, status=status))
  return made


def test_the_next_episode_of_a_chain_plays_the_next_stage_with_what_its_own_left():
  world = _world()
  environment, first = _start(world, sample=1)
  assert environment.agents == (HYPOTHESIS,) and first.next == HYPOTHESIS
  assert _say(environment, HYPOTHESIS, _HOLDS).terminated
  asyncio.run(world.learn(_played(world, HYPOTHESIS, ["left by 0", "left by 1", None])))
  for sample, seen in ((0, "left by 0"), (1, "left by 1")):
    environment, first = _start(world, sample=sample)
    assert environment.agents == (SOLVER,) and seen in first.messages[0].content
  assert "conjecture" not in _start(world, sample=2)[1].messages[0].content
  assert _start(world)[0].agents == (HYPOTHESIS, SOLVER)  # an evaluation plays all
  asyncio.run(world.learn(_played(world, SOLVER, [_RIGHT, _FIRST, _BROKEN])))
  chain = world.chain(3)
  assert (chain.stage, chain.rounds, chain.left) == (0, 1, {})
  assert chain.accepted == [_RIGHT, _FIRST]  # the examples refuse the third


def test_what_accepted_solutions_disagree_on_becomes_the_pool_of_later_rounds():
  world = _world(stages=(SOLVER,), judge="shown", seats=SeatsConfig(solutions=1))
  environment, _ = _start(world, sample=0)
  assert _say(environment, SOLVER, mark_code(_FIRST)).reward == Reward(1.0)  # an empty pool
  asyncio.run(world.learn(_played(world, SOLVER, [_RIGHT, _FIRST, _RIGHT + "\n"])))
  assert {t.kind for t in world.chain(3).pool()} >= {"difference"}
  for code, reward in ((_FIRST, 0.0), (_RIGHT, 1.0)):
    environment, _ = _start(world, sample=0)
    assert _say(environment, SOLVER, mark_code(code)).reward == Reward(reward)


def test_when_the_vote_turns_the_pool_turns_with_it():
  world = _world(stages=(SOLVER,), judge="shown", seats=SeatsConfig(solutions=1))
  _start(world, sample=0)
  asyncio.run(world.learn(_played(world, SOLVER, [_FIRST, _RIGHT, _FIRST + "\n"])))

  def rewards():
    steps = [_say(_start(world, sample=0)[0], SOLVER, mark_code(c)) for c in (_FIRST, _RIGHT)]
    return [step.reward.value for step in steps]

  assert rewards() == [1.0, 0.0]  # a majority may be wrong
  asyncio.run(world.learn(_played(world, SOLVER, [_RIGHT + "\n" * n for n in range(1, 4)])))
  assert rewards() == [0.0, 1.0]
  inputs = [repr(test.arguments) for test in world.chain(3).pool()]
  assert inputs and len(set(inputs)) == len(inputs)


@pytest.mark.parametrize(("speed", "reward"), [(True, 0.75), (False, 1.0)])
def test_a_right_solution_is_paid_for_its_speed_on_a_large_input(speed, reward):
  class Timed(LocalRunner):
    def of(self, function):
      ask = super().of(function)

      async def timed(code, inputs):
        large = len(inputs[0][0]) > 300
        seconds = (2.0 if code == _RIGHT else 0.2) if large else 0.0
        return [dataclasses.replace(a, seconds=seconds) for a in await ask(code, inputs)]

      return timed

  seats = SeatsConfig(solutions=1, speed=speed, full_speedup=100.0)
  world = _world(stages=(SOLVER,), seats=seats)
  world.runner = Timed()
  world.environment(_TASK)
  slow = "def top(xs):\n  if len(xs) > 300: raise Hangs\n  return max(xs, default=0)\n"
  asyncio.run(world.learn(_played(world, SOLVER, [slow])))  # a large input catches it
  assert [t.kind for t in world.chain(3).pool()] == ["size"]
  environment, _ = _start(world)
  fast = mark_code(_RIGHT + "# ten times as fast\n")
  assert _say(environment, SOLVER, fast).reward == Reward(reward)


def test_the_joint_reward_compares_with_solvers_that_saw_no_conjecture():
  world = _world(seats=SeatsConfig(beta=0.5, without=0.5))
  first = {}
  for key in range(20):
    environment = world.environment(_TASK)
    first[asyncio.run(environment.reset(_TASK, key)).next] = environment
  assert set(first) == {HYPOTHESIS, SOLVER}
  step = _say(first[SOLVER], SOLVER, mark_code(_RIGHT))
  assert step.rewards == {HYPOTHESIS: Reward(0.0)}  # it had no turn, so nothing learns from this
  alone = _played(world, None, [_RIGHT, _FIRST])
  for one, value in zip(alone, (1.0, 0.0), strict=True):
    one.agents[SOLVER] = Outcome(True, Reward(value), {})
  asyncio.run(world.learn(alone))
  assert world.chain(3).without == [1.0, 0.0] and world.chain(3).stage == 0
  environment = world.environment(_TASK)
  key = next(k for k in range(20) if asyncio.run(
    world.environment(_TASK).reset(_TASK, k)).next == HYPOTHESIS)  # fmt: skip
  asyncio.run(environment.reset(_TASK, key))
  _say(environment, HYPOTHESIS, _HOLDS)
  assert _say(environment, SOLVER, mark_code(_RIGHT)).rewards == {HYPOTHESIS: Reward(0.25)}
  for agent, paid in ((SOLVER, {HYPOTHESIS: Reward(-0.25)}), (HYPOTHESIS, {SOLVER: Reward(0.0)})):
    environment = world.environment(_TASK)
    asyncio.run(environment.reset(_TASK, key))
    if agent == SOLVER:
      _say(environment, HYPOTHESIS, _HOLDS)
    assert _say(environment, agent, "So", truncated=True).rewards == paid


def test_state_survives_a_checkpoint_and_nothing_is_learnt_from_failures():
  world, twin = _world(), _world()
  _start(world, sample=0)
  asyncio.run(world.learn(_played(world, HYPOTHESIS, ["a", "b"])))
  twin.set_state(world.get_state())
  assert twin.chain(3) == world.chain(3) != Chain()
  asyncio.run(world.learn(_played(world, SOLVER, [_RIGHT], status=Status.ENV_ERROR)))
  assert world.chain(3).accepted == [] and world.chain(3).rounds == 1


def test_a_group_that_was_played_before_a_restart_is_learnt_from():
  world = _world(stages=(SOLVER,), tasks=FunctionTaskConfig(shown_tests=1))
  task = world.tasks(DataConfig(train_size=1, test_size=1)).train[0]
  asyncio.run(world.learn(_played(world, SOLVER, [task.answer], task)))  # it made no environment
  assert world.chain(task.id).accepted == [task.answer]


def test_only_tasks_that_show_a_plain_assert_are_played(tmp_path):
  data = DataConfig(train_size=3, test_size=2)
  shown = _world(tasks=FunctionTaskConfig(shown_tests=1)).tasks(data)
  assert (len(shown.train), len(shown.test)) == (3, 2)
  with pytest.raises(ConfigError, match="shown_tests >= 1"):
    _world(tasks=FunctionTaskConfig(shown_tests=0)).tasks(data)
  (tmp_path / "problem.txt").write_text(_PROBLEM)
  one = _world(tasks=OneProblemConfig(str(tmp_path / "problem.txt")), judge="shown").tasks(data)
  assert [t.metadata["entry_points"] for t in (*one.train, *one.test)] == [["top"]] * 2
  with pytest.raises(ConfigError, match="a text file with a problem"):
    OneProblemConfig().validate()


def test_settings_that_cannot_be_are_refused():
  for changes, message in (
    (dict(stages=("solver", "solver")), "stages"),
    (dict(stages=()), "stages"),
    (dict(stages=("nobody",)), "stages"),
    (dict(stages=(SUMMARISER,), judge="shown"), r"'tests' with a stage 'summariser'"),
    (dict(seats=SeatsConfig(solutions=2, summarise_after=2)), "summarise_after"),
  ):
    with pytest.raises(ConfigError, match=message):
      GrandCodeConfig(**changes).validate()


_PROBLEM = "Give the largest.\n\nassert top([3, 1]) == 3\nassert top([1, 2, 9]) == 9\n"


def test_the_solution_of_one_problem_is_that_of_most_accepted_ones():
  world = _world(stages=(SOLVER,), judge="shown")
  task = problem_task(_PROBLEM, "problem.txt")
  drawn = [_BROKEN, _FIRST, _RIGHT, "def top(xs:", _RIGHT, _RIGHT + "\n"]
  chosen = asyncio.run(choose_solution(world, task, drawn))
  assert (chosen.code, chosen.accepted, chosen.votes) == (_RIGHT, 3, 2)
  assert chosen.tests["difference"] >= 1
  assert asyncio.run(choose_solution(world, task, [_BROKEN])).code is None
  assert asyncio.run(choose_solution(world, task, [])).code is None


@pytest.mark.parametrize("text", ["Do it.", "Do it.\nassert f(x) == 3", "assert (", ""])
def test_a_problem_without_a_plain_assert_is_refused(text):
  with pytest.raises(DataError, match="assert FUNCTION"):
    problem_task(text, "problem.txt")


def test_the_file_of_a_problem_may_begin_with_a_mark_and_must_be_text(tmp_path):
  file = tmp_path / "problem.txt"
  file.write_bytes(b"\xef\xbb\xbfassert top([3]) == 3\r\nassert top([4]) == 4")
  (task,) = OneProblemConfig(str(file)).load(DataConfig()).train
  assert [e.expected for e in read_problem(task).examples] == [3, 4]
  file.write_bytes(b"caf\xe9\nassert top([3]) == 3")
  for path, message in ((file, r"problem\.txt.*not UTF-8"), (tmp_path, "cannot be read")):
    with pytest.raises(DataError, match=message):
      OneProblemConfig(str(path)).load(DataConfig())


def test_a_run_does_not_go_on_with_another_problem(tmp_path):
  file = tmp_path / "problem.txt"
  file.write_text(_PROBLEM)
  config = OneProblemConfig(str(file), digest(_PROBLEM))
  assert config.load(DataConfig()).train
  file.write_text(_PROBLEM + "assert top([5]) == 5\n")
  with pytest.raises(DataError, match="no longer the problem"):
    config.load(DataConfig())
