"""Gates: right answers are paid in full, empty answers and cheats get nothing."""

import asyncio
import os
import sys

import pytest

from agentjax.adapters.unit_tests import UnitTestConfig
from agentjax.adapters.unit_tests.canaries import canaries
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.rewards.formula import Formula
from agentjax.rewards.graph import RewardGraph
from agentjax.rollout.integrity import check_environment, play_turns
from agentjax.rollout.scoring import score
from agentjax.rollout.viewer import render
from agentjax.sandbox.interface import PythonScript, RunStatus, run_once
from agentjax.sandbox.process import ProcessSandbox, ProcessSandboxConfig
from agentjax.tools.python import PythonTool
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.world.cheats import Setting
from agentjax.worlds.code import cheats as of_code
from agentjax.worlds.code.code_block import mark_code
from agentjax.worlds.code.environment import CodeWorldConfig, build_code_environment
from agentjax.worlds.code.function_tasks import FunctionTaskConfig, function_tasks
from agentjax.worlds.code.tasks import load_mbpp, load_quixbugs
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

UNIT_TESTED = RewardConfig(
  parts=("unit_tests",), settings={"unit_tests": UnitTestConfig(cpu_seconds=10)}
)
DATA = os.environ.get("AGENTJAX_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA is not set")


def code_cheats(task):
  return of_code.code_cheats(task, Setting())


def environment(task):
  return build_code_environment(CodeWorldConfig(), ToolRegistry([]))


def check(tasks, rewards=None, cheats=code_cheats, make_environment=environment):
  graph = build_rewards(UNIT_TESTED) if rewards is None else rewards

  async def work():
    try:
      return await check_environment(
        tasks, make_environment=make_environment, rewards=graph, cheats=cheats
      )
    finally:
      await graph.close()

  return asyncio.run(work())


def broken(results):
  return [(r.source, r.task_id, r.attempt, r.reward, r.detail) for r in results if not r.held]


def data(name):
  return os.path.join(DATA, "code_tasks", name)


def some_mbpp():
  return load_mbpp(data("mbpp.jsonl")).test[:1]


@needs_data
def test_mbpp_and_quixbugs_hold_the_gates():
  def few(task):
    return {k: v for k, v in code_cheats(task).items() if k in ("always_equal", "reads_the_tests")}

  quixbugs = [t for t in load_quixbugs(data("quixbugs.jsonl")).test if "graph" in t.answer.lower()]
  tasks = [*some_mbpp(), *load_quixbugs(data("quixbugs.jsonl")).test[1:2], *quixbugs[:1]]
  assert broken(check(tasks, cheats=few)) == []


@needs_data
@pytest.mark.slow
def test_every_canary_fails_on_more_of_mbpp():
  assert broken(check(load_mbpp(data("mbpp.jsonl")).train[:20])) == []


@needs_data
@pytest.mark.slow
def test_all_of_mbpp_can_be_solved_and_not_with_nothing():
  splits = load_mbpp(data("mbpp.jsonl"))
  tasks = [*splits.train, *splits.test]
  assert len(tasks) == 974
  results = check(tasks, cheats=lambda task: {})
  # 123 tries every divisor of every number up to 9999: longer than the time of a test.
  assert {r.task_id for r in results if not r.held} - {tasks_id(splits, 123)} == set()


def tasks_id(splits, number):
  return next(t.id for t in (*splits.train, *splits.test) if t.id % 2**30 == number)


@needs_data
@pytest.mark.slow
def test_every_buggy_program_of_quixbugs_fails():
  tasks = load_quixbugs(data("quixbugs.jsonl")).test

  def buggy(task):
    return {"buggy": (Message("assistant", mark_code(task.metadata["buggy"])),)}

  results = check(tasks, cheats=buggy)
  assert all(r.held for r in results if r.attempt == "buggy")
  # The fixed programs of these two recurse without memory, for longer than the time of a test.
  names = {t.id: t.metadata["entry_points"][0] for t in tasks}
  assert {names[r.task_id] for r in results if not r.held} <= {"knapsack", "levenshtein"}


def test_a_verifier_that_trusts_the_process_it_judges_fails_the_gates():
  sandbox = ProcessSandbox(ProcessSandboxConfig())

  async def trusting(trajectory, task):
    code = f"{trajectory.answer}\n{task.metadata['unit_tests']['source']}"
    result = await run_once(sandbox, PythonScript(code))
    return float(result.status is RunStatus.OK)

  trusting.close = sandbox.close
  tasks = function_tasks(FunctionTaskConfig(), train_size=1, test_size=0, seed=3).train
  results = check(tasks, RewardGraph({"tests": trusting}, Formula("tests")))
  cheated = {attempt for _, _, attempt, _, _ in broken(results)}
  assert {"exit_at_import", "os_exit_in_call", "always_equal", "always_equal_number"} <= cheated


def test_an_environment_that_pays_nobody_or_everybody_fails_the_gates():
  tasks = function_tasks(FunctionTaskConfig(), train_size=1, test_size=0, seed=3).train
  for value, failing in ((0.0, {"reference"}), (1.0, {"empty"})):
    graph = RewardGraph({"part": lambda t, task, v=value: v}, Formula("part"))
    results = check(tasks, graph, cheats=lambda task: {})
    assert {r.attempt for r in results if not r.held} == failing


def test_a_task_that_nobody_solved_is_refused():
  with pytest.raises(ValueError, match="demonstration"):
    check([Task(1, (), "x", "made")])


def test_episodes_are_scored_when_their_environments_are_closed(run):
  """From the policy's tokens to the verdict, in the order that the verdict relies on."""
  (task,) = function_tasks(FunctionTaskConfig(), train_size=1, test_size=0, seed=3).train
  events = []
  graph = build_rewards(RewardConfig(parts=("unit_tests", "order"), weights=(1.0, 0.0)),
                        {"order": lambda t, task: events.append("scored") or 0.0})  # fmt: skip

  def make(task):
    made = environment(task)
    close = made.close

    async def closing():
      await close()
      events.append("closed")

    made.close = closing
    return made

  answers = {0: task.demonstration[0].content, 1: mark_code("def solve(numbers): return 0")}
  engine = ScriptedEngine(lambda address, turn: say(answers[address[2]]))
  trajectories = run(
    engine, [task], samples=2, make_environment=make, rewards=graph,
    max_tokens_per_turn=400, max_total_tokens=2000,
  )  # fmt: skip
  asyncio.run(graph.close())
  assert events == ["closed", "closed", "scored", "scored"]
  assert [t.reward.value for t in trajectories] == [1.0, 0.0]
  assert "8 of 8 tests passed" in "\n".join(
    render(trajectories[0], tokenizer=TOKENIZER, expected=None)
  )


def test_what_the_policy_ran_in_a_tool_is_gone_before_the_verdict():
  """Files and daemons of a tool call are neither there nor alive where tests run."""
  (task,) = function_tasks(FunctionTaskConfig(), train_size=1, test_size=0, seed=3).train
  planted = canaries(task.metadata["entry_points"])
  sandbox = ProcessSandbox(ProcessSandboxConfig())
  registry = ToolRegistry([PythonTool(sandbox, sandbox.config.limits)])
  turns = [
    Message("assistant", "", (ToolCall("python", {"code": planted[name]}),))
    for name in ("test_files", "reward_file", "daemon")
  ]
  turns.append(Message("assistant", mark_code("def solve(numbers): return None")))
  graph = build_rewards(UNIT_TESTED)

  async def work():
    def make(task):
      return build_code_environment(CodeWorldConfig(), registry)

    trajectory = await play_turns(task, turns, make)
    await score(graph, [trajectory], task, timeout=60.0)
    await graph.close()
    await registry.close()
    return trajectory

  trajectory = asyncio.run(work())
  assert len(trajectory.tools) == 3 and trajectory.reward.value == 0.0
