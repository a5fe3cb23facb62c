"""The readable file of trajectories."""

import os

import pytest

from agentjax.rollout.viewer import write_trajectories
from agentjax.trajectory.record import Status
from tests.rollout.conftest import make_task
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say


@pytest.fixture
def episodes(run):
  script = {1: [say("2+2 is ", call="calculator 2+2"), say("#### 4")], 2: [say("x" * 99)]}
  engine = ScriptedEngine(lambda address, turn: script[address[1]][turn])
  return run(engine, [make_task(1), make_task(2)])


def write(path, episodes):
  write_trajectories(
    path, episodes[::-1], tasks=[make_task(1)], tokenizer=TOKENIZER, title="Step 5"
  )


def test_a_reader_finds_prompt_call_result_answer_and_reward(tmp_path, episodes):
  write(tmp_path / "samples.txt", episodes)
  text = (tmp_path / "samples.txt").read_text()
  in_order = [
    "Step 5",
    "sums, task 1, sample 0, step 5",
    "status ok, reward 1 (exact_match 1)",
    "answer '4', expected '4'",
    "2 turns, 1 tool calls",
    "What is 2 + 2?",
    "2+2 is <|call|>calculator 2+2<|end|>",
    "<|tool|>4<|end|>",
    "#### 4<|end|>",
    "calculator {'expression': '2+2'}",
    "sums, task 2, sample 0, step 5",
    "status truncated, reward 0",
    "answer None, expected None",
    "reason: the environment truncated the episode",
    "truncated",
  ]
  places = []
  for part in in_order:
    places.append(text.index(part, places[-1] if places else 0))
  assert places == sorted(places)


def test_a_fault_and_its_reason_are_shown(tmp_path, episodes):
  episodes[0].status = Status.ENV_ERROR
  episodes[0].metadata["reason"] = "step() raised OSError: fire"
  write(tmp_path / "samples.txt", episodes)
  assert "reason: step() raised OSError: fire" in (tmp_path / "samples.txt").read_text()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, episodes, monkeypatch):
  path = tmp_path / "samples.txt"
  path.write_text("old")

  def full(*args):
    raise OSError("no space left on device")

  monkeypatch.setattr(os, "replace", full)
  with pytest.raises(OSError, match="no space left"):
    write(path, episodes)
  assert path.read_text() == "old" and os.listdir(tmp_path) == ["samples.txt"]
