"""A run writes down what earned most, and going on with it writes nothing twice."""

import json

from agentjax.rewards.samples import top_rewards
from agentjax.training import Run
from agentjax.training.journal import read_journal
from tests.training.smoke import quiet, smoke_experiment


def _dumps(directory):
  return {p.name: p.read_text() for p in sorted((directory / "top_rewards").iterdir())}


def test_a_run_keeps_the_dumps_of_its_last_steps_and_a_second_start_changes_none(finished_run):
  directory, *_ = finished_run
  dumps = _dumps(directory)
  assert list(dumps) == ["step_00000004.jsonl", "step_00000005.jsonl"]
  episodes = [t for kind, t in read_journal(directory / "journal.log") if kind == "trajectory"]
  for step, text in zip((4, 5), dumps.values(), strict=True):
    rows = [json.loads(line) for line in text.splitlines()]
    best = top_rewards([t for t in episodes if t.step == step], 2)
    assert [(r["task"], r["sample"], r["reward"]) for r in rows] == [
      (t.task_id, t.sample, t.reward.value) for t in best
    ]
    assert all(row["segments"] for row in rows)
  Run(smoke_experiment(), directory, console=quiet()).train()
  assert _dumps(directory) == dumps
