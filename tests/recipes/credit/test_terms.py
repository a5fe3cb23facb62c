"""Advantage terms: what each changes beside plain GRPO, on packed batches and on episodes."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import ObjectiveConfig, policy_objective, prepare
from agentjax.objectives.advantage_function import AdvantageChoice, AdvantageTerm
from agentjax.objectives.advantages import AdvantageConfig
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.recipes.credit import (
  AgreementTerm,
  DurationTerm,
  EntropyTerm,
  OthersMedian,
  PartsAdvantage,
  StepsTerm,
  ToolSuccessTerm,
)
from agentjax.recipes.credit.entropy import EntropyExcess, entropy_balanced_clip
from agentjax.recipes.credit.medians import others_median
from agentjax.rewards import RewardConfig
from agentjax.schedules import LinearSchedule
from agentjax.signals.build import credit_signals
from agentjax.signals.signal import StepContext
from agentjax.training import load_experiment
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Reward, Status, ToolRecord
from tests.training.smoke import smoke_experiment

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
_CONTEXT = StepContext(1, None)


def episode(sample, reward, turns, *, tools=(), entropies=None, steps=None):
  """Turns of two drawn tokens, each with an observation of one token."""
  builder = TrajectoryBuilder(step=1, task_id=0, sample=sample, source="x")
  builder.append("user", [1, 2])
  for turn in range(turns):
    known = [0.5, 0.5] if entropies is None else entropies[2 * turn : 2 * turn + 2]
    builder.append_sampled([3, 4], [-1.0, -1.0], known, 0)
    builder.append("tool", [5])
  made = builder.build(reward=Reward(reward))
  made.tools = [ToolRecord(turn, "f", {}, status, "", s) for turn, status, s in tools]
  if steps is not None:
    given = iter(steps)
    made.turn_rewards = {"judge": [next(given) if s.sampled.any() else None for s in made.segments]}
  return made


def advantages(episodes, *terms, **settings):
  """By episode those of its drawn tokens, from a prepared batch."""
  for term in (*terms, *filter(None, [settings.get("function")])):
    for signal in term.signals(None):
      episodes, _ = signal.observe(_CONTEXT, episodes)
  batch = pack(to_sequences(episodes), row_length=64, pad_id=0)
  config = ObjectiveConfig(AdvantageConfig(terms=terms, **settings))
  config.validate()
  prepared, _ = prepare(batch, config)
  found, ids = np.asarray(prepared.advantages), np.asarray(batch.segment_ids)
  weighted = np.asarray(batch.weights) > 0
  return [found[weighted & (ids == i + 1)] for i in range(len(episodes))]


def test_a_turn_counts_by_the_seconds_of_its_calls():
  """With (.5, .5) seconds at a turn and 1 and 10 at the others the mean is 4."""
  made = [
    episode(0, 1.0, 2, tools=((0, "ok", 0.25), (1, "ok", 7.0), (1, "ok", 3.0))),
    episode(1, 0.0, 1),
  ]
  long, short = advantages(made, DurationTerm(least_seconds=1.0), scale="none")
  np.testing.assert_allclose(long, 0.5 * np.repeat([1 / 4, 10 / 4], 2), rtol=1e-6)
  np.testing.assert_allclose(short, -0.5 * np.repeat([1 / 4], 2), rtol=1e-6)


def test_over_an_hour_the_better_action_wins_although_it_takes_longer():
  """Half of the actions take 10 s and earn 1, half take 1 s and earn .2: by count and gain alone
  the short one is pushed up twice as much in 1000 s, by the time five times less."""
  per_second = {"short": (1.0, 0.2), "long": (10.0, 1.0)}
  made = [
    episode(i, gain, 1, tools=((0, "ok", seconds),))
    for i, (seconds, gain) in enumerate(per_second.values())
  ]
  short, long = advantages(made, DurationTerm(), centre="none", scale="none")
  plain = {name: gain * (1000 / seconds) for name, (seconds, gain) in per_second.items()}
  assert plain["short"] == 2 * plain["long"]
  assert long[0] * (1000 / 10) == pytest.approx(5 * short[0] * (1000 / 1))


def test_programs_of_the_config_differ_although_they_are_short():
  """Worked solutions there run for .03 to .4 s: a floor of a second would make all turns equal."""
  config = load_experiment(_CONFIGS / "rl4mle.py").rl.objective.advantage
  made = [episode(i, 1.0, 1, tools=((0, "ok", s),)) for i, s in enumerate((0.03, 0.3))]
  short, long = advantages(made, *config.terms, centre="none", scale="none")
  assert long[0] == pytest.approx(10 * short[0])


def test_a_good_episode_does_not_reward_its_failed_calls():
  made = [
    episode(0, 1.0, 3, tools=((0, "error", 1.0), (1, "ok", 1.0), (1, "error", 1.0))),
    episode(1, 0.0, 1, tools=((0, "error", 1.0),)),
  ]
  good, bad = advantages(made, ToolSuccessTerm(failed=0.2), scale="none")
  np.testing.assert_allclose(good, 0.5 * np.repeat([0.2, 0.6, 1.0], 2), rtol=1e-6)
  np.testing.assert_allclose(bad, [-0.5, -0.5])


def test_uncertain_tokens_count_more_and_no_sign_turns():
  """H = (.1, .1, .1, 2) gives 1 + .2 z = (.885, .885, .885, 1.346)."""
  made = [episode(0, 1.0, 2, entropies=[0.1, 0.1, 0.1, 2.0])]
  (found,) = advantages(made, EntropyTerm(), centre="none", scale="none")
  np.testing.assert_allclose(found, [0.885, 0.885, 0.885, 1.346], atol=1e-3)
  (found,) = advantages(made, EntropyTerm(share=3.0), centre="none", scale="none")
  assert found.min() == 0.0


def test_steps_are_standardised_over_all_turns_of_their_group():
  """Rewards of steps 1, 2, 3, 6 beside 0/1 outcomes: both streams have one scale."""
  made = [episode(0, 1.0, 3, steps=[100.0, 200.0, None]), episode(1, 0.0, 2, steps=[300.0, 600.0])]
  steps = np.array([100.0, 200.0, 300.0, 600.0])
  standard = (steps - steps.mean()) / steps.std()
  good, bad = advantages(made, StepsTerm("judge", weight=0.5))
  outcome = 0.5**0.5
  expected = outcome + 0.5 * np.array([standard[0], standard[1], 0.0])
  np.testing.assert_allclose(good, np.repeat(expected, 2), rtol=1e-4)
  np.testing.assert_allclose(bad, np.repeat(-outcome + 0.5 * standard[2:], 2), rtol=1e-4)


def test_steps_that_nobody_judged_are_refused():
  with pytest.raises(ConfigError, match="part='environment'.*here judge"):
    StepsTerm().signals(None)[0].observe(_CONTEXT, [episode(0, 1.0, 1, steps=[1.0])])


def test_a_part_that_the_reward_does_not_have_is_refused_before_a_run():
  credit = AdvantageConfig(terms=(StepsTerm("judge"),))
  experiment = smoke_experiment()
  experiment.rl.objective = ObjectiveConfig(credit)
  with pytest.raises(ConfigError, match=r"terms 'steps'\.part='judge'.*reward\.parts"):
    experiment.validate()


def test_agreement_trusts_and_opens_the_bound():
  """s = .3 / .55 / .8 with s_min .6: scales .6 / .8 / 1, bonuses .1 / .05 / 0."""
  term = AgreementTerm()
  shares = jnp.array([[0.3, 0.55, 0.8]])
  inputs = _Columns({"agreement": shares})
  np.testing.assert_allclose(term(inputs, jnp.ones((1, 3))), [[0.6, 0.8, 1.0]], atol=1e-6)
  np.testing.assert_allclose(term.clip_high_bonus(inputs), [[0.1, 0.05, 0.0]], atol=1e-6)


@dataclasses.dataclass
class _Columns:
  columns: dict

  def column(self, name):
    return self.columns[name]


def test_agreement_is_refused_where_no_clip_bound_counts():
  config = ObjectiveConfig(AdvantageConfig(terms=(AgreementTerm(),)), PolicyLossConfig(clip="none"))
  with pytest.raises(ConfigError, match=r"objective\.policy_loss\.clip='none'"):
    config.advantage.terms[0].check_run(None, config, "objective")


def test_terms_follow_one_another_and_survive_a_saved_config():
  made = [episode(i, 1.0 - i, 1, tools=((0, "error", s),)) for i, s in enumerate((3.0, 1.0))]
  terms = (ToolSuccessTerm(failed=0.5), DurationTerm())
  good, _ = advantages(made, *terms, scale="none")
  np.testing.assert_allclose(good, 0.5 * 0.5 * 3 / 2, rtol=1e-6)
  config = AdvantageConfig(terms=terms)
  assert AdvantageConfig.from_dict(config.to_short_dict()) == config
  assert config.to_short_dict()["terms"] == [{"use": "tool_success", "failed": 0.5}, "duration"]


@pytest.mark.parametrize("failed", [0.0, 0.5, 1.0])
def test_a_number_of_a_term_may_be_a_schedule(failed):
  term = ToolSuccessTerm(failed=LinearSchedule(start=0.0, end=1.0, steps=4))
  config = ObjectiveConfig(AdvantageConfig(terms=(term,), scale="none"))
  config.validate()
  assert list(config.abstract_numbers) == ["advantage.terms[0].failed"]
  made = [episode(0, 1.0, 1, tools=((0, "error", 1.0),)), episode(1, 0.0, 1)]
  (signal,) = term.signals(None)
  batch = pack(to_sequences(signal.observe(_CONTEXT, made)[0]), row_length=16, pad_id=0)
  numbers = {"advantage.terms[0].failed": jnp.float32(failed)}
  found = np.asarray(prepare(batch, config, numbers=numbers)[0].advantages)
  assert found.max() == pytest.approx(0.5 * failed) and found.min() == -0.5


@pytest.mark.parametrize("base", [AdvantageTerm, AdvantageChoice])
def test_every_name_chooses_something(base):
  for name in base.built_in():
    assert base.from_name(name, "chosen").chosen == name


def test_parts_are_standardised_one_by_one_so_that_a_small_one_is_heard():
  """Parts of sizes 100 and .1: (0, 0, 3^.5, -3^.5) with equal weights, where the sum of the parts
  would hear the first alone."""
  made = [episode(0.0, i, 1) for i in range(4)]
  for one, (large, small) in zip(made, ((100, 0), (0, 0.1), (100, 0.1), (0, 0)), strict=True):
    one.reward_parts = {"large": Reward(float(large)), "small": Reward(float(small))}
  config = PartsAdvantage(parts=("large", "small"))
  found = [a[0] for a in advantages(made, function=config)]
  np.testing.assert_allclose(found, [0, 0, 3**0.5, -(3**0.5)], atol=1e-3)
  half = PartsAdvantage(parts=("large", "small"), weights=(1.0, 0.5))
  found = [a[0] for a in advantages(made, function=half)]
  np.testing.assert_allclose(found, np.array([0.5, -0.5, 1.5, -1.5]) * 0.75**0.5, atol=1e-3)


def test_an_episode_without_a_part_and_a_breach_are_judged_as_the_reward_is():
  made = [episode(0.0, i, 1) for i in range(4)]
  for i, one in enumerate(made):
    one.reward_parts = {"a": Reward(float(i)), "b": Reward(float(i % 2))}
  made[3].reward_parts["b"] = Reward.invalid("no verdict")
  made[2].status = Status.POLICY_ERROR  # its parts count 0 at most
  (signal,) = PartsAdvantage(parts=("a", "b")).signals(None)
  known, _ = signal.observe(_CONTEXT, made)
  assert not known[3].reward.valid and made[3].reward.valid
  found = [float(one.columns["part_advantage"]) for one in known]
  # Parts a (0, 1, 0) and b (0, 1, 0) of the three that count: 2 / 3 over .577 each.
  np.testing.assert_allclose(found, [-1.1547, 2.3094, -1.1547, 0.0], atol=1e-3)


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (PartsAdvantage(), r"reward\.parts=.*two parts"),
    (PartsAdvantage(parts=("exact_match", "style")), r"reward\.parts="),
  ],
)
def test_parts_that_a_run_does_not_have_are_refused(function, message):
  experiment = smoke_experiment()
  experiment.rl.objective = ObjectiveConfig(AdvantageConfig(function=function))
  experiment.reward = RewardConfig()
  with pytest.raises(ConfigError, match=message):
    function.check_run(experiment, experiment.rl.objective, "config.rl.objective")


def test_terms_share_a_signal_only_with_the_same_settings():
  def names(*terms):
    return [signal.name for signal in credit_signals(AdvantageConfig(terms=terms), None)]

  assert names(StepsTerm(weight=0.5), StepsTerm(), DurationTerm()) == ["step_advantage", "duration"]
  with pytest.raises(ConfigError, match="'step_advantage' with .*'environment'.*'judge'"):
    names(StepsTerm(), StepsTerm("judge"))


def test_the_others_median_leaves_itself_out():
  rewards = jnp.array([0.0, 1.0, 5.0, 9.0, 2.0, 7.0, 4.0])
  groups = jnp.array([0, 0, 0, 1, 1, 2, 0])
  valid = jnp.array([True, True, True, True, True, True, False])
  found = others_median(rewards, valid, groups)
  np.testing.assert_allclose(found[:6], [3.0, 2.5, 0.5, 2.0, 9.0, 7.0])
  made = [episode(i, r, 1) for i, r in enumerate((0.0, 1.0, 5.0))]
  ours = advantages(made, function=OthersMedian())
  np.testing.assert_allclose([a[0] for a in ours], [-3.0, -1.5, 4.5])


def test_one_extreme_reward_moves_a_mean_and_no_median():
  rewards = [0.0, 0.1, 0.2, 0.3, 100.0]
  medians = others_median(jnp.array(rewards), jnp.ones(5, bool), jnp.zeros(5, jnp.int32))
  assert float(jnp.abs(jnp.array(rewards) - medians)[:4].max()) < 0.3


def _gradient(ratio, advantage, excess, function):
  log_probs = jnp.log(jnp.array([[ratio]]))
  made = [episode(0, advantage, 1)]
  episodes, _ = EntropyExcess().observe(_CONTEXT, made)
  prepared, _ = prepare(
    pack(to_sequences(episodes), row_length=8, pad_id=0),
    ObjectiveConfig(AdvantageConfig(centre="none", scale="none")),
    entropy_excess=jnp.full((1, 8), excess),
  )
  tokens = jnp.full((1, 8), 1.0)
  objective = policy_objective(ObjectiveConfig(), function)

  def loss(x):
    return objective(prepared.with_scores(x, tokens))[0]

  now = prepared.old_log_probs + log_probs
  return loss(now), jnp.sum(jax.grad(loss)(now))


def test_a_clipped_uncertain_token_keeps_its_gradient():
  """r = 1.5, A = 1, bound 1.2: PPO's gradient is 0, here 1.2 with the same value."""
  value, gradient = _gradient(1.5, 1.0, 1.0, entropy_balanced_clip)
  plain, none = _gradient(1.5, 1.0, -1.0, entropy_balanced_clip)
  assert float(gradient) == pytest.approx(-1.2, abs=1e-5) and float(none) == 0.0
  assert float(value) == pytest.approx(float(plain)) == pytest.approx(-1.2)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.1, 1.0), (0.5, 1.0), (1.5, -1.0), (0.5, -1.0)])
def test_other_tokens_are_as_in_ppo(ratio, advantage):
  ours = _gradient(ratio, advantage, 1.0, entropy_balanced_clip)
  np.testing.assert_allclose(ours, _gradient(ratio, advantage, 1.0, None), rtol=1e-5)
