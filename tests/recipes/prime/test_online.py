"""A reward model that learns beside the policy, as in PRIME."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.models.lora import LoraConfig
from agentjax.objectives import preset
from agentjax.objectives.objective import policy_objective
from agentjax.planning import compile as planning
from agentjax.recipes.prime import OnlineConfig, ProcessConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.signal import BatchContext
from agentjax.signals.teacher import TeacherConfig
from agentjax.training import Extensions, OptimizerConfig, Run
from agentjax.training.build import build_parts
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.experiment import PhaseConfig, resolve
from agentjax.training.learner import Learner
from agentjax.training.likelihood import LikelihoodConfig
from agentjax.training.metrics import read_metrics
from agentjax.training.optimizer import build_optimizer
from agentjax.training.preferences import PreferenceRow, preference_tasks, write_preferences
from agentjax.training.rows import MeshRows, make_scorer
from agentjax.training.run import TrainingError
from agentjax.training.state import Weights, network_specs
from agentjax.trajectory.packing import PackedSequence, pack, unpack
from agentjax.trajectory.record import Message
from tests.training.smoke import quiet
from tests.training.stages import (
  extensions,
  fingerprints,
  run,
  staged_experiment,
  train_until_killed,
)
from tests.training.teachers import WIDER, save_policy

_SYNC = ScheduleConfig()
_BETA = 0.5


def _experiment(**online):
  experiment = staged_experiment(_SYNC)
  experiment.model = dataclasses.replace(experiment.model, pattern="*")
  experiment.rl.objective = preset("prime")
  optimizer = OptimizerConfig(learning_rate=3e-3)
  online = OnlineConfig(optimizer=optimizer, **online)
  experiment.rl.process = ProcessConfig(beta=_BETA, centre="leave_one_out", online=online)
  return experiment


def _learner(experiment):
  experiment = resolve(experiment)
  parts = build_parts(experiment, None, extensions())
  return Learner(parts, policy_objective(experiment.rl.objective))


@pytest.fixture(scope="module")
def learner():
  return _learner(_experiment())


@pytest.fixture
def state(learner):
  return learner.begin_rl(learner.first_state("rl"))


def _episodes(seed, *, right=0, count=16, valid=True):
  """A prompt and six drawn bytes of one parity, even or odd; rewarded where that is ``right``."""
  random = np.random.default_rng(seed)
  result = []
  for i in range(count):
    length, parity = 4 + i % 3, random.integers(2)
    drawn = 8 + 2 * random.integers(0, 4, 6) + parity
    ids = np.r_[1, random.integers(8, 264, length - 1), drawn].astype(np.int32)
    weights = (np.arange(len(ids)) >= length).astype(np.float32)
    result.append(
      PackedSequence(
        name=str(i),
        token_ids=ids,
        weights=weights,
        behaviour_log_probs=-5 * weights,
        entropies=5 * weights,
        versions=np.where(weights > 0, 1, -1).astype(np.int32),
        turns=np.zeros(len(ids), np.int32),
        reward=float(parity == right) if valid else -7.0,
        valid=valid,
        group=i // 4,
      )
    )
  return result


def _learn(learner, state, sequences, *, row_length=64, rows=4, **online):
  """One step of the reward model: state, log-probs of every sequence, metrics."""
  batch = pack(sequences, row_length=row_length, pad_id=0, rows=8)
  cut = MeshRows(learner.mesh, rows)
  score = make_scorer(learner._parts.model, 1.0, cut, None, LikelihoodConfig().marks)
  placed = cut.place(batch)
  reference, _ = score(state.weights, placed)
  context = BatchContext(1, None, sequences, batch, score, cut)
  process, found, metrics = learner.signals["process"].model.learn(
    OnlineConfig(**online), state.networks["reward_model"], placed, context, reference
  )
  difference = unpack(found - reference, batch.segment_ids, len(sequences))
  return state.with_network("reward_model", process), difference, metrics


def _direct_loss(params, reference, model, sequences):
  """The cross-entropy written out, by another way of scoring."""
  time = max(map(len, sequences))
  ids, drawn, inside = np.zeros((3, len(sequences), time), np.int32)
  for i, s in enumerate(sequences):
    ids[i, : len(s)], drawn[i, : len(s)], inside[i, : len(s)] = s.token_ids, s.weights, 1
  grid = jnp.asarray(ids), jnp.asarray(inside), jnp.broadcast_to(jnp.arange(time), ids.shape)
  now, then = (
    models.score_tokens(p, model, *grid, temperature=1.0).log_probs for p in (params, reference)
  )
  chances = jax.nn.sigmoid(_BETA * jnp.sum(jnp.where(drawn, now - then, 0), axis=1))
  rewards = jnp.array([s.reward for s in sequences])
  return -jnp.mean(jnp.log(jnp.where(rewards > 0, chances, 1 - chances)))


def _copy(tree):
  return jax.tree.map(jnp.copy, tree)


def test_the_step_is_that_of_the_gradient_of_the_cross_entropy(learner, state):
  """Away from the reference, so that the episodes pull with different strengths."""
  sequences, model = _episodes(0, count=4), learner._parts.model
  reference = _copy(state.weights.policy)
  moved = jax.tree.map(
    lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), reference
  )
  own = state.networks["reward_model"]
  networks = Weights(_copy(moved))
  state = state.with_network("reward_model", dataclasses.replace(own, weights=networks))
  step = jax.value_and_grad(lambda p: _direct_loss(p, reference, model, sequences))
  loss, grads = jax.jit(step)(moved)
  state, _, metrics = _learn(learner, state, sequences)
  assert metrics["process/loss"] == pytest.approx(float(loss), rel=1e-4)
  assert metrics["process/grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-3)
  specs = network_specs(model, critic=False)
  whole = dataclasses.replace(networks, policy=moved)
  optimizer = build_optimizer(learner._parts.experiment.rl.process.online.optimizer, 6, specs)
  moments = optimizer.init(whole)
  changes, _ = optimizer.update(dataclasses.replace(whole, policy=grads), moments, whole)
  expected = optax.apply_updates(whole, changes).policy
  for ours, theirs in zip(
    jax.tree.leaves(state.networks["reward_model"].weights.policy),
    jax.tree.leaves(expected),
    strict=True,
  ):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_packing_padding_micro_batches_and_masked_episodes_change_nothing(learner, state):
  sequences = _episodes(1)
  start = _copy(state.networks["reward_model"])
  state, one, plain = _learn(learner, state, sequences)
  masked = _episodes(2, count=5, valid=False)
  mixed = [*masked[:2], *sequences[::-1], *masked[2:]]
  again = state.with_network("reward_model", start)
  _, other, others = _learn(learner, again, mixed, row_length=48, rows=2)
  assert others == pytest.approx(plain, rel=1e-4)
  for here, there in zip(one, other[-4:1:-1], strict=True):
    np.testing.assert_allclose(here, there, atol=2e-4)
  assert plain["process/loss"] == pytest.approx(np.log(2))  # as sure as its reference


@pytest.mark.slow
def test_it_learns_to_tell_right_from_wrong_and_follows_when_that_changes(learner, state):
  accuracy, steps = [], {0: [], 1: []}
  for i in range(80):
    right = int(i >= 20)  # what was wrong is right from here on
    sequences = _episodes(10 + i, right=right)
    state, gains, metrics = _learn(learner, state, sequences)
    accuracy.append(metrics["process/accuracy"])
    if i in (19, 79):
      for s, gain in zip(sequences, gains, strict=True):
        steps[right] += [(gain[s.weights > 0].mean(), s.reward)]
  # Each is of episodes that it has not learnt from yet; nothing is drawn from a frozen one.
  assert np.mean(accuracy[15:20]) > 0.9 and np.mean(accuracy[75:]) > 0.9
  assert accuracy[20] < 0.1
  for found in steps.values():
    paid, reward = np.array(found).T
    assert paid[reward == 1].min() > 0 > paid[reward == 0].max()


def test_rewards_come_after_the_step_or_before_it(learner, state):
  sequences, start = _episodes(3), _copy(state.networks["reward_model"])
  _, double, _ = _learn(learner, state, sequences)
  again = state.with_network("reward_model", start)
  after, single, _ = _learn(learner, again, sequences, forward="single")
  assert all(not d.any() for d in single) and all(d.any() for d in double)
  # The next step's rewards are the model's after this one.
  _, following, _ = _learn(learner, after, sequences, forward="single")
  for here, there in zip(double, following, strict=True):
    np.testing.assert_allclose(here, there, atol=1e-6)


def test_a_part_of_the_reward_can_be_the_outcome(learner, state):
  sequences, start = _episodes(4), _copy(state.networks["reward_model"])
  _, _, plain = _learn(learner, state, sequences)
  other = [
    dataclasses.replace(s, reward=2 * s.reward - 3).with_columns(
      {"process_outcome": np.array(s.reward, np.float32)}
    )
    for s in sequences
  ]
  unknown = _episodes(5, count=4)
  state = state.with_network("reward_model", start)
  with pytest.raises(ConfigError, match=r"online\.outcome='' with rewards \[-3\.0.*in 0\.\.1"):
    _learn(learner, state, other)
  _, _, by_part = _learn(learner, state, [*other, *unknown], outcome="right")
  assert by_part == pytest.approx(plain, rel=1e-4)


def _refused(change, match):
  experiment = _experiment()
  change(experiment)
  with pytest.raises(ConfigError, match=match):
    experiment.validate()


def test_settings_that_it_cannot_have_are_refused():
  def lora(experiment):
    experiment.lora = LoraConfig()

  def phases(experiment):
    experiment.rl.phases = (PhaseConfig(objective=preset("prime")),)

  def outcome(experiment):
    experiment.rl.process.online.outcome = "right"

  _refused(lora, r"rl\.process\.online=.*none with config\.lora")
  _refused(phases, r"rl\.process\.reference=None.*the run's own is another after a phase")
  _refused(outcome, r"online\.outcome='right'.*'' or one of config\.reward\.parts")


def test_it_starts_from_the_policy_or_from_a_model_of_its_shape(tmp_path):
  experiment = _experiment()
  params = save_policy(tmp_path / "model", experiment.model, seed=3)
  experiment.rl.process.model = TeacherConfig(str(tmp_path / "model"))
  learner = _learner(experiment)
  state = learner.begin_rl(learner.first_state("rl"))
  for name, start in (("reward_model", params), ("reference", state.weights.policy)):
    found = state.networks[name].weights.policy
    for here, there in zip(jax.tree.leaves(found), jax.tree.leaves(start), strict=True):
      np.testing.assert_array_equal(here, there)
  save_policy(tmp_path / "wider", WIDER, seed=3)
  other = _experiment()
  other.rl.process.model = TeacherConfig(str(tmp_path / "wider"))
  wider = _learner(other)
  with pytest.raises(ConfigError, match=r"another model than the policy: config\.model\.d_"):
    wider.begin_rl(wider.first_state("rl"))


def test_a_plan_counts_the_state_of_the_reward_model(monkeypatch):
  sizes = []

  def count(function, arguments, parts, rows, capacity):
    sizes.append({name: planning.bytes_a_device(tree) for name, tree in parts.items()})

  monkeypatch.setattr(planning, "_compile", count)
  with_model, without = _experiment(), _experiment()
  without.rl.process.online = None
  for experiment in (with_model, without):
    planning.plan_training(experiment.freeze(), jax.devices()[:1], 8, 10**9)
  assert sizes[1]["further networks"] == 0
  assert sizes[0]["further networks"] >= 3 * sizes[0]["parameters"]  # and Adam's moments
  assert sizes[0]["reference"] == sizes[0]["parameters"]


# In a run.


def _settings(**changes):
  rl = dataclasses.replace(_experiment().rl, steps=4, minibatches=2, **changes)
  return dict(rl=rl, checkpoint=CheckpointConfig(every=2))


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_reward_model_to_the_same_bits(tmp_path):
  """Fingerprints are of the policy and the reward model; rewards here are shares, in 0..1."""
  assert run(tmp_path / "straight", _SYNC, **_settings()).train().finished
  made = run(tmp_path / "run", _SYNC, **_settings())
  train_until_killed(made, 4)  # a step after the checkpoint
  assert run(tmp_path / "run", _SYNC, **_settings()).train().finished
  assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "straight")
  assert made.replay(4).identical
  rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
  assert rows[0]["process/loss"] == pytest.approx(np.log(2), abs=0.03)
  assert all(row["process/grad_norm"] > 0 == row["process/bad_steps"] for row in rows)
  # The reward model is part of what is compared, and of what the policy learns from.
  single = _settings()
  single["rl"].process.online.forward = "single"
  run(tmp_path / "single", _SYNC, **single).train()
  assert not set(fingerprints(tmp_path / "single")) & set(fingerprints(tmp_path / "run"))


@pytest.mark.slow
def test_gradients_that_stay_bad_end_the_run_and_name_the_reward_model(tmp_path):
  settings = _settings()
  settings["rl"].process.online.optimizer.max_bad_steps = 1
  made = run(tmp_path / "run", _SYNC, **settings)
  with made._session() as session:
    model = session.learner.signals["process"].model
    ready = model.prepare

    def spoilt(batch, **extra):
      prepared, metrics = ready(batch, **extra)
      return dataclasses.replace(prepared, advantages=prepared.advantages * jnp.nan), metrics

    model.prepare = spoilt
    with pytest.raises(TrainingError, match=r"reward model.*process\.online\.optimizer\.learning"):
      session.train()


@pytest.mark.slow
def test_it_learns_the_outcomes_of_stored_episodes(tmp_path):
  rows = [
    PreferenceRow(i, (Message("user", f"Q{i}?"),), f"good {word}", f"bad, {word}")
    for i, word in enumerate(["sky", "sea", "sun", "moon"])
  ]
  own = Extensions(tasks=TaskSplits(preference_tasks(rows), ()))
  experiment = _experiment()
  experiment.rl.process.online.optimizer.learning_rate = 1e-2
  experiment.rl = dataclasses.replace(
    experiment.rl,
    steps=8,
    tasks_per_step=4,
    old_log_probs="recomputed",
    rollouts=str(tmp_path / "stored"),
  )
  write_preferences(
    tmp_path / "stored", rows, build_parts(resolve(experiment), tmp_path / "parts", own)
  )
  made = Run(experiment, tmp_path / "run", extensions=own, console=quiet())
  assert made.train().finished
  accuracy = [r["process/accuracy"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")]
  assert accuracy[0] == 0.5 and accuracy[-1] == 1.0
