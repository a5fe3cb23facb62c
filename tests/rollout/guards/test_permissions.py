"""Asking people."""

import asyncio
import io
import os
import pty
import re
import time

import pytest

from agentjax.config import ConfigError
from agentjax.rollout.guards import Answer, PermissionBridge, PermissionConfig, TerminalChannel
from agentjax.rollout.guards.config import GuardsConfig
from tests.rollout.guards.conftest import shell
from tests.rollout.guards.test_rules import WordConfig


class Person:
  """Answers after a while; remembers what became of the question."""

  def __init__(self, name="person", answer=True, seconds=0.0, can_ask=True):
    self.name, self.reply, self.seconds, self.can_ask = name, answer, seconds, can_ask
    self.asked, self.withdrawn = [], 0

  async def ask(self, question):
    self.asked.append(question)
    try:
      await asyncio.sleep(self.seconds)
    except asyncio.CancelledError:
      self.withdrawn += 1
      raise
    if isinstance(self.reply, Exception):
      raise self.reply
    return self.reply


def ask(*channels, content="rm x", category="shell", **settings):
  bridge = PermissionBridge(PermissionConfig(**settings), channels)

  async def run():
    answer = await bridge.ask(category, content)
    assert not bridge.pending
    return answer

  return asyncio.run(run())


def test_the_first_answer_counts_and_the_question_is_withdrawn_elsewhere():
  quick, slow = Person("quick", False, 0.01), Person("slow", True, 30.0)
  assert ask(slow, quick) == Answer(False, "quick")
  assert slow.withdrawn == 1
  (question,) = slow.asked
  assert question == quick.asked[0]
  assert re.fullmatch("[0-9a-f]{8}", question.id)
  assert (question.category, question.content) == ("shell", "rm x")


def test_what_is_shown_is_clipped_to_200_characters():
  person = Person()
  ask(person, content="x" * 201)
  assert person.asked[0].content == "x" * 199 + "…"


@pytest.mark.parametrize(
  ("channels", "settings", "answer"),
  [
    ([], {}, Answer(False, "nobody can be asked")),
    ([], {"when_nobody": "grant"}, Answer(True, "nobody can be asked")),
    ([Person(can_ask=False)], {}, Answer(False, "nobody can be asked")),
    ([Person("deaf", can_ask=False), Person("there")], {}, Answer(True, "there")),
    ([Person(answer=OSError("gone"))], {}, Answer(False, "all channels failed")),
    ([Person(answer="yes")], {}, Answer(False, "all channels failed")),
    ([Person(answer=OSError()), Person("there", seconds=0.01)], {}, Answer(True, "there")),
    ([Person(seconds=30)], {"timeout": 0.02}, Answer(False, "no answer within 0.02 s")),
    ([Person(answer=False)], {"skip": ("sh*",)}, Answer(True, "permissions.skip")),
    ([Person(answer=False)], {"skip": ("file*",)}, Answer(False, "person")),
  ],
)
def test_who_answers_where_some_cannot(channels, settings, answer):
  assert ask(*channels, **settings) == answer


def test_a_pending_question_can_be_answered_by_its_id_from_another_thread():
  bridge = PermissionBridge(PermissionConfig(), [Person(seconds=30)])

  async def run():
    asking = asyncio.ensure_future(bridge.ask("shell", "rm x"))
    await asyncio.sleep(0.01)
    ((id, question),) = bridge.pending.items()
    assert question.content == "rm x"
    assert await asyncio.to_thread(bridge.answer, id, True, "web")
    assert await asking == Answer(True, "web")
    assert not bridge.answer(id, False, "late")

  asyncio.run(run())


def test_only_the_episode_that_asks_waits():
  bridge = PermissionBridge(PermissionConfig(), [Person(seconds=0.2)])

  async def run():
    start = time.monotonic()
    asking = asyncio.ensure_future(bridge.ask("shell", "a"))
    await asyncio.sleep(0.01)
    elsewhere = time.monotonic() - start
    await asking
    return elsewhere

  assert asyncio.run(run()) < 0.15


class Screen(io.StringIO):
  """A terminal's output; whoever reads it types ``typed`` for each question, after a while."""

  def __init__(self, keyboard, *typed, seconds=0.0):
    super().__init__()
    self.keyboard, self.typed, self.seconds = keyboard, list(typed), seconds

  def write(self, text):
    if text.endswith("[y/N] ") and self.typed:
      line = self.typed.pop(0).encode()
      asyncio.get_running_loop().call_later(self.seconds, os.write, self.keyboard, line)
    return super().write(text)


@pytest.fixture(params=["pty", "pipe"])
def terminal(request):
  """(its input as a stream, the descriptor that types into it)."""
  keyboard, read = pty.openpty() if request.param == "pty" else reversed(os.pipe())
  stdin = os.fdopen(read)
  stdin.isatty = lambda: True
  yield stdin, keyboard
  os.close(keyboard)
  stdin.close()


@pytest.mark.parametrize(("typed", "granted"), [("y\n", True), ("Yes\n", True), ("\n", False)])
def test_a_terminal_is_asked(terminal, typed, granted):
  stdin, keyboard = terminal
  shown = Screen(keyboard, typed)
  assert ask(TerminalChannel(stdin, shown)) == Answer(granted, "terminal")
  assert "allow shell? rm x" in shown.getvalue()


def test_what_was_typed_before_a_question_is_no_answer_to_it(terminal):
  stdin, keyboard = terminal
  channel = TerminalChannel(stdin, Screen(keyboard))
  late = Answer(False, "no answer within 0.02 s")
  assert ask(channel, timeout=0.02) == late
  os.write(keyboard, b"y\n")  # to the question before, too late
  assert ask(channel, timeout=0.02) == late
  shown = Screen(keyboard, "n\ny\n", "")  # two lines at once, in answer to the first of two
  channel = TerminalChannel(stdin, shown)
  assert ask(channel) == Answer(False, "terminal")
  assert ask(channel, timeout=0.02) == late


def test_the_time_of_a_question_begins_when_it_is_shown(terminal):
  stdin, keyboard = terminal
  shown = Screen(keyboard, "y\n", "y\n", "y\n", seconds=0.2)
  bridge = PermissionBridge(PermissionConfig(timeout=0.35), [TerminalChannel(stdin, shown)])

  async def run():
    return await asyncio.gather(*(bridge.ask("shell", text) for text in "abc"))

  assert asyncio.run(run()) == [Answer(True, "terminal")] * 3


def test_a_question_that_is_answered_elsewhere_before_its_turn_is_not_shown(terminal):
  stdin, keyboard = terminal
  shown = Screen(keyboard, "n\n", seconds=0.1)
  channel = TerminalChannel(stdin, shown)
  bridges = [PermissionBridge(PermissionConfig(), [channel, *more]) for more in ([], [Person()])]

  async def run():
    return await asyncio.gather(*(bridge.ask("shell", "rm x") for bridge in bridges))

  assert asyncio.run(run()) == [Answer(False, "terminal"), Answer(True, "person")]
  assert shown.getvalue().count("allow") == 1 and "no longer" not in shown.getvalue()


def test_a_question_cannot_hide_itself_or_look_like_another(terminal):
  stdin, keyboard = terminal
  shown = Screen(keyboard, "n\n")
  content = "a\x1b[8m\r\x07\u202e\n[y/N] y\n\nallow read? b"
  ask(TerminalChannel(stdin, shown), content=content, category="sh\x9bell")
  assert shown.getvalue() == (
    "\nallow sh\\x9bell? a\\x1b[8m\\r\\x07\\u202e\n  [y/N] y\n  \n  allow read? b\n[y/N] "
  )


def test_a_stream_that_is_no_terminal_cannot_be_asked():
  assert not TerminalChannel(io.StringIO()).can_ask


def test_a_question_withdrawn_from_a_terminal_leaves_what_is_typed_later_alone(terminal):
  stdin, keyboard = terminal
  shown = Screen(keyboard)
  assert ask(TerminalChannel(stdin, shown), Person(seconds=0.02)) == Answer(True, "person")
  assert "(no longer needed)" in shown.getvalue()
  os.write(keyboard, b"for somebody else\n")
  assert stdin.readline() == "for somebody else\n"


def test_channels_are_found_by_name(play):
  rules = WordConfig(word="ls")
  settings = PermissionConfig(channels=(f"{__name__}:Person",))
  assert play(shell("ls"), rules=rules, permissions=settings).ran == ["ls"]
  for name, said in (("no.such:C", "no module .no."), (f"{__name__}:os", "async ask")):
    with pytest.raises(ConfigError, match=said):
      play(permissions=PermissionConfig(channels=(name,)))


@pytest.mark.parametrize("settings", [{"channels": ("telepathy",)}, {"timeout": 0.0}])
def test_settings_that_cannot_be_used_are_refused(settings):
  with pytest.raises(ConfigError, match=f"config.guards.permissions.{next(iter(settings))}"):
    GuardsConfig(permissions=PermissionConfig(**settings)).validate()
