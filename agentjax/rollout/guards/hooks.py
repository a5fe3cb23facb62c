"""Hooks: code or commands of your own before and after the calls of tools, and around episodes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import functools
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import tempfile
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import IO, Any, Literal

from agentjax.config import Config, ConfigError, PositiveFloat, check
from agentjax.names import load
from agentjax.rollout.guards.interface import as_json
from agentjax.threads import call_in_thread

HookKind = Literal["python", "command"]
HookMoment = Literal["episode_start", "before_tool", "after_tool", "stop"]
_MAX_REASON = 500  # characters of what a failing command wrote; ours
_MAX_OUTPUT = 2**22  # bytes that are read of what a command writes; ours


@dataclasses.dataclass(unsafe_hash=True)
class HookConfig(Config):
  """One hook. The episode waits for it; any failure of the hook denies the action.

  Attributes:
    event: "episode_start", before the first turn; "before_tool" and "after_tool", around every call
      that is well formed; "stop", when the policy ends its work with a turn without a call.
    run: "package.module:function", or a command with its arguments. A command runs as a process of
      this machine, outside every sandbox and without a shell.
    kind: which of the two ``run`` is.
    tools: glob the tool's name must match.
    arguments: regular expression that must be found in the arguments, written as JSON with sorted
      keys; "" fits all.
    timeout: seconds it may take; 10 in SemaClaw (2604.11548).
  """

  event: HookMoment = "before_tool"
  run: str = ""
  kind: HookKind = "python"
  tools: str = "*"
  arguments: str = ""
  timeout: PositiveFloat = 10.0

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    if self.kind == "python":
      check(":" in self.run, f"{path}.run", self.run, "package.module:function with kind='python'")
    else:
      check(bool(_split(self.run)), f"{path}.run", self.run, "a command with kind='command'")
    try:
      re.compile(self.arguments)
    except re.error as error:
      raise ConfigError(
        f"{path}.arguments={self.arguments!r} is no regular expression: {error}."
      ) from error
    about_tools = self.event in ("before_tool", "after_tool")
    check(
      about_tools or (self.tools == "*" and not self.arguments),
      f"{path}.tools, {path}.arguments",
      (self.tools, self.arguments),
      f"'*' and '' with event={self.event!r}, which is about no tool",
    )


@dataclasses.dataclass(frozen=True)
class HookEvent:
  """The event that a hook receives.

  Attributes:
    event: as in ``HookConfig``.
    episode: the same text for all events of one episode.
    turn: of the policy, from 0.
    user_input: the last message of the user in the task's prompt.
    tool_name, tool_input: the call; "" and empty where the event is about none.
    tool_status, tool_output: how it ended, for "after_tool".
    text: the policy's answer, for "stop".
  """

  event: str
  episode: str
  turn: int
  user_input: str
  tool_name: str = ""
  tool_input: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tool_status: str = ""
  tool_output: str = ""
  text: str = ""


@dataclasses.dataclass(frozen=True)
class HookAnswer:
  """The answer of a hook; None approves.

  Attributes:
    decision: "approve" lets things go on; "reject" refuses them, with ``reason`` for the policy;
      "skip" refuses them without one. After a tool the refused thing is its output, at a stop it is
      the end of the work, at the start of an episode the episode, which becomes an environment
      error.
    reason: shown to the policy on "reject", recorded always.
    abort: ends the episode.
    updated_input: arguments in the place of the call's; before a tool only.
    updated_output: text in the place of the tool's output; after a tool only.
    additional_context: text added below the output, or below the prompt at the start.
  """

  decision: Literal["approve", "reject", "skip"] = "approve"
  reason: str = ""
  abort: bool = False
  updated_input: Mapping[str, Any] | None = None
  updated_output: str | None = None
  additional_context: str = ""


HookFunction = Callable[[HookEvent], HookAnswer | None | Awaitable[HookAnswer | None]]


class HookFailure(Exception):
  """A hook that raised, took too long or gave no proper answer."""


@dataclasses.dataclass(frozen=True)
class Hook:
  """A hook that is ready to run."""

  config: HookConfig
  function: HookFunction
  tools: re.Pattern[str]
  arguments: re.Pattern[str] | None

  @property
  def name(self) -> str:
    return self.config.run

  @functools.cached_property
  def _is_async(self) -> bool:
    return inspect.iscoroutinefunction(self.function)

  def fits(self, tool: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the hook applies to this call."""
    if self.tools.match(tool) is None:
      return False
    return self.arguments is None or self.arguments.search(as_json(arguments)) is not None

  async def ask(self, event: HookEvent) -> HookAnswer:
    """Its answer.

    Raises:
      HookFailure: it gave none.
    """
    try:
      async with asyncio.timeout(self.config.timeout):
        answer = await self._call(event)
    except TimeoutError as error:
      raise HookFailure(f"no answer within {self.config.timeout:g} s") from error
    except HookFailure:
      raise
    except Exception as error:
      raise HookFailure(f"{type(error).__name__}: {error}") from error
    if answer is None:
      return HookAnswer()
    if not isinstance(answer, HookAnswer):
      raise HookFailure(f"it returned {type(answer).__name__} instead of a HookAnswer")
    return _checked(answer, self.config.event)

  async def _call(self, event: HookEvent) -> HookAnswer | None:
    if self._is_async:
      return await typing.cast(Awaitable[HookAnswer | None], self.function(event))
    answer = functools.partial(_answer_of, self.function, event)
    return await call_in_thread(answer, name="hook")


def build_hook(config: HookConfig, path: str) -> Hook:
  """A hook of its settings; ``path`` is their dotted name.

  Raises:
    ConfigError: a function or a command that does not exist.
  """
  if config.kind == "python":
    function = load(config.run, f"{path}.run", "a function")
    check(callable(function), f"{path}.run", config.run, "a function")
  else:
    function = _command(config.run, path)
  return Hook(
    config,
    function,
    re.compile(fnmatch.translate(config.tools)),
    re.compile(config.arguments) if config.arguments else None,
  )


def _command(line: str, path: str) -> Callable[[HookEvent], Awaitable[HookAnswer]]:
  """A function that asks a process: the event as JSON on its stdin, the answer on its stdout."""
  words = _split(line)
  check(shutil.which(words[0]) is not None, f"{path}.run", line, "a program of this machine")

  async def ask(event: HookEvent) -> HookAnswer:
    # Files instead of pipes: a child that outlives the command could hold a pipe open for ever.
    with contextlib.ExitStack() as stack:
      files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
      files[0].write(json.dumps(dataclasses.asdict(event), default=str).encode())
      files[0].seek(0)
      process = await asyncio.create_subprocess_exec(
        *words, stdin=files[0], stdout=files[1], stderr=files[2], start_new_session=True
      )
      try:
        await process.wait()
      finally:
        with contextlib.suppress(ProcessLookupError):  # its children too
          os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
      out, errors = (_text(file) for file in files[1:])
    if process.returncode:
      said = errors.strip() or out.strip()
      raise HookFailure(f"exit status {process.returncode}: {said[-_MAX_REASON:]}")
    return _read(out)

  return ask


_FIELDS = {
  "decision": "decision",
  "reason": "reason",
  "abort": "abort",
  "updatedInput": "updated_input",
  "updatedOutput": "updated_output",
  "additionalContext": "additional_context",
}


def _read(text: str) -> HookAnswer:
  """The answer that a command wrote; empty output approves."""
  if not text.strip():
    return HookAnswer()
  try:
    values = json.loads(text)
  except json.JSONDecodeError as error:
    raise HookFailure(f"its output is no JSON: {error}") from error
  if not isinstance(values, dict) or not values.keys() <= _FIELDS.keys():
    raise HookFailure(f"its output must be a JSON object with some of {', '.join(_FIELDS)}")
  return HookAnswer(**{_FIELDS[key]: value for key, value in values.items()})


def _checked(answer: HookAnswer, event: str) -> HookAnswer:
  """``answer``, if its fields have the right types and are allowed at ``event``."""
  allowed: Mapping[str, tuple[type, ...]] = {
    "reason": (str,),
    "abort": (bool,),
    "updated_input": (Mapping, type(None)),
    "updated_output": (str, type(None)),
    "additional_context": (str,),
  }
  if answer.decision not in ("approve", "reject", "skip"):
    raise HookFailure(f"decision={answer.decision!r}; allowed: approve, reject, skip")
  for name, types in allowed.items():
    if not isinstance(getattr(answer, name), types):
      raise HookFailure(f"{name}={getattr(answer, name)!r} has the wrong type")
  if answer.updated_input is not None and event != "before_tool":
    raise HookFailure(f"updated_input has no meaning at {event}")
  if answer.updated_output is not None and event != "after_tool":
    raise HookFailure(f"updated_output has no meaning at {event}")
  return answer


def _text(file: IO[bytes]) -> str:
  file.seek(0)
  return file.read(_MAX_OUTPUT).decode(errors="replace")


def _split(line: str) -> list[str]:
  try:
    return shlex.split(line)
  except ValueError:
    return []


def _answer_of(function: Callable[[HookEvent], Any], event: HookEvent) -> Any:
  try:
    return function(event)
  except BaseException as raised:  # SystemExit too: a hook must not end the run
    raise HookFailure(f"{type(raised).__name__}: {raised}") from raised
