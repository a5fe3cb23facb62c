"""A guarded episode over a tool that remembers what it was made to do."""

import asyncio
import dataclasses

import pytest

from agentjax.rollout.guards import GuardsConfig, guard_environments
from agentjax.tools.protocol import ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.world.environment import Action
from agentjax.world.question import QuestionEnvironment

TASK = Task(7, (Message("system", "Be good."), Message("user", "list the files")), "3", "made")


class Shell:
  """Echoes its command; "fail" and "break" do as they say, "slow" takes its time.

  "rm photo" shows an image as well.
  """

  name = "shell"
  description = "runs a command"
  parameters = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
  }

  def __init__(self):
    self.ran, self.contexts = [], []

  async def __call__(self, arguments, context):
    command = arguments["command"]
    self.ran.append(command)
    self.contexts.append(context)
    match command:
      case "fail":
        return ToolResult(ToolStatus.ERROR, "it failed")
      case "break":
        return ToolResult(ToolStatus.INFRA_ERROR, "disk gone")
      case "rm photo":
        header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1"
        return ToolResult(ToolStatus.OK, "rm it", artifacts={"a": header}, shown=("a",))
      case "slow":
        await asyncio.sleep(5)
    return ToolResult(ToolStatus.OK, f"ran {command}")


class Log(Shell):
  name = "log"


@dataclasses.dataclass
class Guarded:
  """What became of an episode."""

  steps: list
  ran: list
  logged: list
  environment: object = None

  @property
  def outputs(self):
    return [[m.content for m in step.observation.messages] for step in self.steps]

  @property
  def guards(self):
    """(guard, decision) in the order recorded."""
    return [(g.guard, g.decision) for step in self.steps for g in step.guards]


def shell(*commands):
  """A turn that calls the shell."""
  return Action("", tuple(ToolCall("shell", {"command": c}) for c in commands))


def play_guarded(config, *actions, channels=(), task=TASK, make=None):
  """Plays turns in an episode that is guarded by ``config``."""
  config.validate()
  tools = Shell(), Log()
  registry = ToolRegistry(tools, retries=0)

  def question(task):
    return QuestionEnvironment(registry, max_turns=20, tool_timeout=30.0)

  async def run():
    environment = guard_environments(make or question, config, registry, channels=channels)(task)
    await environment.reset(task, 5)
    steps = [await environment.step(action) for action in actions]
    return Guarded(steps, tools[0].ran, tools[1].ran, environment)

  return asyncio.run(run())


@pytest.fixture
def play():
  """Plays turns in a guarded episode; keyword arguments are those of GuardsConfig."""

  def play(*actions, channels=(), task=TASK, make=None, **settings):
    config = GuardsConfig(**settings)
    return play_guarded(config, *actions, channels=channels, task=task, make=make)

  return play
