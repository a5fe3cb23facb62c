"""The episodes that earned most are written down: which, in what order, and never twice."""

import json
import random

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.rewards import RewardConfig, SampleConfig, top_rewards, write_samples
from agentjax.text.tokenizer import ByteTokenizer
from agentjax.trajectory.record import Reward, Segment, Status, Task, ToolRecord, Trajectory

TOKENIZER = ByteTokenizer()


def episode(task, sample, reward, text="4"):
  ids = np.array(TOKENIZER.encode(text), np.int32)
  zeros = np.zeros(len(ids), np.float32)
  segment = Segment("assistant", ids, zeros == 0, zeros, zeros, zeros, np.zeros(len(ids), np.int32))
  value = Reward.invalid("screened: 1 findings") if reward is None else Reward(reward)
  return Trajectory(
    7, task, sample, "made", [segment], reward=value, reward_parts={"exact_match": value},
    tools=[ToolRecord(0, "python", {"code": "\ud800"}, "ok", "4", 0.5)], answer=text,
    metadata={"findings": ["exits: sys.exit"], "hidden": object()},
  )  # fmt: skip


def write(directory, step, episodes, **settings):
  return write_samples(
    directory, step, episodes, tasks=[Task(1, (), "5", "made")], tokenizer=TOKENIZER,
    config=SampleConfig(**settings),
  )  # fmt: skip


def test_the_highest_come_first_and_of_equals_one_of_each_task_whatever_the_order():
  episodes = [
    episode(1, 0, 1.0), episode(1, 1, 1.0), episode(1, 2, 0.5), episode(2, 0, 1.0),
    episode(2, 1, 1.5), episode(3, 0, None), episode(3, 1, -1.0),
  ]  # fmt: skip
  for _ in range(5):
    random.Random(0).shuffle(episodes)
    addresses = [t.address[1:] for t in top_rewards(episodes, 5)]
    assert addresses == [(2, 1), (1, 0), (2, 0), (1, 1), (1, 2)]
  assert len(top_rewards(episodes, 10)) == 6  # no verdict, no sample


def test_a_line_holds_what_a_reader_needs(tmp_path):
  path = write(tmp_path, 7, [episode(1, 3, 1.0, "so it is 4")])
  (line,) = path.read_text().splitlines()
  row = json.loads(line)
  assert path.relative_to(tmp_path).as_posix() == "top_rewards/step_00000007.jsonl"
  assert (row["step"], row["source"], row["task"], row["sample"]) == (7, "made", 1, 3)
  assert (row["reward"], row["parts"], row["status"]) == (1.0, {"exact_match": 1.0}, Status.OK)
  assert (row["answer"], row["expected"]) == ("so it is 4", "5")
  assert row["segments"] == [{"owner": "assistant", "turn": 0, "text": "so it is 4"}]
  assert row["tools"][0]["arguments"] == {"code": "\ud800"}
  assert row["notes"] == {"findings": ["exits: sys.exit"]}


def test_dumps_are_bounded_and_a_resumed_run_writes_each_once(tmp_path):
  def names():
    return sorted(int(p.stem.partition("_")[2]) for p in (tmp_path / "top_rewards").iterdir())

  episodes = [episode(1, n, 1.0) for n in range(9)]
  for step in (10, 20, 30, 40):
    path = write(tmp_path, step, episodes, keep=3, count=4)
  assert names() == [20, 30, 40] and len(path.read_text().splitlines()) == 4
  before = (tmp_path / "top_rewards" / "step_00000030.jsonl").read_bytes()
  write(tmp_path, 30, episodes[::-1], keep=3, count=4)  # resumed after 20
  assert names() == [20, 30]
  assert (tmp_path / "top_rewards" / "step_00000030.jsonl").read_bytes() == before
  write(tmp_path, 40, [], keep=3)
  assert names() == [20, 30, 40] and path.read_text() == ""


def test_impossible_settings_are_refused():
  for fields in ({"every": -1}, {"count": 0}, {"keep": 0}):
    with pytest.raises(ConfigError, match=f"config.reward.samples.{next(iter(fields))}"):
      RewardConfig(samples=SampleConfig(**fields)).validate()
