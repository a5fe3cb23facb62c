"""The Python tool and the configuration of tools."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentjax.config import ConfigError
from agentjax.sandbox import ProcessSandboxConfig, SandboxLimits
from agentjax.tools import ToolContext, ToolResult, ToolsConfig, ToolStatus, build_tools
from agentjax.tools.python import PythonToolConfig
from agentjax.trajectory.record import ToolCall

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
Python = Callable[..., ToolResult]


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
  limits = SandboxLimits(memory_bytes=2**27, output_kill_bytes=2**20)
  settings = PythonToolConfig(ProcessSandboxConfig(limits=limits), max_characters=100)
  registry = build_tools(ToolsConfig(names=("python",), python=settings))

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
    settings = ProcessSandboxConfig(concurrency=1)
    registry = build_tools(ToolsConfig(names=("python",), python=PythonToolConfig(settings)))

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


@pytest.mark.parametrize(
  ("config", "field"),
  [
    (ToolsConfig(names=("calculater",)), r"tools\.names"),
    (ToolsConfig(names=("calculator", "calculator")), "distinct"),
    (ToolsConfig(timeout=0.0), r"tools\.timeout"),
    (ToolsConfig(names=("python",), timeout=5.0), "queue_seconds"),
    (ToolsConfig(retries=-1), "retries"),
    (ToolsConfig(python=PythonToolConfig(max_characters=0)), r"python\.max_characters"),
  ],
)
def test_impossible_settings_are_refused_by_name(config: ToolsConfig, field: str) -> None:
  with pytest.raises(ConfigError, match=field):
    config.validate("tools")


def test_settings_survive_json() -> None:
  config = ToolsConfig(names=("calculator", "python"))
  config.validate("tools")
  assert ToolsConfig.from_dict(config.to_dict()) == config
