"""A conversation with an agent at the terminal; ``python -m agentjax.agent`` is its command.

The conversation is an episode: the person is its environment, the agent calls the tools of the
config behind its guards, and the transcript is the trajectory, whose tokens carry log-probs where
an engine of ours drew them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TextIO

from agentjax.adapters.seat_host import SeatHost
from agentjax.config import ConfigError
from agentjax.files import held
from agentjax.rollout.guards import guard_environments
from agentjax.rollout.seat_config import SeatConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.schedules import at_end
from agentjax.text.printable import printable
from agentjax.threads import call_in_thread
from agentjax.tools.build import build_tools
from agentjax.tools.registry import ToolRegistry
from agentjax.training.experiment import Experiment, resolve
from agentjax.trajectory.record import Message, Task, Trajectory
from agentjax.trajectory.store import StoreWriter
from agentjax.world.environment import Action, Observation, Step
from agentjax.world.question import QuestionEnvironment

SOURCE = "conversation"
_SHOWN = 400  # characters of a result that the person sees


class Person(Protocol):
  """Who talks with the agent."""

  async def line(self) -> str | None:
    """What they say next; None ends the conversation."""
    ...

  def show(self, text: str) -> None:
    """What they see."""
    ...


class TerminalPerson:
  """The person at two streams.

  Args:
    stdin, stdout: the streams.
    stop: set to end the conversation while a line is awaited.
  """

  def __init__(self, stdin: TextIO, stdout: TextIO, stop: asyncio.Event | None = None):
    self._in, self._out = stdin, stdout
    self._stop = stop or asyncio.Event()

  async def line(self) -> str | None:
    self._write("\n> " if self._in.isatty() else "")
    # A thread of its own: files, pipes and terminals can all be read so.
    reading = asyncio.ensure_future(call_in_thread(self._in.readline, name="person"))
    stopping = asyncio.ensure_future(self._stop.wait())
    try:
      await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
      text = reading.result() if reading.done() else ""
    finally:
      reading.cancel()
      stopping.cancel()
    return text.strip() if text else None

  def show(self, text: str) -> None:
    self._write(f"{text}\n")

  def _write(self, text: str) -> None:
    self._out.write(printable(text))
    self._out.flush()


class ScriptedPerson(TerminalPerson):
  """Says fixed lines, then leaves."""

  def __init__(self, lines: Sequence[str], stdout: TextIO):
    super().__init__(stdout, stdout)
    self._lines = list(lines)

  async def line(self) -> str | None:
    return self._lines.pop(0) if self._lines else None


class ConversationEnvironment(QuestionEnvironment):
  """The person speaks, the agent calls tools until it answers in words, the person speaks again.

  Args:
    registry: tools.
    person: who talks.
    system: message before the conversation; "" is none.
    max_turns: of the agent.
    tool_timeout: seconds.
  """

  def __init__(
    self,
    registry: ToolRegistry,
    person: Person,
    system: str,
    *,
    max_turns: int,
    tool_timeout: float,
  ):
    super().__init__(registry, max_turns=max_turns, tool_timeout=tool_timeout)
    self._person, self._system = person, system

  async def reset(self, task: Task, key: int) -> Observation:
    said = await self._listen()
    if said is None:
      raise NothingSaid
    system = (Message("system", self._system),) if self._system else ()
    prompt = (*system, Message("user", said))
    return await super().reset(dataclasses.replace(task, prompt=prompt), key)

  async def step(self, action: Action) -> Step:
    if action.text.strip():
      self._person.show(action.text.strip())
    if action.tool_calls or action.truncated:
      for call in action.tool_calls:
        self._person.show(f"  {call.name} {json.dumps(dict(call.arguments), ensure_ascii=False)}")
      step = await super().step(action)
      for record in step.tools:
        self._person.show(f"  {record.status}: {record.output[:_SHOWN]}")
      return step
    self._turn += 1
    self._conversation.append(Message("assistant", action.text))
    said = await self._listen()
    if said is None:
      return self._end(Step(Observation(()), terminated=True, answer=action.text))
    message = Message("user", said)
    self._conversation.append(message)
    return Step(Observation((message,)))

  async def _listen(self) -> str | None:
    """The next line that is not empty."""
    while (said := await self._person.line()) == "":
      pass
    return said


class NothingSaid(Exception):
  """The person left without a word."""


def talk(
  experiment: Experiment,
  player: SeatConfig,
  *,
  lines: Sequence[str] = (),
  transcript: str | os.PathLike[str] | None = None,
  stdin: TextIO | None = None,
  stdout: TextIO | None = None,
) -> Trajectory | None:
  """One conversation, from the person's first line to their leaving or to the end of its limits.

  Args:
    experiment: its tools, guards, system prompt (``chat``), program and limits (``rollout``), and
      for a policy on disk its engine.
    player: who answers.
    lines: what is said; () reads ``stdin``.
    transcript: store that the trajectory is appended to; None keeps none.
    stdin, stdout: None are those of the process.

  Returns:
    The trajectory, without a reward; None where nobody said anything.

  Raises:
    ConfigError: settings that cannot be, or another process has the transcript.
    CheckpointError: no policy to load.
    StoreError: ``transcript`` is another kind of file, or damaged.
  """
  resolve(experiment)
  out = stdout or sys.stdout

  def make_person(stop: asyncio.Event) -> Person:
    if lines:
      return ScriptedPerson(lines, out)
    heard = stdin or sys.stdin
    if isinstance(heard, io.TextIOWrapper):
      with contextlib.suppress(io.UnsupportedOperation):  # somebody has read from it already
        heard.reconfigure(errors="replace")  # a byte that is no text must not end a conversation
    return TerminalPerson(heard, out, stop)

  with contextlib.ExitStack() as stack:
    writer = None
    if transcript is not None:
      stack.enter_context(_held(pathlib.Path(transcript)))
      writer = StoreWriter(transcript)
      stack.callback(writer.close)
    number = 0 if writer is None else writer.count
    trajectory = asyncio.run(_talk(experiment, player, make_person, number))
    if writer is not None and trajectory is not None:
      writer.append_trajectory(trajectory)
  return trajectory


async def _talk(
  experiment: Experiment,
  config: SeatConfig,
  make_person: Callable[[asyncio.Event], Person],
  number: int,
) -> Trajectory | None:
  registry = build_tools(experiment.tools, (), Sandboxes(experiment.sandboxes))
  host, stop = SeatHost(experiment), asyncio.Event()
  person = make_person(stop)

  def conversation(task: Task) -> ConversationEnvironment:
    return ConversationEnvironment(
      registry,
      person,
      experiment.chat.system_prompt,
      max_turns=at_end(experiment.rollout).max_turns,
      tool_timeout=experiment.tools.timeout,
    )

  try:
    with _stopped_by_ctrl_c(stop):
      guarded = guard_environments(conversation, experiment.guards, registry)
      trajectory = await host.play(config, Task(number, (), "", SOURCE), guarded)
  finally:
    await registry.close()
    host.close()
  if not trajectory.segments:
    reason = trajectory.metadata.get("reason", "")
    if NothingSaid.__name__ in reason:
      return None
    raise ConfigError(f"the conversation cannot begin: {reason}.")
  if reason := trajectory.metadata.get("reason"):
    with contextlib.suppress(OSError, ValueError):  # nobody is there to read it; keep what was said
      person.show(f"[{trajectory.status}: {reason}]")
  return trajectory


@contextlib.contextmanager
def _held(transcript: pathlib.Path) -> Iterator[None]:
  """Holds a transcript: a second writer would write over the first one's records."""
  transcript.parent.mkdir(parents=True, exist_ok=True)
  refusal = ConfigError(
    f"--transcript={transcript} is in use by another process; give another file."
  )
  with held(transcript.with_name(f".{transcript.name}.lock"), refusal):
    yield


@contextlib.contextmanager
def _stopped_by_ctrl_c(stop: asyncio.Event) -> Iterator[None]:
  """The first Ctrl-C ends the conversation where the person speaks next, so that it is kept."""
  loop = asyncio.get_running_loop()
  try:
    loop.add_signal_handler(signal.SIGINT, stop.set)
  except (NotImplementedError, RuntimeError, ValueError):  # not in the main thread
    yield
    return
  try:
    yield
  finally:
    loop.remove_signal_handler(signal.SIGINT)
