"""A run whose groups are branched: named in the config, recorded, replayed."""

import dataclasses

import pytest

from agentjax.objectives.objective import policy_objective
from agentjax.recipes.arpo import BranchConfig
from agentjax.recipes.credit import SharedTerm
from agentjax.training import Run
from agentjax.training.build import build_parts
from agentjax.training.experiment import resolve
from agentjax.training.journal import JournalReader
from agentjax.training.learner import Learner
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import BRANCHES, Reward
from tests.training.smoke import quiet, smoke_experiment
from tests.training.stages import extensions
from tests.training.teachers import base


def _branched():
  """Two episodes that share all that was drawn, but for a second turn of one token each."""
  first = TrajectoryBuilder(step=1, task_id=0, sample=0, source="x")
  first.append("user", [1, 2, 3])
  first.append_sampled([10, 11, 12], [-1.0] * 3, [1.0] * 3, 1)
  made = []
  for sample, builder in enumerate((first, first.branch(1))):
    builder.append_sampled([20 + sample], [-1.0], [1.0], 1)
    made.append(builder.build(reward=Reward(float(sample)), metadata={BRANCHES: [0, 0, sample]}))
  return made


def test_tokens_that_branches_share_have_their_mean_advantage_in_an_update(tmp_path):
  sizes = {}
  for branches in ("soft", "hard"):
    experiment = base()
    experiment.rl.objective.advantage.terms = (SharedTerm(),) if branches == "hard" else ()
    experiment.rl.objective.advantage.scale = "none"
    parts = build_parts(resolve(experiment), tmp_path / branches, extensions())
    learner = Learner(parts, policy_objective(parts.experiment.rl.objective))
    state = learner.begin_rl(learner.initial_state("rl"))
    sizes[branches] = learner.rl_step(state, _branched(), 1)[1]["advantage/mean_abs"]
  # Of 2 x (3 + 1) tokens with +-.5 the six shared ones have 0.
  assert sizes["soft"] == pytest.approx(0.5) and sizes["hard"] == pytest.approx(0.125)


@pytest.mark.slow
def test_a_run_of_branched_groups_replays_to_the_same_hash(tmp_path):
  experiment = smoke_experiment()
  experiment.rollout = dataclasses.replace(
    experiment.rollout,
    group_size=4,
    max_turns=3,
    sampler=BranchConfig(roots=2, base=1.0),
  )
  experiment.rl.objective.advantage.terms = (SharedTerm(),)
  run = Run(experiment, tmp_path / "run", console=quiet())
  assert run.train().finished
  members = JournalReader(tmp_path / "run" / "journal.log").trajectories(
    lambda address: address[0] == 5
  )
  assert len(members) == 8 and all(BRANCHES in t.metadata for t in members.values())
  assert run.replay(5).identical
