"""AgentPRM in runs: turns are paid for what they did; deaths and replays change no bit."""

import dataclasses

import numpy as np
import pytest

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.agent_prm import AgentPrmConfig
from agentjax.recipes.agent_prm.signal import PromiseModel
from agentjax.rollout import RolloutConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import OptimizerConfig
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.packing import unpack
from agentjax.trajectory.record import Message, Reward
from agentjax.world.environment import Observation, Step
from tests.training.stages import Digits, fingerprints, run, staged_experiment, train_until_killed

_OBJECTIVE = ObjectiveConfig(
  AdvantageConfig(
    centre="none", scale="none", credit="reward_to_go", index_set="turn", whiten=True
  ),
  PolicyLossConfig(),
)


class Told(Digits):
  """Three turns; the first decides the outcome, and the world tells it at once."""

  SECONDS = 0.0

  async def step(self, action):
    self._paid.append(sum(action.text.encode()) % 2)
    if len(self._paid) == 3:
      return Step(Observation(()), Reward(float(self._paid[0])), terminated=True)
    return Step(Observation((Message("user", 8 * "BG"[self._paid[0]]),)))


def _run(directory, steps=4, *, tasks=2, rate=1e-3, policy_rate=1e-2, every=2):
  schedule = ScheduleConfig()
  own = AgentPrmConfig(optimizer=OptimizerConfig(learning_rate=rate))
  rl = dataclasses.replace(
    staged_experiment(schedule).rl,
    steps=steps,
    tasks_per_step=tasks,
    signals=(own,),
    objective=_OBJECTIVE,
    optimizer=OptimizerConfig(learning_rate=policy_rate),
  )
  rollout = RolloutConfig(
    group_size=4, max_turns=3, max_tokens_per_turn=4, max_total_tokens=128, concurrency=64
  )
  checkpoint = CheckpointConfig(every=every)
  return run(directory, schedule, world=Told, rl=rl, rollout=rollout, checkpoint=checkpoint)


@pytest.mark.slow
def test_a_run_goes_on_after_a_death_with_the_same_bits(tmp_path):
  assert _run(tmp_path / "straight").train().finished
  rows = read_metrics(tmp_path / "straight" / "metrics.jsonl")
  assert all(row["agent_prm/loss"] > 0 for row in rows)
  train_until_killed(_run(tmp_path / "cut"), 4)
  assert _run(tmp_path / "cut").train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "straight")
  assert _run(tmp_path / "cut").replay(4).identical


@pytest.mark.slow
def test_a_turn_after_the_outcome_is_known_has_no_advantage(tmp_path, monkeypatch):
  """GRPO gives all turns of an episode the same advantage. Here the last turn changes nothing, and
  what is still to come of it, R - q_2, vanishes as the model learns."""
  steps = []
  called = PromiseModel.__call__

  def watched(signal, context, networks, batch):
    result = called(signal, context, networks, batch)
    number = len(context.sequences)
    rows = zip(
      unpack(result.columns["token_rewards"], context.packed.segment_ids, number),
      np.asarray(result.columns["rewards"])[:number],
      context.packed.rewards[:number],
      strict=True,
    )
    # Episodes that a breach of the protocol ends before their last turn are left out.
    whole = [(*p[p != 0], left, outcome) for p, left, outcome in rows if np.sum(p != 0) == 3]
    steps.append(np.array(whole))
    return result

  monkeypatch.setattr(PromiseModel, "__call__", watched)
  assert _run(tmp_path, 60, tasks=6, rate=5e-3, policy_rate=1e-5, every=60).train().finished

  def to_come(some):
    *_, third, left, outcome = np.concatenate([s for s in some if len(s)]).T
    assert outcome.std() > 0.4
    return np.abs(third + left).mean()

  assert to_come(steps[:10]) > 0.35 and to_come(steps[-10:]) < 0.25
