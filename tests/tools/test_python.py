"""The Python tool and the configuration of tools."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentjax.config import ConfigError
from agentjax.sandbox import (
  Capabilities,
  ProcessSandbox,
  ProcessSandboxConfig,
  SandboxError,
  Sandboxes,
  SandboxLimits,
)
from agentjax.tools import ToolContext, ToolResult, ToolsConfig, ToolStatus, build_tools
from agentjax.tools.python import PythonSessionTool, PythonToolConfig
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.world.environment import Action
from agentjax.world.question import QuestionEnvironment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
Python = Callable[..., ToolResult]


def build(sandbox: ProcessSandboxConfig, **settings: Any) -> ToolRegistry:
  config = python_with(sandbox="small", **settings)
  return build_tools(config, sandboxes=Sandboxes({"default": sandbox, "small": sandbox}))


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
  limits = SandboxLimits(memory_bytes=2**27, output_kill_bytes=2**20)
  registry = build(ProcessSandboxConfig(limits=limits), max_characters=100)

  def run(code: str, timeout: float = 10.0, seed: int = 0) -> ToolResult:
    request = ToolCall("python", {"code": code})
    return asyncio.run(registry.call(request, ToolContext("e", seed, timeout)))

  yield run
  asyncio.run(registry.close())


@pytest.mark.parametrize(
  ("code", "status", "output"),
  [
    ("sum(range(101))", ToolStatus.OK, "5050"),
    ("print('a')\nprint('b')\n'c'", ToolStatus.OK, "a\nb\n'c'"),
    ("x = 1", ToolStatus.OK, "(no output)"),
    ("import sys; sys.exit(4)", ToolStatus.ERROR, "error: exit code 4"),
    ("import os; os.abort()", ToolStatus.KILLED, "error: ended by signal 6"),
  ],
)
def test_policy_sees_output_value_and_end(
  python: Python, code: str, status: ToolStatus, output: str
) -> None:
  result = python(code)
  assert (result.status, result.output) == (status, output)


def test_errors_show_the_traceback(python: Python) -> None:
  result = python("print('first')\n1 / 0")
  assert result.status is ToolStatus.ERROR
  assert result.output.startswith("first\nTraceback")
  assert result.output.endswith("ZeroDivisionError: division by zero")


def test_timeout_keeps_what_was_printed(python: Python) -> None:
  result = python("print('begun')\nwhile True: pass", timeout=1.0)
  assert result.status is ToolStatus.TIMEOUT
  assert result.output == "begun\nerror: did not end within 0.9 s"


def test_long_output_is_clipped_in_the_middle(python: Python) -> None:
  result = python("print('a' * 1000 + 'z' * 1000)")
  assert result.status is ToolStatus.OK
  assert result.output == "a" * 50 + "\n[... 1900 characters left out ...]\n" + "z" * 50


def test_endless_output_memory_and_network_come_back_as_kinds(python: Python) -> None:
  assert python("while True: print('x' * 1000)").status is ToolStatus.OUTPUT_LIMIT
  assert python("x = bytearray(10**9)").status is ToolStatus.MEMORY_LIMIT
  network = python("import socket\nsocket.create_connection(('127.0.0.1', 80))")
  assert network.status is ToolStatus.ERROR
  assert "Error" in network.output


def test_calls_start_afresh_and_draw_by_their_seed(python: Python) -> None:
  python("leftover = 1\nopen('file', 'w').write('x')")
  assert python("'leftover' in globals(), __import__('os').listdir('.')").output == "(False, [])"
  draw = "import random\nrandom.random()"
  assert python(draw, seed=1).output == python(draw, seed=1).output
  assert python(draw, seed=1).output != python(draw, seed=2).output


def test_cancelled_call_ends_the_program() -> None:
  async def body() -> ToolResult:
    registry = build(ProcessSandboxConfig(concurrency=1))

    def ask(code: str) -> Any:
      return registry.call(ToolCall("python", {"code": code}), ToolContext("e", 0, 30.0))

    task = asyncio.create_task(ask("while True: pass"))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    result = await ask("'free again'")  # the only place is free, so the first run is over
    await registry.close()
    return result

  assert asyncio.run(body()).output == "'free again'"


@pytest.fixture
def notebook() -> Iterator[Callable[..., Any]]:
  """Makes registries whose Python tool keeps an interpreter an episode, for one event loop."""
  registries = []

  def make(**settings: Any) -> Any:
    limits = SandboxLimits(wall_seconds=2.0, memory_bytes=2**27)
    registries.append(build(ProcessSandboxConfig(limits=limits), stateful=True, **settings))
    return registries[-1]

  yield make
  for registry in registries:
    asyncio.run(registry.close())


def _ask(registry: Any, code: str, episode: str = "e", timeout: float = 20.0) -> Any:
  return registry.call(ToolCall("python", {"code": code}), ToolContext(episode, 0, timeout))


def _live_boxes(registry: Any) -> int:
  return len(registry.tools[0]._sandbox.boxes)


def test_episode_keeps_its_names_and_files_and_shares_them_with_no_other(notebook: Any) -> None:
  async def body() -> None:
    registry = notebook()
    await _ask(registry, "x = 20\nopen('f', 'w').write('kept')")
    assert (await _ask(registry, "x + 1, open('f').read()")).output == "(21, 'kept')"
    other = await _ask(registry, "import os\nprint(os.listdir('.'))\nx", episode="other")
    assert other.output.startswith("[]\n")
    assert "NameError" in other.output
    # Calls of one turn are cells one after another, in their order.
    both = await asyncio.gather(_ask(registry, "x += 1\nx"), _ask(registry, "x *= 2\nx"))
    assert [r.output for r in both] == ["21", "42"]

  asyncio.run(body())


def test_interpreter_that_a_cell_took_with_it_is_replaced_and_the_policy_told(
  notebook: Any,
) -> None:
  async def body() -> None:
    registry = notebook()
    await _ask(registry, "x = 1\nopen('f', 'w').write('kept')")
    late = await _ask(registry, "print('begun')\nwhile True: pass", timeout=0.5)
    assert late.status is ToolStatus.TIMEOUT
    assert late.output.startswith("begun\nerror: did not end within 0.4 s\n[the interpreter ended")
    after = await _ask(registry, "print(open('f').read())\n'x' in globals()")
    assert after.output == (
      "[this is a new interpreter: names and imports of earlier calls are gone]\nkept\nFalse"
    )
    assert (await _ask(registry, "2")).output == "2"  # told once

  asyncio.run(body())


def test_sessions_end_with_their_episodes_and_are_bounded_in_number(notebook: Any) -> None:
  async def body() -> None:
    registry = notebook(max_sessions=2)
    for episode in "abc":
      await _ask(registry, "x = 1", episode)
    assert _live_boxes(registry) == 2  # the one longest unused made room
    assert (await _ask(registry, "x", "c")).output == "1"
    back = await _ask(registry, "'x' in globals()", "a")
    assert back.output.endswith("names, imports and files of earlier calls are gone]\nFalse")
    for episode in "abc":
      await registry.end_episode(episode)
    assert _live_boxes(registry) == 0
    assert (await _ask(registry, "'x' in globals()", "c")).output == "False"

  asyncio.run(body())


def test_session_unused_for_long_is_closed(notebook: Any) -> None:
  async def body() -> None:
    registry = notebook(idle_seconds=0.05)
    await _ask(registry, "x = 1", "a")
    await asyncio.sleep(0.1)
    await _ask(registry, "x = 1", "b")
    assert _live_boxes(registry) == 1

  asyncio.run(body())


def test_environment_ends_its_session_and_a_restored_one_makes_its_calls_again(
  notebook: Any,
) -> None:
  task = Task(7, (Message("user", "?"), Message("assistant", "!")), "", "s")

  def call(code: str) -> Action:
    return Action("", (ToolCall("python", {"code": code}),))

  async def body() -> None:
    registry = notebook()
    first, second = QuestionEnvironment(registry), QuestionEnvironment(registry)
    await first.reset(task, 3)
    drawn = (await first.step(call("import random\nx = random.random()\nx"))).observation
    await first.step(call("y = 1"))
    state = first.snapshot()
    await first.step(call("x, y = 0, 0"))  # unseen by who goes on from the snapshot
    await second.reset(task, 3)
    second.restore(state)
    here = await second.step(call("assert y == 1\nx"))
    assert here.observation.messages[0].content == drawn.messages[0].content
    assert (await first.step(call("x"))).observation.messages[0].content == "0"
    await first.close()
    assert _live_boxes(registry) == 1
    await second.close()
    assert _live_boxes(registry) == 0

  asyncio.run(body())


def test_back_end_without_sessions_is_refused() -> None:
  class Plain(ProcessSandbox):
    capabilities = Capabilities(files=True, snapshot=True, commands=True)

  with pytest.raises(SandboxError, match="Plain keeps no interpreters"):
    PythonSessionTool(Plain(), SandboxLimits())


def test_tools_are_built_by_name_in_order(tmp_path: Any, monkeypatch: Any) -> None:
  (tmp_path / "my_tools_of_test.py").write_text(
    "from agentjax.tools import function_tool\n"
    "def double(n: int) -> str:\n  return str(2 * n)\n"
    "triple = function_tool(lambda: 3)\ntriple.name = 'triple'\nnothing = 3\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  names = ("my_tools_of_test:double", "calculator", "my_tools_of_test:triple")
  registry = build_tools(ToolsConfig(names=names))
  assert [tool.name for tool in registry.tools] == ["double", "calculator", "triple"]
  result = asyncio.run(registry.call(ToolCall("double", {"n": 4}), ToolContext("e", 0, 5.0)))
  assert result.output == "8"
  for bad in ("my_tools_of_test:nothing", "my_tools_of_test:missing", "no_such_module:x"):
    with pytest.raises(ConfigError, match=bad):
      build_tools(ToolsConfig(names=(bad,)))


def python_with(**settings: Any) -> ToolsConfig:
  python: Any = PythonToolConfig(**settings)
  return ToolsConfig(names=("python",), settings={"python": python})  # type: ignore[arg-type]


@pytest.mark.parametrize(
  ("config", "field"),
  [
    (ToolsConfig(names=("calculater",)), r"tools\.names"),
    (ToolsConfig(names=("calculator", "calculator")), "distinct"),
    (ToolsConfig(timeout=0.0), r"tools\.timeout"),
    (ToolsConfig(names=("python",), timeout=5.0), r"overhead of python"),
    (ToolsConfig(retries=-1), "retries"),
    (
      python_with(max_characters=0),
      r"python\.max_characters",
    ),
    (
      python_with(max_sessions=0),
      r"python\.max_sessions",
    ),
    (
      python_with(idle_seconds=0.0),
      r"python\.idle_seconds",
    ),
  ],
)
def test_impossible_settings_are_refused_by_name(config: ToolsConfig, field: str) -> None:
  with pytest.raises(ConfigError, match=field):
    config.validate("tools")
    config.check_sandboxes(Sandboxes(), "tools")


def test_settings_survive_json() -> None:
  config = ToolsConfig(names=("calculator", "python"))
  config.validate("tools")
  assert ToolsConfig.from_dict(config.to_dict()) == config
