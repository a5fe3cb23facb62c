"""Asking people: a question goes to all channels at once, and the first answer counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import logging
import os
import secrets
import select
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TextIO

from agentjax.config import Config, PositiveFloat
from agentjax.text.printable import printable

_log = logging.getLogger(__name__)

MAX_CONTENT = 200  # characters of a question's content, as in SemaClaw (2604.11548)
_LONGEST_LINE = 4096  # bytes; a terminal gives no longer ones


@dataclasses.dataclass(unsafe_hash=True)
class PermissionConfig(Config):
  """Who is asked for permission, and the answer if nobody replies.

  Attributes:
    channels: "terminal" (the person at this process's terminal), or "package.module:attribute" for
      a channel of your own. Without channels, as in training, nobody is asked.
    timeout: seconds to wait for an answer, from when the first channel shows the question. The
      environment's own time-out must exceed it, and the wait for questions that come before.
    skip: globs of categories that are granted without asking. The category of a tool call is the
      tool's name, that of other events their name.
    when_nobody: the answer if no channel can ask, or none answers in time.
  """

  channels: tuple[str, ...] = ()
  timeout: PositiveFloat = 60.0
  skip: tuple[str, ...] = ()
  when_nobody: Literal["refuse", "grant"] = "refuse"

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    for name in self.channels:
      require(name == "terminal" or ":" in name, "channels", "terminal, package.module:attribute")


@dataclasses.dataclass(frozen=True)
class Question:
  """What is asked: 8 hex digits of an id, a category, and at most 200 characters."""

  id: str
  category: str
  content: str


@dataclasses.dataclass(frozen=True)
class Answer:
  """``by`` names the channel, or says why nobody was asked."""

  granted: bool
  by: str


class Channel(Protocol):
  """A way to ask people.

  A channel that shows one question at a time has a lock ``turn``. The bridge holds it while it
  asks, so a question that waits for its turn is not shown yet.
  """

  name: str

  @property
  def can_ask(self) -> bool:
    """Whether somebody may be there to answer. If not, the channel is skipped."""
    ...

  async def ask(self, question: Question) -> bool:
    """Whether permission is given. Cancelled when the question is answered elsewhere."""
    ...


class PermissionBridge:
  """Puts questions to channels. Only the episode that asks waits.

  A channel that cannot ask, or fails, does not decide: the others may still grant. If all have
  failed or the time is up, ``config.when_nobody`` is the answer. Any code that knows the id of a
  pending question may also ``answer`` it.
  """

  def __init__(self, config: PermissionConfig, channels: Sequence[Channel] = ()):
    self._config = config
    self._channels = tuple(channels)
    self._pending: dict[str, tuple[Question, asyncio.Future[Answer]]] = {}

  @property
  def pending(self) -> Mapping[str, Question]:
    """Questions that wait for an answer, by id."""
    return {id: question for id, (question, _) in self._pending.items()}

  def answer(self, id: str, granted: bool, by: str) -> bool:
    """Answers a pending question; False where it was answered already. Callable in any thread."""
    if id not in self._pending:
      return False
    _, future = self._pending[id]
    future.get_loop().call_soon_threadsafe(_settle, future, Answer(granted, by))
    return True

  async def ask(self, category: str, content: str) -> Answer:
    """The first answer to a question; never raises for what a channel does."""
    if any(fnmatch.fnmatchcase(category, glob) for glob in self._config.skip):
      return Answer(True, "permissions.skip")
    able = [channel for channel in self._channels if _can_ask(channel)]
    if not able:
      return self._nobody("nobody can be asked")
    question = Question(self._fresh_id(), category, _clip(content))
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    self._pending[question.id] = (question, future)
    limit = asyncio.timeout(None)

    def begin() -> None:  # nobody can answer what is not shown yet
      if limit.when() is None:
        limit.reschedule(asyncio.get_running_loop().time() + self._config.timeout)

    asking = asyncio.ensure_future(self._ask_all(able, question, future, begin))
    try:
      async with limit:
        return await future
    except TimeoutError:
      return self._nobody(f"no answer within {self._config.timeout:g} s")
    finally:
      del self._pending[question.id]
      asking.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await asking

  async def _ask_all(
    self,
    channels: Sequence[Channel],
    question: Question,
    future: asyncio.Future[Answer],
    begin: Callable[[], None],
  ) -> None:
    """Until one has answered; withdraws the question from the others.

    Args:
      channels: who is asked.
      question: what is asked.
      future: takes the answer.
      begin: called when a channel shows the question.
    """

    async def ask(channel: Channel) -> None:
      try:
        async with getattr(channel, "turn", None) or contextlib.nullcontext():
          if future.done():
            return
          begin()
          granted = await channel.ask(question)
      except Exception:
        _log.warning("channel %s cannot ask", channel.name, exc_info=True)
        return
      if not isinstance(granted, bool):
        _log.warning("channel %s answered %r instead of a bool", channel.name, granted)
        return
      _settle(future, Answer(granted, channel.name))

    async with asyncio.TaskGroup() as group:
      for channel in channels:
        group.create_task(ask(channel))
    _settle(future, self._nobody("all channels failed"))

  def _nobody(self, why: str) -> Answer:
    return Answer(self._config.when_nobody == "grant", why)

  def _fresh_id(self) -> str:
    while (id := secrets.token_hex(4)) in self._pending:
      pass
    return id


class TerminalChannel:
  """Asks the person at the terminal of this process, one question after the other.

  Only what is typed after a question was shown answers it: a late answer to the one before is
  dropped.
  """

  name = "terminal"

  def __init__(self, stdin: TextIO | None = None, stdout: TextIO | None = None):
    self._stdin = sys.stdin if stdin is None else stdin
    self._stdout = sys.stdout if stdout is None else stdout
    self.turn = asyncio.Lock()

  @property
  def can_ask(self) -> bool:
    return self._stdin.isatty()

  async def ask(self, question: Question) -> bool:
    _drop_input(self._stdin.fileno())
    # Lines of the content are indented, or one could look like a question or its end.
    content = printable(question.content).replace("\n", "\n  ")
    self._say(f"\nallow {printable(question.category)}? {content}\n[y/N] ")
    try:
      return (await self._line()).strip().lower() in ("y", "yes")
    except asyncio.CancelledError:
      self._say("(no longer needed)\n")
      raise

  async def _line(self) -> str:
    # Not a thread: a thread that reads cannot be stopped when the question is withdrawn.
    loop, stdin = asyncio.get_running_loop(), self._stdin.fileno()
    ready = asyncio.Event()
    loop.add_reader(stdin, ready.set)
    try:
      await ready.wait()
    finally:
      loop.remove_reader(stdin)
    # Not by the stream, which would keep further lines for the next question.
    return os.read(stdin, _LONGEST_LINE).decode(errors="replace").partition("\n")[0]

  def _say(self, text: str) -> None:
    self._stdout.write(text)
    self._stdout.flush()


def _drop_input(stdin: int) -> None:
  """Drops what was typed and not read yet."""
  if os.isatty(stdin):
    termios.tcflush(stdin, termios.TCIFLUSH)
    return
  while select.select([stdin], [], [], 0)[0] and os.read(stdin, _LONGEST_LINE):
    pass


def _can_ask(channel: Channel) -> bool:
  try:
    return channel.can_ask
  except Exception:
    _log.warning("channel %s cannot ask", channel.name, exc_info=True)
    return False


def _settle(future: asyncio.Future[Answer], answer: Answer) -> None:
  if not future.done():
    future.set_result(answer)


def _clip(text: str) -> str:
  return text if len(text) <= MAX_CONTENT else text[: MAX_CONTENT - 1] + "…"
