"""With ``exact_chunk`` the importance ratio of a run's first update is 1, to the last bit."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.models import LoraConfig
from agentjax.objectives.objective import policy_objective
from agentjax.rollout.loop import collect
from agentjax.training import Run
from agentjax.training.build import Extensions, build_parts
from agentjax.training.evaluation import build_engine
from agentjax.training.experiment import resolve
from agentjax.training.learner import Learner
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.packing import to_sequences
from tests.training.smoke import quiet, smoke_experiment

pytestmark = pytest.mark.optimised


def exact_experiment(pattern: str, **rl):
  """configs/smoke.py without its warm start, on the grid, in micro-batches of one row."""
  experiment = smoke_experiment()
  return dataclasses.replace(
    experiment,
    model=dataclasses.replace(experiment.model, pattern=pattern, exact_chunk=8),
    supervised=dataclasses.replace(experiment.supervised, steps=0),
    rl=dataclasses.replace(
      experiment.rl,
      **{"steps": 2, "microbatch_rows": 1, "tasks_per_step": 2, **rl},
      sampling=dataclasses.replace(experiment.rl.sampling, temperature=0.8),
    ),
    evaluation=dataclasses.replace(experiment.evaluation, tasks=0),
  )


@pytest.mark.slow
def test_sampler_and_trainer_of_a_run_agree_to_the_last_bit(tmp_path):
  experiment = exact_experiment("M*E-", epochs=2, old_log_probs="recomputed")
  assert Run(experiment, tmp_path / "run", console=quiet()).train().finished
  metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
  # Of a step's optimiser steps the first one's mismatch is reported.
  assert [row["mismatch/max"] for row in metrics] == [0.0, 0.0]
  assert [row["mismatch/mean"] for row in metrics] == [0.0, 0.0]


@pytest.mark.parametrize(
  "pattern",
  [pytest.param("M*E-", id="hybrid"), pytest.param("*-*-", marks=pytest.mark.slow, id="dense")],
)
def test_the_first_update_has_ratio_one(tmp_path, pattern):
  """Through the learner: episodes of the engine, micro-batches, gradients."""
  experiment = exact_experiment(pattern)
  resolve(experiment)
  parts = build_parts(experiment, tmp_path, Extensions())
  learner = Learner(parts, policy_objective(experiment.rl.objective))
  state = learner.initial_state("rl")
  engine = build_engine(parts)
  engine.publish(learner.policy(state), 1)
  try:
    trajectories = asyncio.run(
      collect(
        parts.tasks.train[:2],
        step=1,
        samples_per_task=2,
        player=parts.player(engine, experiment.rl.sampling, 0),
        make_environment=parts.make_environment,
        rewards=parts.rewards,
        program=parts.program,
        finished={},
        on_finish=lambda trajectory: None,
      )
    )
  finally:
    engine.close()
  # Nobody answers right by chance.
  trajectories = [
    dataclasses.replace(t, reward=dataclasses.replace(t.reward, value=float(t.address[2])))
    for t in trajectories
  ]
  batch = learner._pack(to_sequences(trajectories))
  assert batch.token_ids.shape[0] >= 4 and (np.asarray(batch.weights) > 0).sum() > 20
  # The log-probs that the update computes are the sampler's, on every weighted token.
  scores = np.asarray(learner.score(state.weights, batch)[0])
  weighted = np.asarray(batch.weights) > 0
  np.testing.assert_array_equal(scores[weighted], np.asarray(batch.behaviour_log_probs)[weighted])
  before = jax.tree.map(np.asarray, state.weights)
  state, metrics = learner.rl_step(state, trajectories, 1)
  assert metrics["mismatch/max"] == 0.0
  assert metrics["policy/kl_old"] == 0.0 and metrics["policy/clip_fraction"] == 0.0
  # A mean of ones, whose weights are rounded.
  assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, state.weights)
  assert max(jax.tree.leaves(moved)) > 1e-3
  # The same episodes again are no longer the policy's own.
  _, metrics = learner.rl_step(state, trajectories, 1)
  assert metrics["mismatch/max"] > 1e-4


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rl": {"row_length": 252}}, r"rl\.row_length=252; allowed: a multiple of.*exact_chunk=8"),
    ({"rl": {"replay_experts": True}}, r"replay_experts=True.*chooses the experts"),
    (
      {"lora": LoraConfig(), "rl": {"router_bias_rate": 0.0}},
      r"exact_chunk=8; allowed: 0 with config\.lora",
    ),
  ],
  ids=["row_length", "replay", "lora"],
)
def test_what_a_run_cannot_do_exactly_is_refused(changes, message):
  experiment = exact_experiment("M*E-", **changes.pop("rl", {}))
  with pytest.raises(ConfigError, match=message):
    dataclasses.replace(experiment, **changes).validate()
