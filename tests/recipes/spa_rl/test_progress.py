"""SPA-RL: contributions of turns, what they are learnt from, and a run that is paid by them."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentjax.config import ConfigError
from agentjax.models import forward
from agentjax.models.heads import values
from agentjax.objectives import preset
from agentjax.objectives.preparation import prepare
from agentjax.recipes.spa_rl import ProgressConfig
from agentjax.recipes.spa_rl.progress import grounded_turns
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.text.chat import MARKUP_OWNER
from agentjax.training import Experiment, OptimizerConfig, load_experiment
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.experiment import PhaseConfig
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import to_sequences
from agentjax.trajectory.record import Flag, Reward, Status, ToolRecord
from tests.recipes.reader_signal import MODEL, TOKENIZER, SignalSetup, by_turn, make_episode
from tests.training.stages import fingerprints, run, staged_experiment, train_until_killed

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def _setup(*, rows=2, row_length=64, **settings):
  settings.setdefault("optimizer", OptimizerConfig(learning_rate=1e-2))
  return SignalSetup(ProgressConfig(**settings), rows=rows, row_length=row_length)


def test_a_turn_is_grounded_unless_the_world_refused_it():
  refused = "Nothing happens."
  episode = make_episode(["a", "b", "c"], 1.0, answers=["You go on.", refused])
  pieces, texts = TOKENIZER.token_bytes(), ("Nothing happens",)
  drawn = [i for i, s in enumerate(episode.segments) if s.sampled.any()]
  assert grounded_turns(episode, pieces, texts) == dict(zip(drawn, [1.0, 0.0, 1.0], strict=True))
  assert set(grounded_turns(episode, pieces, ()).values()) == {1.0}
  episode.tools = [ToolRecord(0, "f", {}, "error", "", 0.1), ToolRecord(2, "f", {}, "ok", "", 0.1)]
  episode.status = Status.POLICY_ERROR
  assert set(grounded_turns(episode, pieces, texts).values()) == {0.0}


def test_a_turn_that_was_not_carried_out_is_not_grounded():
  pieces = TOKENIZER.token_bytes()
  builder = TrajectoryBuilder(step=1, task_id=0, sample=0, source="x")
  builder.append("user", TOKENIZER.encode("go"))

  def draw(text, *flags):
    ids = TOKENIZER.encode(text)
    return builder.append_sampled(ids, [-1.0] * len(ids), [1.0] * len(ids), 0, flags=flags)

  drawn = [draw("a", Flag.TRUNCATED)]
  builder.append(MARKUP_OWNER, TOKENIZER.encode("."))
  builder.append("user", TOKENIZER.encode("Cut off."))
  drawn.append(draw("b"))
  builder.append(MARKUP_OWNER, TOKENIZER.encode("."))  # stands between the turn and its answer
  builder.append("user", TOKENIZER.encode("Nothing happens."))
  drawn.append(draw("c"))
  builder.append("user", TOKENIZER.encode("Done."))
  builder.append("assistant", TOKENIZER.encode("Nothing happens"))  # not what the world said
  drawn += [draw("d", Flag.TOOL_ERROR, Flag.NOT_EXECUTED)]
  found = grounded_turns(builder.build(reward=Reward(1.0)), pieces, ("Nothing happens",))
  assert found == dict(zip(drawn, [0.0, 0.0, 1.0, 0.0], strict=True))


@pytest.mark.slow
def test_turns_are_paid_contribution_and_grounding_by_hand():
  episodes = [
    make_episode(["ab", "c", "de"], 1.0, answers=["Nothing happens.", "Done."]),
    make_episode(["x"], 0.0, sample=1),
  ]
  setup = _setup(grounding=0.5)
  network = setup.network(head=3)
  _, batch, packed, metrics = setup.step(network, episodes)
  sequences = to_sequences(episodes)
  contributions = []
  for one in sequences:
    ids = jnp.asarray(one.token_ids)[None]
    places = jnp.arange(len(one))[None]
    hidden = forward(network.weights.policy, MODEL, ids, jnp.ones_like(ids), places).hidden
    head = np.asarray(values(network.weights.value, hidden))[0]
    drawn = one.versions >= 0
    ends = [np.flatnonzero(drawn & (one.turns == k))[-1] for k in sorted(set(one.turns[drawn]))]
    contributions.append(head[ends])
  paid = by_turn(batch, packed, 2)
  np.testing.assert_allclose(paid[0], contributions[0] + [0, 0.5, 0.5], atol=1e-5)
  np.testing.assert_allclose(paid[1], contributions[1] + 0.5, atol=1e-5)
  errors = [abs(c.sum() - r) for c, r in zip(contributions, (1.0, 0.0), strict=True)]
  assert metrics["spa_rl/error"] == pytest.approx(np.mean(errors), rel=1e-5)
  assert metrics["spa_rl/loss"] == pytest.approx(np.mean(np.square(errors)), rel=1e-5)
  assert metrics["spa_rl/grounded"] == 0.75
  # Nothing is left for the end, or what the contributions miss.
  np.testing.assert_array_equal(batch.rewards[:2], [0, 0])
  whole = _setup(grounding=0.5, residual="paid")
  _, batch, _, _ = whole.step(whole.network(head=3), episodes)
  left = [r - c.sum() for c, r in zip(contributions, (1.0, 0.0), strict=True)]
  np.testing.assert_allclose(batch.rewards[:2], left, atol=1e-5)


@pytest.mark.slow
def test_the_step_is_that_of_the_squared_error_of_the_sums():
  random = np.random.default_rng(0)
  episodes = [
    make_episode(["".join(random.choice(list("abcd"), 3)) for _ in range(1 + i % 3)], i % 2, i)
    for i in range(5)
  ]
  setup = _setup(optimizer=OptimizerConfig(learning_rate=1e-2, clip_norm=None))
  network = setup.network(head=1)
  sequences = to_sequences(episodes)

  def direct(weights):
    total = 0.0
    for one in sequences:
      ids = jnp.asarray(one.token_ids)[None]
      out = forward(weights.policy, MODEL, ids, jnp.ones_like(ids), jnp.arange(len(one))[None])
      drawn = one.versions >= 0
      last = np.r_[np.flatnonzero(np.diff(np.where(drawn, one.turns, -1)) < 0), len(one) - 1]
      total += (values(weights.value, out.hidden)[0, last].sum() - one.reward) ** 2
    return total / len(sequences)

  loss, grads = jax.jit(jax.value_and_grad(direct))(network.weights)
  _, _, _, metrics = setup.step(network, episodes)
  assert metrics["spa_rl/loss"] == pytest.approx(float(loss), rel=1e-4)
  assert metrics["spa_rl/grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-3)
  assert float(optax.tree.norm(grads.policy)) > 0
  # Other rows, other order, an episode without a verdict: the same step.
  other = _setup(rows=4, row_length=48, optimizer=OptimizerConfig(clip_norm=None))
  lost = dataclasses.replace(make_episode(["zz"], 0.0, 9), reward=Reward.invalid("no verdict"))
  _, _, _, again = other.step(other.network(head=1), [*episodes[::-1], lost])
  assert again["spa_rl/loss"] == pytest.approx(metrics["spa_rl/loss"], rel=1e-4)
  assert again["spa_rl/grad_norm"] == pytest.approx(metrics["spa_rl/grad_norm"], rel=1e-3)


def test_the_turn_that_decides_gets_the_outcome_and_all_contributions_sum_to_it():
  """Four turns of one letter; the second decides."""
  random = np.random.default_rng(0)

  def episodes(count):
    texts = random.choice(list("ab"), (count, 4))
    return [make_episode(list(t), float(t[1] == "b"), i) for i, t in enumerate(texts)], texts

  rate = OptimizerConfig(learning_rate=5e-3)
  setup = _setup(row_length=128, grounding=0.0, optimizer=rate)
  network = setup.network()
  for _ in range(200):
    network, _, _, metrics = setup.step(network, episodes(16)[0])
  held_out, texts = episodes(16)
  _, batch, packed, metrics = setup.step(network, held_out)
  paid = np.stack(by_turn(batch, packed, 16))
  outcomes = (texts[:, 1] == "b").astype(float)
  np.testing.assert_allclose(paid.sum(1), outcomes, atol=0.15)
  assert metrics["spa_rl/error"] < 0.1
  # Between right and wrong only the second turn differs by the whole outcome.
  differences = paid[outcomes == 1].mean(0) - paid[outcomes == 0].mean(0)
  assert differences[1] > 0.7 and np.abs(differences[[0, 2, 3]]).max() < 0.25
  # What is still to come tells the deciding turn from a later one; the outcome at the end does not.
  config = preset("ppo")
  config.advantage.index_set, config.advantage.gae_lambda = "turn", 1.0
  config.advantage.whiten = False
  credit = prepare(batch, config, values=jnp.zeros_like(batch.weights))[0].advantages
  of_turns = np.stack(by_turn(batch.with_columns({"token_rewards": credit}), packed, 16))
  np.testing.assert_allclose(of_turns, paid[:, ::-1].cumsum(1)[:, ::-1], atol=1e-5)


def test_while_it_is_fitted_the_policy_is_paid_at_the_end_and_afterwards_it_stands_still():
  setup = _setup(fit_steps=1)
  network = setup.network(head=2)
  episodes = [make_episode(["a", "b"], 1.0)]
  fitted, batch, _, metrics = setup.step(network, episodes)
  assert metrics["spa_rl/learns"] == 1 and not np.any(batch.columns["token_rewards"])
  assert float(batch.rewards[0]) == 1.0
  resumed = setup.signal.get_state()
  again, batch, _, metrics = setup.step(fitted, episodes)
  assert metrics["spa_rl/learns"] == 0 and np.any(batch.columns["token_rewards"])
  for here, there in zip(jax.tree.leaves(again), jax.tree.leaves(fitted), strict=True):
    np.testing.assert_array_equal(here, there)
  assert float(batch.rewards[0]) == 0.0
  setup.signal.set_state(resumed)
  *_, metrics = setup.step(fitted, episodes)
  assert metrics["spa_rl/learns"] == 0


@pytest.mark.parametrize(
  "settings, named",
  [
    ({"fit_steps": 0}, r"fit_steps=0"),
    ({"grounding": -1.0}, r"grounding=-1\.0"),
    ({"refusals": ("",)}, r"refusals="),
    ({"epochs": 0}, r"epochs=0"),
    ({"model": MODEL}, r"start='policy'"),
  ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, named):
  with pytest.raises(ConfigError, match=rf"config\.rl\.signals\.{named}"):
    ProgressConfig(**settings).validate()


def test_the_config_is_valid_and_survives_being_saved():
  experiment = load_experiment(_CONFIGS / "spa_rl_sokoban.py")
  experiment.validate()
  assert Experiment.from_dict(experiment.to_dict()).rl.signals == experiment.rl.signals


def test_a_run_that_is_paid_at_its_end_alone_is_refused():
  experiment = load_experiment(_CONFIGS / "spa_rl_sokoban.py")
  experiment.rl.phases, experiment.rl.objective = (), preset("grpo")
  with pytest.raises(ConfigError, match=r"advantage\.credit='broadcast'.*rl\.signals\[0\]"):
    experiment.validate()


def _run(directory, steps=4):
  schedule = ScheduleConfig()
  objective = preset("ppo")
  objective.advantage.index_set = "turn"
  fit = PhaseConfig(steps=2, objective=objective, trains="values")
  spa = ProgressConfig(fit_steps=2, optimizer=OptimizerConfig(learning_rate=1e-3))
  rl = dataclasses.replace(
    staged_experiment(schedule).rl, steps=steps, signals=(spa,), objective=objective, phases=(fit,)
  )
  return run(directory, schedule, rl=rl, checkpoint=CheckpointConfig(every=2))


@pytest.mark.slow
def test_a_run_fits_then_pays_by_turn_and_goes_on_after_a_death_with_the_same_bits(tmp_path):
  assert _run(tmp_path / "straight").train().finished
  rows = read_metrics(tmp_path / "straight" / "metrics.jsonl")
  assert [row["spa_rl/learns"] for row in rows] == [1, 1, 0, 0]
  train_until_killed(_run(tmp_path / "cut"), 4)
  assert _run(tmp_path / "cut").train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "straight")
  assert _run(tmp_path / "cut").replay(4).identical
