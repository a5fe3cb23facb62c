"""Rewards of methods that are configs, from the configs themselves: tables by hand."""

import json
import pathlib

import pytest

from agentjax.data import load_tasks
from agentjax.rewards.formula import Formula
from agentjax.training import load_experiment
from agentjax.trajectory.record import Reward

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def experiment(name):
  return load_experiment(_CONFIGS / f"{name}.py")


@pytest.mark.parametrize(
  ("name", "parts", "paid"),
  [
    # ARTIST: two right answers of equal worth to GRPO differ by how many of their calls worked.
    ("artist_word_problems", {"exact_match": 1, "format": 1, "tool_calls": 4, "tool_errors": 0}, 4),
    ("artist_word_problems", {"exact_match": 1, "format": 1, "tool_calls": 4, "tool_errors": 0.75},
     3.25),
    ("artist_word_problems", {"exact_match": 0, "format": 1, "tool_calls": 0, "tool_errors": 0}, 1),
    # DeepAnalyze: the gate, then the mean of task and code, and the task alone without code.
    ("deep_analyze_word_problems",
     {"exact_match": 1, "format": 0, "tool_calls": 2, "tool_errors": 0}, -1),
    ("deep_analyze_word_problems",
     {"exact_match": 1, "format": 1, "tool_calls": 2, "tool_errors": 0.5}, 0.75),
    ("deep_analyze_word_problems",
     {"exact_match": 0, "format": 1, "tool_calls": 2, "tool_errors": 0}, 0.5),
    ("deep_analyze_word_problems",
     {"exact_match": 0, "format": 1, "tool_calls": 0, "tool_errors": 0}, 0),
    ("deep_analyze_word_problems",
     {"exact_match": 1, "format": 1, "tool_calls": 0, "tool_errors": 0}, 1),
    ("a3t_word_problems", {"exact_match": 1}, 1),
    ("a3t_word_problems", {"exact_match": 0}, -1),
    # IPA: its negatives, and a success of the value at which its anchors move.
    ("ipa_word_problems", {"exact_match": 1}, 1),
    ("ipa_word_problems", {"exact_match": 0}, -1),
  ],
)  # fmt: skip
def test_a_reward_is_that_of_the_method(name, parts, paid):
  reward = experiment(name).reward
  assert set(parts) == set(reward.parts)
  found = Formula(reward.formula).evaluate({k: Reward(float(v)) for k, v in parts.items()})
  assert found.value == pytest.approx(paid)


def test_a_fifth_of_the_conversations_are_trajectories_of_agents(tmp_path):
  said = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
  (tmp_path / "train.jsonl").write_text(json.dumps({"messages": said}) + "\n")
  data = experiment("agent_tuning").data
  data.path, data.train_size = str(tmp_path), 50
  tasks = load_tasks(data).train
  agents = [task for task in tasks if any(turn.tool_calls for turn in task.demonstration)]
  assert (len(tasks), len(agents)) == (50, 10)
