import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.tools.calculator import CalculatorTool
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, Status, Task, ToolCall
from agentjax.world.environment import Action
from agentjax.world.question import QuestionEnvironment

TASK = Task(7, (Message("system", "Use tools."), Message("user", "12 and 7?")), "19", "made")


class Spy:
  """A tool that does as told and remembers who called."""

  description = "does as told"
  parameters = {"type": "object", "properties": {"what": {"type": "string"}}}

  def __init__(self, name="spy"):
    self.name = name
    self.contexts: list[ToolContext] = []
    self.waiting = asyncio.Event()

  async def __call__(self, arguments, context):
    self.contexts.append(context)
    match arguments.get("what"):
      case "fail":
        return ToolResult(ToolStatus.INFRA_ERROR, "disk gone")
      case "hang":
        await asyncio.sleep(60)
      case "wait":
        await self.waiting.wait()
      case "release":
        self.waiting.set()
    return ToolResult(ToolStatus.OK, f"did {arguments.get('what')}")


def call(what):
  return ToolCall("spy", {"what": what})


def calculate(expression):
  return ToolCall("calculator", {"expression": expression})


def play(environment, *actions, task=TASK, key=5):
  """Steps of a whole episode; the last element is the last step."""

  async def run():
    await environment.reset(task, key)
    return [await environment.step(action) for action in actions]

  return asyncio.run(run())


def question(*tools, **settings_):
  return QuestionEnvironment(ToolRegistry(tools or [CalculatorTool()]), **settings_)


def test_reset_shows_the_prompt_of_the_task():
  observation = asyncio.run(question().reset(TASK, 0))
  assert observation.messages == TASK.prompt


def test_a_tool_call_is_answered_and_an_answer_ends_the_episode():
  called, answered = play(question(), Action("", (calculate("12+7"),)), Action("so\n#### 19"))
  assert called.observation.messages == (Message("tool", "19"),)
  assert (called.terminated, called.status) == (False, Status.OK)
  [record] = called.tools
  assert (record.turn, record.name, record.status, record.output) == (0, "calculator", "ok", "19")
  assert record.arguments == {"expression": "12+7"}
  assert (answered.terminated, answered.status, answered.answer) == (True, Status.OK, "19")
  assert answered.reward is None


@pytest.mark.parametrize(("reader", "answer"), [(None, None), (str.upper, "THE ANSWER IS 19.")])
def test_only_a_marked_answer_counts_unless_another_reader_is_given(reader, answer):
  environment = question(**({} if reader is None else {"read_answer": reader}))
  [step] = play(environment, Action("The answer is 19."))
  assert step.terminated
  assert step.answer == answer


def test_calls_of_one_turn_run_at_the_same_time_and_answer_in_order():
  # "wait" only returns once "release" runs: one after the other would hang.
  [step] = play(question(Spy()), Action("", (call("wait"), call("release"), call("x"))))
  assert [m.content for m in step.observation.messages] == ["did wait", "did release", "did x"]


@pytest.mark.parametrize(
  "bad",
  [
    ToolCall("oracle", {}),
    ToolCall("calculator", {"formula": "1+1"}),
    ToolCall("calculator", {"expression": "1/0"}),
    ToolCall("calculator", {}, error="no arguments"),
  ],
)
def test_a_wrong_call_is_an_observation_and_the_episode_goes_on(bad):
  wrong, right = play(question(), Action("", (bad,)), Action("", (calculate("1+1"),)))
  assert wrong.tools[0].status == "error"
  assert wrong.observation.messages[0].content == wrong.tools[0].output != ""
  assert (wrong.status, wrong.terminated, wrong.truncated) == (Status.OK, False, False)
  assert right.observation.messages == (Message("tool", "2"),)


def test_a_tool_that_hangs_is_cut_off_and_observed():
  [step] = play(question(Spy(), tool_timeout=0.05), Action("", (call("hang"),)))
  assert step.tools[0].status == "timeout"
  assert (step.status, step.terminated) == (Status.OK, False)


def test_a_tool_that_breaks_ends_the_episode_as_environment_error():
  [step] = play(question(Spy()), Action("", (call("x"), call("fail"))))
  assert (step.status, step.terminated, step.answer) == (Status.ENV_ERROR, True, None)
  assert [r.status for r in step.tools] == ["ok", "infra_error"]


def test_a_turn_cut_short_truncates_even_if_it_reads_like_an_answer():
  [step] = play(question(), Action("#### 19", truncated=True))
  assert (step.status, step.truncated, step.answer) == (Status.TRUNCATED, True, None)


def test_calls_in_the_last_turn_are_not_run():
  spy = Spy()
  first, last = play(question(spy, max_turns=2), *[Action("", (call("x"),))] * 2)
  assert first.status is Status.OK
  assert (last.status, last.truncated, last.tools) == (Status.TRUNCATED, True, ())
  assert len(spy.contexts) == 1
  [_, answered] = play(question(spy, max_turns=2), Action("", (call("x"),)), Action("#### 1"))
  assert (answered.status, answered.answer) == (Status.OK, "1")


def test_calls_get_distinct_seeds_fixed_by_key_turn_and_place():
  def seeds(key):
    spy = Spy()
    play(question(spy), Action("", (call("a"), call("b"))), Action("", (call("c"),)), key=key)
    return [c.seed for c in spy.contexts]

  assert seeds(1) == seeds(1)
  assert len({*seeds(1), *seeds(2)}) == 6


def test_stepping_outside_an_episode_is_refused():
  with pytest.raises(RuntimeError, match="before reset"):
    asyncio.run(question().step(Action("")))
  with pytest.raises(RuntimeError, match="after the episode ended"):
    play(question(), Action("#### 1"), Action("#### 1"))


@pytest.mark.parametrize("settings_", [{"max_turns": 0}, {"tool_timeout": 0.0}])
def test_impossible_limits_are_refused_by_name(settings_):
  with pytest.raises(ValueError, match=next(iter(settings_))):
    question(**settings_)


actions = st.one_of(
  st.builds(
    Action,
    st.text(max_size=8),
    st.lists(
      st.sampled_from([calculate("2*3"), calculate("1/0"), ToolCall("no", {"a": [1]})]),
      min_size=1,
      max_size=2,
    ).map(tuple),
  ),
  st.builds(Action, st.sampled_from(["#### 4", "none"])),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(actions, max_size=5), st.lists(actions, max_size=4))
def test_a_restored_snapshot_goes_on_exactly_like_the_original(before, after):
  def strip(step):  # wall time is no part of the state
    return [
      step.observation,
      step.terminated,
      step.truncated,
      step.status,
      step.answer,
      [(r.turn, r.name, r.arguments, r.status, r.output) for r in step.tools],
    ]

  async def go_on(environment):
    steps = []
    for action in after:
      try:
        steps.append(strip(await environment.step(action)))
      except RuntimeError as error:
        steps.append(str(error))
    return steps, environment.snapshot(), environment.conversation

  async def run():
    original, copy = question(max_turns=4), question(max_turns=4)
    await original.reset(TASK, 5)
    for action in before:
      try:
        await original.step(action)
      except RuntimeError:
        break
    state = original.snapshot()
    await copy.reset(TASK, 0)
    copy.restore(state)
    assert copy.snapshot() == state
    first = await go_on(original)
    assert await go_on(copy) == first
    original.restore(state)  # the same instance can go back, too
    assert await go_on(original) == first

  asyncio.run(run())


def test_a_snapshot_of_another_task_or_format_is_refused():
  async def run():
    environment = question()
    await environment.reset(TASK, 0)
    state = environment.snapshot()
    other = question()
    with pytest.raises(RuntimeError, match="before reset"):
      other.restore(state)
    await other.reset(Task(8, TASK.prompt, "", "made"), 0)
    with pytest.raises(ValueError, match="task 7 of 'made'.*task 8"):
      other.restore(state)
    with pytest.raises(ValueError, match="format 99"):
      environment.restore(json.dumps({**json.loads(state), "format": 99}).encode())

  asyncio.run(run())
