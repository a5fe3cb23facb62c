"""The shell tool."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator

import pytest

from agentjax.sandbox import ProcessSandbox, ProcessSandboxConfig, SandboxLimits
from agentjax.tools import ToolContext, ToolRegistry, ToolResult, ToolStatus
from agentjax.tools.shell import ShellConfig, ShellTool
from agentjax.tools.workspace import WorkspaceConfig, Workspaces
from agentjax.trajectory.record import ToolCall

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
Shell = Callable[..., ToolResult]

_NOT_TEXT = "error: the command holds a NUL character or half of a surrogate pair"


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
  limits = SandboxLimits(memory_bytes=2**27, output_kill_bytes=2**20)
  settings = WorkspaceConfig(max_bytes=2**20)
  sandbox = ProcessSandbox(ProcessSandboxConfig(limits=limits))
  tool = ShellTool(Workspaces(sandbox, limits, settings), ShellConfig(max_characters=200))
  registry = ToolRegistry([tool])

  def call(command: str, episode: str = "e", timeout: float = 10.0, seed: int = 0) -> ToolResult:
    request = ToolCall("shell", {"command": command})
    return asyncio.run(registry.call(request, ToolContext(episode, seed, timeout)))

  yield call
  asyncio.run(registry.close())


@pytest.mark.parametrize(
  ("command", "status", "output"),
  [
    ("echo a; echo b >&2; echo c", ToolStatus.OK, "a\nb\nc"),
    ("true", ToolStatus.OK, "(no output)"),
    ("echo gone; exit 4", ToolStatus.ERROR, "gone\nerror: exit code 4"),
    ("kill -9 $$", ToolStatus.KILLED, "error: ended by signal 9"),
    ("cat", ToolStatus.OK, "(no output)"),
    ("echo \"it's\" 'quoted' $((6*7)) \"$0\"", ToolStatus.OK, "it's quoted 42 bash"),
    ("a\0b", ToolStatus.ERROR, _NOT_TEXT),
    ("\ud800", ToolStatus.ERROR, _NOT_TEXT),
  ],
)  # fmt: skip
def test_policy_sees_output_in_order_and_exit_code(
  shell: Shell, command: str, status: ToolStatus, output: str
) -> None:
  result = shell(command)
  assert (result.status, result.output) == (status, output)


def test_files_last_but_directory_variables_and_processes_do_not(shell: Shell) -> None:
  shell("mkdir d; cd d; x=1; echo kept > file; (sleep 0.3; echo late > late) &", episode="last")
  result = shell('sleep 0.5; echo "$x"; cat d/file; ls d', episode="last")
  assert result.output == "\nkept\nfile"


def test_long_output_keeps_head_and_tail(shell: Shell) -> None:
  output = shell("printf 'a%.0s' $(seq 1000); printf 'z%.0s' $(seq 1000)").output
  assert output == "a" * 100 + "\n[... 1800 characters left out ...]\n" + "z" * 100


def test_limits_come_back_as_kinds(shell: Shell) -> None:
  slow = shell("echo begun; sleep 30", timeout=3.0)
  assert (slow.status, slow.output) == (
    ToolStatus.TIMEOUT,
    "begun\nerror: did not end within 2.7 s",
  )
  assert shell("yes").status is ToolStatus.OUTPUT_LIMIT
  memory = shell("x=$(head -c 200000000 /dev/zero | tr '\\0' a); echo ${#x}")
  assert memory.status in (ToolStatus.MEMORY_LIMIT, ToolStatus.ERROR)
  assert "200000000" not in memory.output


def test_workspace_that_outgrew_its_bounds_is_said(shell: Shell) -> None:
  result = shell("for i in 1 2 3; do head -c 600000 /dev/zero > $i; done; echo done", "big")
  assert result.status is ToolStatus.OUTPUT_LIMIT
  assert result.output.startswith("done\nerror: the workspace outgrew 1048576 bytes")
  assert shell("ls", "big").output == "(no output)"


def test_random_numbers_follow_the_seed(shell: Shell) -> None:
  draw = "echo $RANDOM $RANDOM"
  assert shell(draw, seed=1).output == shell(draw, seed=1).output
  assert shell(draw, seed=1).output != shell(draw, seed=2).output


def test_cannot_see_the_machine_s_files_or_the_network(shell: Shell) -> None:
  assert shell("cat /etc/passwd").status is ToolStatus.ERROR
  network = shell("exec 3<>/dev/tcp/127.0.0.1/80")
  assert network.status is ToolStatus.ERROR
  assert shell("env").output.count("KEY") == 0
