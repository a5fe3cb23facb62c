"""Files that tools made: kept by content, within bounds, and shown."""

import asyncio
import hashlib

from agentjax.rollout.viewer import render
from agentjax.tools.protocol import ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.artifacts import ArtifactStore
from agentjax.trajectory.record import Message, Task, ToolCall, ToolRecord, Trajectory
from agentjax.trajectory.store import from_record, to_record
from agentjax.world.environment import Action
from agentjax.world.question import QuestionEnvironment
from tests.rollout.scripted_engine import TOKENIZER


def kept(folder):
  return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.glob("??/*")}


def place(content, suffix):
  digest = hashlib.sha256(content).hexdigest()
  return f"{digest[:2]}/{digest}{suffix}"


def test_each_content_is_kept_once_and_the_oldest_go_first(tmp_path):
  store = ArtifactStore(tmp_path, max_bytes=10)
  for content in (b"1111", b"2222", b"1111"):
    assert store.put("a.png", content) == hashlib.sha256(content).hexdigest()
  assert kept(tmp_path) == {place(c, ".png"): c for c in (b"1111", b"2222")}
  store.put("b", b"33333")
  assert kept(tmp_path) == {place(b"2222", ".png"): b"2222", place(b"33333", ""): b"33333"}
  store.put("c.png", b"4" * 11)  # larger than all may be
  assert len(kept(tmp_path)) == 2
  again = ArtifactStore(tmp_path, max_bytes=10)  # of a resumed run
  again.put("d", b"555")
  assert sum(map(len, kept(tmp_path).values())) <= 10


def test_names_lead_nowhere_and_a_folder_that_cannot_be_written_ends_nothing(tmp_path):
  store = ArtifactStore(tmp_path / "in")
  store.put("../../out.png/..", b"1")
  store.put("x.p/../ng", b"2")
  assert kept(tmp_path / "in") == {place(b"1", ""): b"1", place(b"2", ""): b"2"}
  (tmp_path / "file").write_text("")
  assert ArtifactStore(tmp_path / "file" / "in").put("a", b"1") == hashlib.sha256(b"1").hexdigest()


class Camera:
  name = "camera"
  description = "takes a picture"
  parameters = {"type": "object", "properties": {}}

  async def __call__(self, arguments, context):
    return ToolResult(ToolStatus.OK, "click", artifacts={"picture.png": b"pixels"})


def test_what_a_tool_made_is_recorded_by_its_hash_and_shown(tmp_path):
  registry = ToolRegistry([Camera()])
  registry.artifacts = ArtifactStore(tmp_path / "artifacts")
  environment = QuestionEnvironment(registry)

  async def play():
    await environment.reset(Task(1, (Message("user", "look"),), "", "made"), 0)
    step = await environment.step(Action("", (ToolCall("camera", {}),)))
    await environment.close()
    return step.tools

  tools = list(asyncio.run(play()))
  where = place(b"pixels", ".png")
  assert kept(tmp_path / "artifacts") == {where: b"pixels"}
  stored = from_record(to_record(Trajectory(0, 1, 0, "made", [], tools=tools)))
  assert stored.tools == tools
  lines = list(render(stored, tokenizer=TOKENIZER, expected=None))
  assert f"picture.png: artifacts/{where}" in lines


def test_records_without_files_are_as_they_were():
  plain = Trajectory(0, 1, 0, "made", [], tools=[ToolRecord(0, "x", {}, "ok", "", 0.0)])
  record = to_record(plain)
  assert "artifacts" not in record["tools"][0]
  assert from_record(record).tools == plain.tools
