"""Preferences as stored episodes, and DPO on them."""

import dataclasses
import math

import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.files import CheckpointError
from agentjax.objectives import preset
from agentjax.objectives.objective import policy_objective
from agentjax.training import Run
from agentjax.training.build import Extensions, build_parts
from agentjax.training.experiment import resolve
from agentjax.training.learner import Learner
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.preferences import (
  PreferenceRow,
  preference_tasks,
  write_preferences,
)
from agentjax.training.stored import read_episodes
from agentjax.trajectory.record import Message
from tests.training.smoke import quiet
from tests.training.teachers import MODEL, base

ROWS = [
  PreferenceRow(i, (Message("user", f"Q{i}?"),), f"good {word}", f"bad, {word} and long")
  for i, word in enumerate(["sky", "sea", "sun", "moon"])
]


def generator(rollouts):
  return base(
    steps=5,
    rollouts=str(rollouts),
    objective=preset("dpo"),
    old_log_probs="recomputed",
    optimizer=OptimizerConfig(learning_rate=1e-2),
  )


@pytest.fixture
def extensions():
  return Extensions(tasks=TaskSplits(preference_tasks(ROWS), ()))


def test_dpo_on_stored_pairs_makes_the_chosen_likelier_than_the_rejected(tmp_path, extensions):
  folder = tmp_path / "pairs"
  experiment = resolve(generator(folder))
  parts = build_parts(experiment, tmp_path, extensions)
  manifest = write_preferences(folder, ROWS, parts)
  pairs = read_episodes(folder)
  assert manifest.episodes == len(pairs) == 8
  assert [t.reward.value for t in pairs] == [1.0, 0.0] * 4
  assert manifest.tokens == sum(len(r.chosen) + len(r.rejected) + 2 for r in ROWS)  # with <|end|>

  learner = Learner(parts, policy_objective(experiment.rl.objective))
  state = learner.begin_rl(learner.initial_state("rl"))

  def gaps(policy):
    prompts = [[i for s in parts.chat.prompt(row.prompt) for i in s.ids] for row in ROWS]
    written = [
      [parts.chat.assistant(Message("assistant", getattr(row, name))) for row in ROWS]
      for name in ("chosen", "rejected")
    ]
    scores = [models.score_responses(policy, MODEL, prompts, texts) for texts in written]
    sums = [np.array([s.log_probs.sum() for s in each]) for each in scores]
    return sums[0] - sums[1]

  before = gaps(learner.policy(state))
  seen = []
  for step in range(1, 6):
    episodes = [dataclasses.replace(t, step=step) for t in pairs]
    state, metrics = learner.rl_step(state, episodes, step)
    seen.append(metrics)
  gained = gaps(learner.policy(state)) - before
  assert seen[0]["preference/loss"] == pytest.approx(math.log(2), abs=1e-5)
  assert seen[-1]["preference/loss"] < 0.6 and seen[-1]["preference/accuracy"] == 1.0
  assert (gained > 0).all()
  # The margin that is reported is that of the tokens themselves, a step before the last.
  assert 0 < seen[-1]["preference/margin"] < 0.1 * gained.mean() * 1.01
  assert not any("mismatch" in name for name in seen[0])


def test_preferences_that_cannot_be_stored_are_named(tmp_path, extensions):
  parts = build_parts(resolve(base()), tmp_path, extensions)
  with pytest.raises(ValueError, match="id of its own"):
    write_preferences(tmp_path / "a", [ROWS[0], ROWS[0]], parts)
  with pytest.raises(ValueError, match="at least one"):
    write_preferences(tmp_path / "a", [], parts)
  long = dataclasses.replace(ROWS[0], rejected="x" * 200)
  with pytest.raises(ValueError, match="row_length=128"):
    write_preferences(tmp_path / "a", [long], parts)
  assert not (tmp_path / "a").exists()
  write_preferences(tmp_path / "a", ROWS[:1], parts)
  with pytest.raises(CheckpointError, match="not empty"):
    write_preferences(tmp_path / "a", ROWS[:1], parts)


def test_settings_that_would_not_follow_the_gradient_of_dpo_are_refused():
  for changes, named in (
    ({"minibatches": 2}, "minibatches"),
    ({"epochs": 2}, "epochs"),
    ({"old_log_probs": "behaviour"}, "old_log_probs"),
  ):
    values = {"objective": preset("dpo"), "old_log_probs": "recomputed", **changes}
    with pytest.raises(ConfigError, match=named):
      resolve(base(**values))
  alone = base(objective=preset("dpo"), old_log_probs="recomputed")
  alone.rollout.group_size = 1
  with pytest.raises(ConfigError, match="group_size"):
    resolve(alone)


@pytest.mark.slow
def test_a_run_of_dpo_trains_checkpoints_and_replays(tmp_path, extensions):
  folder = tmp_path / "pairs"
  write_preferences(folder, ROWS, build_parts(resolve(generator(folder)), tmp_path, extensions))
  directory = tmp_path / "run"
  Run(generator(folder), directory, extensions=extensions, console=quiet()).train()
  replayed = Run(generator(folder), directory, extensions=extensions, console=quiet()).replay(3)
  assert replayed.identical
