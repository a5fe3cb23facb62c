"""Sessions from untrusted files and from stored episodes."""

import gzip
import json

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.skillclaw.library import Entry
from agentjax.recipes.skillclaw.retrieval import RetrievalConfig, catalogue
from agentjax.recipes.skillclaw.sessions import (
  MOST_TEXT,
  Session,
  read_transcripts,
  session_text,
  sessions_of_episodes,
)
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Reward, Status, ToolCall, ToolRecord
from tests.recipes.skillclaw.nights import skill

CHAT = MarkedChat(ByteTokenizer())


def _call(tool, **arguments):
  return {"id": "c", "function": {"name": tool, "arguments": json.dumps(arguments)}}


def _talk(*calls, answer="fine", **more):
  tools = [{"role": "tool", "content": answer} for _ in calls]
  said = {"role": "assistant", "content": "" if calls else "Done.", "tool_calls": list(calls)}
  return {"messages": [{"role": "user", "content": "Do it."}, said, *tools], **more}


def _write(path, *rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_of_conversations_is_untrusted(tmp_path):
  _write(tmp_path / "b.jsonl", _talk(id="last", reward=0.5))
  _write(
    tmp_path / "a" / "one.jsonl",
    _talk(_call("read_skill", name="good"), id="first"),
    _talk(_call("read_file", path="/home/me/skills/fine-one/SKILL.md"), answer="Error: no"),
    _talk(reward=7),
  )
  (tmp_path / "notes.txt").write_text("no conversation")
  sessions, refused = read_transcripts(tmp_path, "openai")
  assert [s.name for s in sessions] == ["first", "one.jsonl:2", "one.jsonl:3", "last"]
  assert [s.read for s in sessions] == [("good",), ("fine-one",), (), ()]
  assert [s.score for s in sessions] == [None, None, None, 0.5]
  assert [s.failed_tools for s in sessions] == [False, True, False, False]
  assert refused == [] and not any(s.trusted for s in sessions)
  assert len({s.sha for s in sessions}) == 4


def test_a_wrong_file_does_not_hold_up_the_others(tmp_path, monkeypatch):
  _write(tmp_path / "a.jsonl", _talk(id="kept"), {"messages": []}, _talk(id="behind"))
  (tmp_path / "c.jsonl").symlink_to(tmp_path / "a.jsonl")
  _write(tmp_path / "d.jsonl", _talk(id="last"))
  (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(b" " * 4096 + b"\n"))
  (tmp_path / "f.jsonl.gz").write_bytes(b"no gzip")
  monkeypatch.setattr("agentjax.recipes.skillclaw.sessions.MOST_BYTES", 2048)
  (tmp_path / "b.json").write_text("[" * 2000)
  sessions, refused = read_transcripts(tmp_path, "openai")
  assert [s.name for s in sessions] == ["kept", "last"] and len(refused) == 5
  (tmp_path / "empty").mkdir()
  with pytest.raises(ConfigError, match="holds no conversations"):
    read_transcripts(tmp_path / "empty", "openai")


def test_a_text_is_bounded_as_in_the_source():
  calls = tuple(ToolCall("run", {"command": "y" * 900}) for _ in range(11))
  messages = (
    Message("user", "x" * 900),
    Message("assistant", "", calls),
    Message("tool", "Error: " + "z" * 900),
  )
  lines = session_text(Session("one", messages, 0.5, read=("good",))).splitlines()
  assert lines[:2] == ["score 0.50 (0 to 1, by its world)", "skills read: good"]
  assert lines[2] == f"user: {'x' * 400}..."
  assert len([line for line in lines if line.startswith("  calls run")]) == 8
  assert all(len(line) < 440 for line in lines) and "and 3 calls more" in lines[-2]
  assert lines[-1] == f"tool: Error: {'z' * 293}..."
  many = Session("one", tuple(Message("user", "x" * 300) for _ in range(500)))
  assert len(session_text(many)) < MOST_TEXT + 20
  assert "\ud800" not in session_text(Session("one", (Message("user", "\ud800"),)))


def _episode(prompt, *turns, reward=1.0, status=Status.OK, tools=(), task=3):
  builder = TrajectoryBuilder(step=0, task_id=task, sample=0, source="made")
  for owner, ids in CHAT.prompt([Message("user", prompt)]):
    builder.append(owner, ids)
  for turn in turns:
    ids = CHAT.assistant(turn)
    builder.append_sampled(ids, np.zeros(len(ids)), np.zeros(len(ids)), 0)
  made = builder.build(status=status, tools=list(tools))
  made.reward = Reward.invalid("none") if reward is None else Reward(reward)
  return made


def test_stored_episodes_are_sessions_without_their_catalogue():
  shown = catalogue([Entry(skill())], RetrievalConfig(show="bodies"))
  turn = Message("assistant", "Done.", (ToolCall("run", {"command": "ls"}),))
  read = ToolRecord(0, "read_skill", {"name": "other"}, "ok", "", 0.0)
  failed = ToolRecord(0, "read_skill", {"name": "third"}, "error", "", 0.0)
  episodes = [
    _episode(f"{shown}\n\nDo it.", turn, reward=1.5, tools=(read, failed)),
    _episode("Do it.", turn, reward=None),
    _episode("Do it.", turn, status=Status.ENV_ERROR),
    _episode("Do it.", Message("assistant", "No."), reward=-1.0),
  ]
  first, last = sessions_of_episodes(episodes, CHAT)
  assert first.messages[0] == Message("user", "Do it.")
  assert first.messages[1].content == "Done." and first.messages[1].tool_calls[0].name == "run"
  assert (first.score, first.read, first.trusted) == (1.0, ("good", "other"), True)
  assert first.failed_tools and not last.failed_tools
  assert (last.score, last.read, len(last.messages)) == (0.0, (), 2)


def test_a_shown_name_is_no_reading():
  shown = catalogue([Entry(skill())], RetrievalConfig(show="names"))
  (session,) = sessions_of_episodes(
    [_episode(f"{shown}\n\nDo it.", Message("assistant", "x"))], CHAT
  )
  assert session.read == ()
