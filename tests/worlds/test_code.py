"""Writing functions: what counts as the answer, and tools before it."""

import asyncio

import pytest

from agentjax.config import ConfigError
from agentjax.tools.calculator import CalculatorTool
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, Status, Task, ToolCall
from agentjax.world.environment import Action
from agentjax.worlds.code.code_block import mark_code, read_code
from agentjax.worlds.code.environment import CodeWorldConfig, build_code_environment

TASK = Task(1, (Message("user", "Write f."),), "", "made")


@pytest.mark.parametrize(
  ("text", "code"),
  [
    ("```python\na = 1\n```", "a = 1\n"),
    ("First\n```py\na\n```\nbetter:\n``` python\nb\n```\nDone.", "b\n"),
    ("```\na\n```", "a\n"),
    ("```python\na = '''\n```", "a = '''\n"),
    ("```python\na", None),
    ("```json\n{}\n```", None),
    ("```python\n\n```", None),
    ("a = 1", None),
    ("", None),
  ],
)
def test_the_last_closed_block_is_the_code(text, code):
  assert read_code(text) == code


def test_marked_code_is_read_back():
  assert read_code("So:\n" + mark_code("def f():\n  return 1\n")) == "def f():\n  return 1\n"


def play(*actions, **settings):
  environment = build_code_environment(
    CodeWorldConfig(**settings), ToolRegistry([CalculatorTool()]), max_turns=3
  )

  async def run():
    await environment.reset(TASK, 0)
    return [await environment.step(a) for a in actions]

  return asyncio.run(run())


def test_tools_first_then_code_ends_the_episode():
  called, ended = play(
    Action("", (ToolCall("calculator", {"expression": "2*3"}),)), Action(mark_code("def f(): pass"))
  )
  assert called.observation.messages == (Message("tool", "6"),) and not called.terminated
  assert ended.terminated and ended.status is Status.OK and ended.reward is None
  assert ended.answer == "def f(): pass\n"


def test_text_without_code_or_with_too_much_is_no_answer():
  assert play(Action("I cannot."))[0].answer is None
  assert play(Action(mark_code("x" * 50)), max_characters=20)[0].answer is None
  with pytest.raises(ConfigError, match="max_characters"):
    CodeWorldConfig(max_characters=0).validate()
