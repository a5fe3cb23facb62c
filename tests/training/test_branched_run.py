"""A run whose groups are branched: named in the config, recorded, replayed."""

import dataclasses

import pytest

from agentjax.recipes.arpo import BranchConfig
from agentjax.training import Run
from agentjax.training.journal import JournalReader
from agentjax.trajectory.record import BRANCHES
from tests.training.smoke import quiet, smoke_experiment


@pytest.mark.slow
def test_a_run_of_branched_groups_replays_to_the_same_hash(tmp_path):
  experiment = smoke_experiment()
  experiment.rollout = dataclasses.replace(
    experiment.rollout,
    group_size=4,
    max_turns=3,
    sampler=BranchConfig(roots=2, base=1.0),
  )
  experiment.rl.objective.advantage.branches = "hard"
  run = Run(experiment, tmp_path / "run", console=quiet())
  assert run.train().finished
  members = JournalReader(tmp_path / "run" / "journal.log").trajectories(
    lambda address: address[0] == 5
  )
  assert len(members) == 8 and all(BRANCHES in t.metadata for t in members.values())
  assert run.replay(5).identical
