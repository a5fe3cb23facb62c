"""SPEAR: schedules, the memory of successes, its advantages, and a run that replays."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError, with_numbers
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.recipes.spear import SpearAdvantages, SpearConfig
from agentjax.recipes.spear.advantages import clip_covariance
from agentjax.recipes.spear.imitation import PART, SelfImitation
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.schedules import CosineSchedule
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.signals.signal import BatchContext, SignalTools, StepContext, order_signals
from agentjax.training import Experiment, load_experiment
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.flags import set_field
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences, unpack
from agentjax.trajectory.record import Reward, Status, ToolRecord
from tests.training.stages import fingerprints, run, staged_experiment, train_until_killed

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
_MODEL = ModelConfig(vocab_size=16, d_model=8, pattern="-", d_mlp=8)
_LOSS = PolicyLossConfig(aggregation="constant", aggregation_constant=4.0)
_WHOLE = SpearAdvantages(covariance_share=0.0)
_OBJECTIVE = ObjectiveConfig(AdvantageConfig(function=_WHOLE), _LOSS)


def _signal(**settings):
  settings = {"tool_reward": 0.0, "imitation_weight": 1.0} | settings
  config = SpearConfig(**settings)
  config.validate()
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  signal = SelfImitation(config, SignalTools(_MODEL, [b""] * 16, mesh, None, 4))
  order_signals([signal])  # registers its columns, as a run does
  return signal


def _cosine(start, end, steps):
  return CosineSchedule(start=start, end=end, steps=steps)


def _episode(reward, sample=0, *, step=1, task=0, ids=(4, 5), tools=()):
  builder = TrajectoryBuilder(step=step, task_id=task, sample=sample, source="x")
  builder.append("user", [1, 2])
  builder.append_sampled(list(ids), [-1.0] * len(ids), [0.5] * len(ids), [0] * len(ids))
  made = builder.build(reward=Reward(reward))
  made.tools = [ToolRecord(turn, "f", {}, "ok", "", 0.1) for turn in tools]
  return made


def _group(rewards, **place):
  return [_episode(reward, i, **place) for i, reward in enumerate(rewards)]


def _observe(signal, episodes, step=1):
  return signal.observe(StepContext(step, None, at=lambda s: _at(s, step)), episodes)


def _at(settings, step):
  """With the numbers of a training step, of which the first is 1."""
  return with_numbers(settings, lambda _, schedule: schedule.number(step - 1, None))


def _batch(signal, episodes, step=1):
  sequences = to_sequences(episodes)
  packed = pack(sequences, row_length=16, pad_id=0, max_sequences=len(sequences) + 2)
  context = BatchContext(step, None, sequences, packed, None, None)
  said = signal(context, {}, packed)
  return jax.tree.map(jnp.asarray, packed.with_columns(said.columns))


def _of_sequences(values, batch, count):
  """The advantage of every sequence, on all of its weighted tokens."""
  parts = zip(
    unpack(values, batch.segment_ids, batch.num_sequences)[:count],
    unpack(batch.weights, batch.segment_ids, batch.num_sequences),
    strict=False,
  )
  found = [values[weights > 0] for values, weights in parts]
  assert all((part == part[0]).all() for part in found)
  return [float(part[0]) for part in found]


def test_the_schedules_by_hand():
  found = [_at(SpearConfig(), 1 + t) for t in (0, 50, 100, 150)]
  assert [s.imitation_weight for s in found] == pytest.approx([0, 0.5, 1, 1])
  assert [s.tool_weight for s in found] == pytest.approx([1, 0.5, 0, 0])


def test_tools_are_paid_at_first_and_up_to_one():
  signal = _signal(tool_reward=0.1, tool_weight=_cosine(1.0, 0.0, 2))
  episodes = [_episode(0.0, 0, tools=(0, 0, 1)), _episode(1.0, 1, tools=range(30))]
  paid = [[one.reward.value for one in _observe(signal, episodes, s)[0]] for s in (1, 2, 3)]
  np.testing.assert_allclose(paid, [[0.2, 2.0], [0.1, 1.5], [0.0, 1.0]])
  shaped, metrics = _observe(_signal(tool_reward=0.1, calls="turn"), episodes)
  assert [one.reward_parts[PART].value for one in shaped] == [0.1, 0.1]
  assert metrics["spear/tool_reward"] == pytest.approx(0.1)


def test_successes_are_judged_anew_by_the_median_of_earlier_groups():
  """The median of .1, .3, .6, .8, .9 is .6: R = 1 keeps .4, and R = .5 goes."""
  signal = _signal(capacity=2)
  for i, mean in enumerate((0.1, 0.3, 0.6, 0.8, 0.9)):
    _observe(signal, _group([mean, mean], task=i))  # no member is above its group
  _observe(signal, [*_group([1.0, 1.0, -1.85], task=7), *_group([0.5, -1.0], task=8)])
  # Means of these two groups, .05 and -.25, would move the median: they are forgotten here.
  state = signal.get_state()
  signal.set_state(state | {"means": state["means"][:5], "kept": state["kept"][-2:]})
  own = _group([0.0, 0.0], step=2)
  episodes, metrics = _observe(signal, own, step=2)
  (replayed,) = episodes[2:]
  assert float(replayed.columns["imitation_advantage"]) == pytest.approx(0.4)
  assert replayed.reward.value == 1.0 and bool(replayed.columns["replayed"])
  assert (metrics["spear/replayed"], metrics["spear/refused"]) == (1, 1)
  assert metrics["spear/median"] == pytest.approx(0.6)
  # One update, and the memory is empty again.
  assert metrics["spear/kept"] == 0
  assert len(_observe(signal, own, step=3)[0]) == 2


def test_what_is_too_old_masked_or_no_better_than_its_group_is_not_kept():
  signal = _signal(capacity=3, tolerate_steps=2)
  lost = dataclasses.replace(_episode(5.0, 9), status=Status.VERIFIER_ERROR)
  unknown = dataclasses.replace(_episode(5.0, 8), reward=Reward.invalid("no verdict"))
  _, metrics = _observe(signal, [*_group([1.0, 0.0, 0.5]), lost, unknown])
  assert metrics["spear/kept"] == 1
  kept = [_observe(signal, _group([0.0, 0.0]))[1]["spear/kept"] for _ in range(3)]
  assert kept == [1, 1, 0]


def test_where_nobody_succeeds_grpo_has_no_gradient_and_imitation_has():
  signal = _signal(capacity=1)
  _observe(signal, _group([1.0, 0.0, 0.0, 0.0]))
  episodes, _ = _observe(signal, _group([0.0] * 4, step=2), step=2)
  batch = _batch(signal, episodes, step=2)

  def gradient(config):
    prepared, _ = prepare(batch, config)
    scores = {"log_probs": batch.behaviour_log_probs, "entropies": batch.entropies}

    def loss(log_probs):
      return policy_objective(config)(prepared.with_scores(**scores | {"log_probs": log_probs}))[0]

    return jax.grad(loss)(batch.behaviour_log_probs)

  plain = dataclasses.replace(_OBJECTIVE, advantage=AdvantageConfig(scale="none"))
  # The replayed success is alone in its group, and the step's own all failed.
  assert not np.any(gradient(plain))
  of_each = unpack(gradient(_OBJECTIVE), batch.segment_ids, batch.num_sequences)
  assert not any(np.any(part) for part in of_each[:4])
  # d/dlog pi of -(1 / (1 sequence x 4 tokens)) r (1 - median .25).
  np.testing.assert_allclose(of_each[4], [0, 0, -0.75 / 4, -0.75 / 4], rtol=1e-5)


def test_the_losses_of_own_and_replayed_episodes_add_up_with_the_weight():
  signal = _signal(capacity=1, imitation_weight=0.3)
  _observe(signal, _group([1.0, 0.0], ids=(6, 7, 8)))
  own = _group([1.0, 0.0, 0.5], step=2)
  episodes, _ = _observe(signal, own, step=2)
  both, alone = _batch(signal, episodes, step=2), _batch(signal, own, step=2)

  def loss(batch):
    prepared, _ = prepare(batch, _OBJECTIVE)
    inputs = prepared.with_scores(
      log_probs=batch.behaviour_log_probs - 0.05 * batch.turns, entropies=batch.entropies
    )
    return float(policy_objective(_OBJECTIVE)(inputs)[0])

  # Of the replayed one: A~ = 1 - .5 on three tokens of ratio 1, over the constant 4.
  assert loss(both) == pytest.approx(loss(alone) - 0.3 * 0.5 * 3 / 4, rel=1e-5)
  prepared, _ = prepare(alone, _OBJECTIVE)
  assert _of_sequences(prepared.advantages, alone, 3) == pytest.approx([0.5, -0.5, 0])


def test_clip_covariance_takes_a_share_of_the_tokens_between_the_bounds():
  random = np.random.default_rng(0)
  found, log_probs, draws = (jnp.asarray(random.normal(size=(4, 50)), jnp.float32) for _ in "abc")
  draws = jax.nn.sigmoid(draws)
  chosen = jnp.asarray(random.random((4, 50)) < 0.8)

  def still(low, high, share):
    return np.asarray(clip_covariance(found, log_probs, chosen, (low, high), share, draws))

  a, p, inside = (np.asarray(x) for x in (found, log_probs, chosen))
  covariance = (a - a[inside].mean()) * (p - p[inside].mean())
  between = inside & (covariance > 0.5) & (covariance < 2.0)
  wanted = int(0.1 * inside.sum())
  assert 1 < wanted < between.sum()
  expected = np.zeros_like(inside)
  flat = np.where(between, np.asarray(draws), np.inf).ravel()
  expected.reshape(-1)[np.argsort(flat)[:wanted]] = True
  np.testing.assert_array_equal(still(0.5, 2.0, 0.1), expected)
  np.testing.assert_array_equal(still(0.5, 2.0, 0.9), between)  # there are no more
  assert still(0.5, 2.0, 1e-6).sum() == 1
  assert not still(50.0, 60.0, 0.5).any()


def test_draws_are_those_of_the_step_and_tokens_that_they_hit_learn_nothing():
  def prepared(step, **clip):
    signal, function = _signal(), SpearAdvantages(**{"covariance_share": 0.0} | clip)
    episodes, _ = _observe(signal, _group([3.0, -3.0], ids=range(1, 8)), step)
    batch = _batch(signal, episodes, step)
    batch = dataclasses.replace(
      batch, behaviour_log_probs=-batch.positions.astype(jnp.float32) * (batch.weights > 0)
    )
    objective = ObjectiveConfig(AdvantageConfig(function=function), _LOSS)
    return np.asarray(prepare(batch, objective)[0].advantages)

  bounds = {"covariance": (-100.0, 100.0), "covariance_share": 0.5}
  hit = [prepared(step, **bounds) for step in (1, 1, 2)]
  np.testing.assert_array_equal(hit[0], hit[1])
  assert (hit[0] != hit[2]).any()
  assert np.count_nonzero(prepared(1)) == 14 and np.count_nonzero(hit[0]) == 7


@pytest.mark.parametrize(
  "settings, named",
  [
    ({"capacity": 0}, "capacity=0"),
    ({"imitation_weight": -1.0}, r"imitation_weight=-1\.0"),
  ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, named):
  with pytest.raises(ConfigError, match=rf"config\.rl\.signals\.{named}"):
    SpearConfig(**settings).validate("config.rl.signals")


@pytest.mark.parametrize(
  "settings, named",
  [
    ({"covariance_share": 1.0}, r"covariance_share=1\.0"),
    ({"covariance": (3.0, 1.0)}, r"covariance=\(3\.0, 1\.0\)"),
  ],
)
def test_settings_of_the_advantages_are_refused_by_name(settings, named):
  with pytest.raises(ConfigError, match=rf"objective\.advantage\.function\.{named}"):
    SpearAdvantages(**settings).validate()


def test_the_advantages_are_chosen_and_set_by_flags():
  experiment = Experiment()
  way = ["rl", "objective", "advantage", "function"]
  set_field(experiment, way, "agentjax.recipes.spear:SpearAdvantages")
  set_field(experiment, [*way, "covariance_share"], "0.5")
  assert experiment.rl.objective.advantage.function == SpearAdvantages(covariance_share=0.5)
  assert Experiment.from_dict(experiment.to_short_dict()) == experiment


def test_the_config_is_valid_and_survives_being_saved():
  experiment = load_experiment(_CONFIGS / "spear_sokoban.py")
  experiment.validate()
  assert Experiment.from_dict(experiment.to_dict()).rl.signals == experiment.rl.signals


@pytest.mark.parametrize(
  "changed, named",
  [
    (lambda objective: setattr(objective.advantage, "function", None), "function=None"),
    (lambda objective: setattr(objective, "policy_loss", PolicyLossConfig()), "'token_mean'"),
  ],
)
def test_objectives_that_do_not_read_what_is_replayed_are_refused(changed, named):
  experiment = load_experiment(_CONFIGS / "spear_sokoban.py")
  changed(experiment.rl.objective)
  with pytest.raises(ConfigError, match=named):
    experiment.validate()


def _run(directory):
  schedule = ScheduleConfig()
  spear = SpearConfig(
    capacity=2,
    imitation_weight=_cosine(0.0, 1.0, 3),
    calls="turn",
    tool_weight=_cosine(1.0, 0.0, 3),
  )
  rl = dataclasses.replace(
    staged_experiment(schedule).rl, steps=5, signals=(spear,), objective=_OBJECTIVE
  )
  return run(directory, schedule, rl=rl, checkpoint=CheckpointConfig(every=2))


@pytest.mark.slow
def test_a_run_replays_successes_and_goes_on_after_a_death_with_the_same_bits(
  tmp_path, monkeypatch
):
  assert _run(tmp_path / "straight").train().finished
  rows = read_metrics(tmp_path / "straight" / "metrics.jsonl")
  assert sum(row["spear/replayed"] for row in rows) > 0
  train_until_killed(_run(tmp_path / "cut"), 4)
  assert _run(tmp_path / "cut").train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "straight")
  # The last step begins with the memory of the checkpoint before: without that it is another.
  assert rows[-1]["spear/replayed"] > 0
  assert _run(tmp_path / "cut").replay(5).identical
  monkeypatch.setattr(SelfImitation, "set_state", lambda signal, state: None)
  assert not _run(tmp_path / "cut").replay(5).identical
