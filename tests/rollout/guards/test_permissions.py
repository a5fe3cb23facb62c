"""Asking people."""

import asyncio
import io
import os
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


@pytest.mark.parametrize(("typed", "granted"), [("y\n", True), ("Yes\n", True), ("\n", False)])
def test_a_terminal_is_asked(typed, granted):
  read, write = os.pipe()
  stdin, shown = os.fdopen(read), io.StringIO()
  stdin.isatty = lambda: True
  channel = TerminalChannel(stdin, shown)
  os.write(write, typed.encode())
  assert ask(channel) == Answer(granted, "terminal")
  assert "allow shell? rm x" in shown.getvalue()
  os.close(write)
  stdin.close()


def test_a_stream_that_is_no_terminal_cannot_be_asked():
  assert not TerminalChannel(io.StringIO()).can_ask


def test_a_question_withdrawn_from_a_terminal_leaves_what_is_typed_later_alone():
  read, write = os.pipe()
  stdin = os.fdopen(read)
  stdin.isatty = lambda: True
  shown = io.StringIO()
  assert ask(TerminalChannel(stdin, shown), Person(seconds=0.02)) == Answer(True, "person")
  assert "(no longer needed)" in shown.getvalue()
  os.write(write, b"for somebody else\n")
  assert stdin.readline() == "for somebody else\n"
  os.close(write)
  stdin.close()


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
