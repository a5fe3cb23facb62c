"""Rewards of turns: recorded where they were earned, paid there, and all in all once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig, preset
from agentjax.objectives.preparation import prepare
from agentjax.rewards import RewardConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.reward_parts import TurnRewards
from agentjax.signals.signal import BatchContext, StepContext
from agentjax.training.journal import JournalReader
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences, unpack, without_prompt
from agentjax.trajectory.record import Reward
from tests.training.stages import (
  PaidDigits,
  fingerprints,
  run,
  staged_experiment,
  train_until_killed,
)

_PLAIN = AdvantageConfig(centre="none", scale="none", credit="reward_to_go", index_set="turn")
_LOSS = PolicyLossConfig(clip="none")


def _prepare(batch, config, **extra):
  return jax.jit(lambda batch, extra: prepare(batch, config, **extra)[0])(batch, extra)


def _episode(paid, weights=None, sample=0):
  """A prompt and turns of two tokens with an observation after each."""
  builder = TrajectoryBuilder(step=1, task_id=0, sample=sample, source="x")
  builder.append("user", [1, 2, 3])
  rewards: list[float | None] = [None]
  for i, reward in enumerate(paid):
    own = None if weights is None else weights[2 * i : 2 * i + 2]
    builder.append_sampled([4, 5], [-1.0, -1.0], [0.5, 0.5], 0, weights=own)
    builder.append("user", [6])
    rewards += [reward, None]
  total = sum(r for r in paid if r is not None)
  trajectory = builder.build(
    reward=Reward(0.5 * total + 2.0), turn_rewards={"environment": rewards}
  )
  trajectory.reward_parts["environment"] = Reward(total)
  return trajectory


def _observed(trajectory, share=1.0):
  """The episode as the signal leaves it, and the signal."""
  signal = TurnRewards({"environment": share})
  (seen,), _ = signal.observe(StepContext(1, None), [trajectory])
  return seen, signal


def _placed(trajectory, share=1.0, row_length=16, **columns):
  """[B, T] of what an advantage is given, and the batch."""
  seen, signal = _observed(trajectory, share)
  sequences = to_sequences([seen])
  packed = pack(sequences, row_length=row_length, pad_id=0)
  batch = jax.tree.map(jnp.asarray, packed).with_columns(columns)
  context = BatchContext(1, None, sequences, packed, None, None)
  return np.asarray(signal(context, {}, batch).columns["turn_rewards"])[0], batch


def test_a_turn_is_paid_on_its_last_token_with_weight_and_one_without_on_the_one_before():
  np.testing.assert_array_equal(np.flatnonzero(_placed(_episode([1.0, None, 3.0]))[0]), [4, 10])
  # The last token of the first turn, and the whole second one, have no weight.
  paid, _ = _placed(_episode([1.0, 2.0, 4.0], weights=[1, 0, 0, 0, 1, 1]), share=0.5)
  np.testing.assert_array_equal(paid[[3, 10]], [1.5, 2.0])
  assert np.count_nonzero(paid) == 2
  # Nobody is paid for what comes before the first token with weight; the sum stays.
  paid, _ = _placed(_episode([1.0, 2.0], weights=[0, 0, 1, 1]))
  np.testing.assert_array_equal(paid[[4, 7]], [1.0, 2.0])
  # Nor for a token that a signal has not selected.
  selected = jnp.ones((1, 16), bool).at[0, 4].set(False)
  paid, _ = _placed(_episode([1.0, 2.0]), selected=selected)
  np.testing.assert_array_equal(np.flatnonzero(paid), [3, 7])


def test_without_its_prompt_a_sequence_keeps_what_its_turns_earned():
  (sequence,) = to_sequences([_observed(_episode([1.0, 2.0]))[0]])
  cut = without_prompt(sequence)
  assert cut is not None
  np.testing.assert_array_equal(np.flatnonzero(cut.columns["turn_rewards"]), [2, 5])


def test_in_a_row_of_several_each_is_paid_in_its_own_sequence():
  signal = TurnRewards({"environment": 1.0})
  # The second has no weight before it earns anything: that must not go to the first.
  episodes = [_episode([1.0]), _episode([2.0, 4.0], weights=[0, 0, 1, 1], sample=1)]
  seen, _ = signal.observe(StepContext(1, None), episodes)
  sequences = to_sequences(seen)
  packed = pack(sequences, row_length=32, pad_id=0)
  context = BatchContext(1, None, sequences, packed, None, None)
  found = signal(context, {}, jax.tree.map(jnp.asarray, packed)).columns["turn_rewards"]
  one, other = unpack(found, packed.segment_ids, 2)
  assert one.tolist() == [0, 0, 0, 0, 1, 0]
  assert other.tolist() == [0, 0, 0, 0, 2, 0, 0, 4, 0]


def test_paid_early_or_at_the_end_an_episode_is_paid_the_same():
  trajectory = _episode([1.0, -0.5, 2.0])
  paid, batch = _placed(trajectory, share=0.5)
  by_turn = dataclasses.replace(_PLAIN, turn_rewards=("environment",))

  def first_turns(config, **extra):
    prepared = _prepare(batch, ObjectiveConfig(config, _LOSS), **extra)
    return np.asarray(prepared.advantages)[0, [3, 6, 9]]

  early = first_turns(by_turn, turn_rewards=paid[None])
  late = first_turns(_PLAIN)
  # 2 is what other parts of the reward gave.
  np.testing.assert_allclose(early, [3.25, 2.75, 3.0], atol=1e-6)
  np.testing.assert_allclose(late, [3.25, 3.25, 3.25], atol=1e-6)


def test_bilevel_gae_of_a_run_sees_the_golden_rewards():
  """The numbers of ``test_golden_bilevel_gae_counts_turns_that_earn_nothing``."""
  builder = TrajectoryBuilder(step=1, task_id=0, sample=0, source="x")
  builder.append("user", [1])
  for ids in ([4, 5], [6, 7]):
    builder.append_sampled(ids, [-1.0, -1.0], [0.5, 0.5], 0)
    builder.append("user", [8])
  paid = [None, -0.1, None, 1.0, None]
  trajectory = builder.build(reward=Reward(0.9), turn_rewards={"environment": paid})
  trajectory.reward_parts["environment"] = Reward(0.9)
  placed, batch = _placed(trajectory, row_length=8)
  config = preset("ragen")
  config.advantage.turn_rewards = ("environment",)
  config.advantage.whiten = False
  values = jnp.array([[9, 0.2, 0.4, 9, 0.3, 0.6, 9, 9]], jnp.float32)

  def advantages():
    prepared = _prepare(batch, config, values=values, turn_rewards=placed[None])
    return np.asarray(prepared.advantages)[0, [1, 2, 4, 5]]

  np.testing.assert_allclose(advantages(), [0.60945, 0.431, 0.68, 0.4], atol=1e-6)
  config.advantage.turn_rewards = ()
  np.testing.assert_allclose(advantages()[1], 0.44075, atol=1e-6)  # all .9 at the end


def _experiment(credit):
  rl = dataclasses.replace(
    staged_experiment(ScheduleConfig()).rl, steps=2, objective=ObjectiveConfig(credit, _LOSS)
  )
  return dict(world=PaidDigits, rl=rl)


def _advantages_of(directory, credit):
  """Runs, and gives of every episode the advantage of its first and its last drawn token."""
  found = {}
  made = run(directory, ScheduleConfig(), **_experiment(credit))
  with made._session() as session:
    apply = session.learner._apply

    def looking(update, state, one, number):
      packed, values = one.packed, np.asarray(one.ready[number].prepared.advantages)
      for i, address in enumerate(session.parts.order):
        places = np.argwhere((packed.segment_ids == i + 1) & (packed.versions >= 0))
        found[address] = values[tuple(places[0])], values[tuple(places[-1])]
      return apply(update, state, one, number)

    step = session.learner.rl_step

    def noting(state, trajectories, number):
      object.__setattr__(session.parts, "order", [t.address for t in trajectories])
      return step(state, trajectories, number)

    session.learner._apply, session.learner.rl_step = looking, noting
    assert session.train().finished
  return made, found


def test_a_run_pays_each_turn_what_the_environment_paid_it_and_replays(tmp_path):
  discounted = dataclasses.replace(_PLAIN, gamma=0.5)
  by_turn = dataclasses.replace(discounted, turn_rewards=("environment",))
  made, found = _advantages_of(tmp_path / "turns", by_turn)
  episodes = JournalReader(tmp_path / "turns" / "journal.log").trajectories(lambda _: True)
  assert len(episodes) == len(found) == 16
  several = 0
  for address, trajectory in episodes.items():
    # A policy error ends an episode before its turn is paid.
    recorded = trajectory.turn_rewards.get("environment", [None] * len(trajectory.segments))
    both = zip(recorded, trajectory.segments, strict=True)
    earned = [paid or 0.0 for paid, segment in both if segment.sampled.any()]
    assert sum(earned) == pytest.approx(trajectory.reward.value)
    first = sum(0.5**k * reward for k, reward in enumerate(earned))
    np.testing.assert_allclose(found[address], [first, earned[-1]], atol=1e-6)
    several += len(earned) > 1 and earned[0] > 0
  assert several > 2
  rows = read_metrics(tmp_path / "turns" / "metrics.jsonl")
  assert rows[0]["reward/by_turn"] == pytest.approx(rows[0]["reward/mean"], rel=1e-5)
  assert made.replay(2).identical


@pytest.mark.slow
def test_killed_before_an_update_it_pays_turns_again_to_the_same_bits(tmp_path):
  """What the turns of the second step earned is in the journal alone when it goes on."""
  changes = _experiment(dataclasses.replace(_PLAIN, turn_rewards=("environment",)))
  for name in ("straight", "run"):
    made = run(tmp_path / name, ScheduleConfig(), **changes)
    if name == "run":
      train_until_killed(made, 2)
    assert made.train().finished
  assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "straight")
  rows = [read_metrics(tmp_path / name / "metrics.jsonl")[1] for name in ("straight", "run")]
  assert rows[0]["reward/by_turn"] == rows[1]["reward/by_turn"] != 0


@pytest.mark.slow
def test_without_the_setting_a_run_pays_at_the_end(tmp_path):
  _, late = _advantages_of(tmp_path / "end", dataclasses.replace(_PLAIN, gamma=0.5))
  episodes = JournalReader(tmp_path / "end" / "journal.log").trajectories(lambda _: True)
  for address, (first, last) in late.items():
    trajectory = episodes[address]
    turns = sum(s.sampled.any() for s in trajectory.segments)
    expected = [0.5 ** (turns - 1) * trajectory.reward.value, trajectory.reward.value]
    np.testing.assert_allclose([first, last], expected, atol=1e-6)


@pytest.mark.slow
def test_the_ragen_preset_trains_on_turn_rewards_and_replays(tmp_path):
  objective = preset("ragen")
  objective.advantage.turn_rewards = ("environment",)
  rl = dataclasses.replace(staged_experiment(ScheduleConfig()).rl, steps=2, objective=objective)
  made = run(tmp_path / "run", ScheduleConfig(), world=PaidDigits, rl=rl)
  assert made.train().finished and made.replay(2).identical


def test_a_part_that_no_turn_earned_is_refused(tmp_path):
  config = dataclasses.replace(_PLAIN, turn_rewards=("sampled_tokens",))
  changes = _experiment(config)
  reward = RewardConfig(parts=("environment", "sampled_tokens"), weights=(1.0, 0.1))
  with pytest.raises(ConfigError, match="earned turn by turn"):
    run(tmp_path / "run", ScheduleConfig(), reward=reward, **changes).train()


@pytest.mark.parametrize(
  "credit, reward, message",
  [
    (
      AdvantageConfig(centre="none", scale="none", turn_rewards=("environment",)),
      None,
      r"turn_rewards=.*no effect",
    ),
    (dataclasses.replace(_PLAIN, turn_rewards=("exact_match",)), None, r"turn_rewards=.*some of"),
    (
      dataclasses.replace(_PLAIN, turn_rewards=("environment",), centre="group_mean"),
      None,
      r"centre='group_mean'; allowed: 'none'",
    ),
    (
      dataclasses.replace(_PLAIN, turn_rewards=("environment",)),
      RewardConfig(
        parts=("exact_match", "environment"),
        formula="exact_match + (environment if exact_match >= 1 else 0)",
      ),
      r"turn_rewards=.*no formula",
    ),
  ],
)
def test_settings_that_would_pay_twice_or_nowhere_are_refused(credit, reward, message):
  experiment = staged_experiment(ScheduleConfig())
  experiment.rl.objective = ObjectiveConfig(credit, _LOSS)
  if reward is not None:
    experiment.reward = reward
  with pytest.raises(ConfigError, match=message):
    experiment.validate()
