"""The model of promise: its labels, its loss, and turns that are paid their progress."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.models import forward
from agentjax.models.heads import values
from agentjax.objectives import preset
from agentjax.recipes.agent_prm import AgentPrmConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment
from agentjax.trajectory.packing import to_sequences, unpack
from agentjax.trajectory.record import Reward
from tests.recipes.agent_prm.test_agent_prm import labels
from tests.recipes.reader_signal import MODEL, SignalSetup, by_turn, make_episode

_CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "agent_prm_sokoban.py"


def _setup(*, rows=2, row_length=64, **settings):
  settings.setdefault("optimizer", OptimizerConfig(learning_rate=1e-2))
  return SignalSetup(AgentPrmConfig(**settings), rows=rows, row_length=row_length)


def _promises(network, sequences):
  """The head at the last drawn token of each turn, one sequence at a time."""
  found = []
  for one in sequences:
    ids = jnp.asarray(one.token_ids)[None]
    hidden = forward(
      network.weights.policy, MODEL, ids, jnp.ones_like(ids), jnp.arange(len(one))[None]
    ).hidden
    head = np.asarray(values(network.weights.value, hidden))[0]
    drawn = one.versions >= 0
    turns = sorted(set(one.turns[drawn]))
    found.append(head[[np.flatnonzero(drawn & (one.turns == k))[-1] for k in turns]])
  return found


_OUTCOMES = (1.0, 0.25, 0.5)
_TURNS = (["ab", "c", "de"], ["x", "yz"], ["uvw"])
_EPISODES = tuple(
  make_episode(turns, outcome, sample)
  for sample, (turns, outcome) in enumerate(zip(_TURNS, _OUTCOMES, strict=True))
)


def test_turns_are_paid_the_difference_of_promises():
  setup = _setup()
  network = setup.network(head=3)
  promises = _promises(network, to_sequences(_EPISODES))
  _, batch, packed, metrics = setup.step(network, _EPISODES)
  for paid, promised in zip(by_turn(batch, packed, 3), promises, strict=True):
    np.testing.assert_allclose(paid, np.diff(promised, prepend=0), atol=1e-5)
  rest = [r - p[-1] for r, p in zip(_OUTCOMES, promises, strict=True)]
  np.testing.assert_allclose(batch.rewards[:3], rest, atol=1e-5)
  assert metrics["agent_prm/error"] == pytest.approx(np.mean(np.abs(rest)), rel=1e-5)
  dropped = _setup(residual="dropped")
  _, batch, packed, _ = dropped.step(dropped.network(head=3), _EPISODES)
  np.testing.assert_array_equal(batch.rewards, 0)
  assert by_turn(batch, packed, 3)[0].sum() == pytest.approx(promises[0][-1], abs=1e-5)


def test_a_turn_without_weight_is_paid_on_the_token_before_it():
  setup = _setup()
  network = setup.network(head=3)
  masked = [make_episode(["ab", "c", "de"], 1.0, weights=[1.0, 0.0, 1.0])]
  (promised,) = _promises(network, to_sequences(masked))
  _, batch, packed, _ = setup.step(network, masked)
  expected = [promised[1], promised[2] - promised[1]]
  np.testing.assert_allclose(by_turn(batch, packed, 1)[0], expected, atol=1e-5)


def test_labels_and_loss_are_those_of_the_present_values():
  setup = _setup(gamma=0.9, gae_lambda=0.5, beta=2.0)
  network = setup.network(head=1)
  promises = _promises(network, to_sequences(_EPISODES))
  after, batch, packed, metrics = setup.step(network, _EPISODES)
  losses = []
  for i, (promised, outcome) in enumerate(zip(promises, _OUTCOMES, strict=True)):
    before, rewards = np.append(0, promised[:-1]), np.zeros(len(promised))
    rewards[-1] = outcome
    promise, progress = labels(before, rewards, gamma=0.9, gae_lambda=0.5)
    for name, wanted in (("promise_labels", promise), ("progress_labels", progress)):
      np.testing.assert_allclose(by_turn(batch, packed, 3, name)[i], wanted, atol=1e-5)
    losses += list((promised - promise) ** 2 + 2 * (promised - before - progress) ** 2)
  assert metrics["agent_prm/loss"] == pytest.approx(np.mean(losses), rel=1e-4)
  # The next batch is labelled by what the model has become.
  _, again, packed, _ = setup.step(after, _EPISODES)
  first, second = (
    unpack(x.columns["promise_labels"], packed.segment_ids, 3)[0] for x in (batch, again)
  )
  assert np.abs(first - second).max() > 1e-3


def test_rows_order_and_episodes_without_a_verdict_do_not_change_the_step():
  setup = _setup()
  _, _, _, metrics = setup.step(setup.network(head=1), _EPISODES)
  other = _setup(rows=4, row_length=48)
  lost = dataclasses.replace(make_episode(["zz"], 0.0, 9), reward=Reward.invalid("no verdict"))
  _, _, _, again = other.step(other.network(head=1), [*_EPISODES[::-1], lost])
  for name in ("loss", "grad_norm", "error"):
    name = f"agent_prm/{name}"
    assert again[name] == pytest.approx(metrics[name], rel=1e-3)


def test_nothing_is_promised_before_the_model_has_learnt():
  setup = _setup()
  _, batch, packed, _ = setup.step(setup.network(), _EPISODES)
  assert not np.any(batch.columns["token_rewards"])
  np.testing.assert_array_equal(batch.rewards[:3], _OUTCOMES)


@pytest.mark.slow
def test_the_turn_that_decides_gets_the_progress():
  """Three turns of one letter; the second decides."""
  random = np.random.default_rng(0)

  def episodes(count):
    texts = random.choice(list("ab"), (count, 3))
    return [make_episode(list(t), float(t[1] == "b"), i) for i, t in enumerate(texts)], texts

  setup = _setup(row_length=128, optimizer=OptimizerConfig(learning_rate=5e-3))
  network, losses = setup.network(), []
  for _ in range(200):
    network, _, _, metrics = setup.step(network, episodes(16)[0])
    losses.append(metrics["agent_prm/loss"])
  assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
  held_out, texts = episodes(16)
  _, batch, packed, _ = setup.step(network, held_out)
  paid, won = np.stack(by_turn(batch, packed, 16)), texts[:, 1] == "b"
  differences = paid[won].mean(0) - paid[~won].mean(0)
  assert differences[1] > 0.6 and np.abs(differences[[0, 2]]).max() < 0.25


@pytest.mark.parametrize(
  "settings, named",
  [
    ({"gae_lambda": 0.0}, r"gae_lambda=0\.0"),
    ({"beta": -1.0}, r"beta=-1\.0"),
    ({"epochs": 0}, r"epochs=0"),
    ({"model": MODEL}, r"start='policy'"),
  ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, named):
  with pytest.raises(ConfigError, match=rf"config\.rl\.signals\.{named}"):
    AgentPrmConfig(**settings).validate()


def test_the_config_is_valid_and_survives_being_saved():
  experiment = load_experiment(_CONFIG)
  experiment.validate()
  assert Experiment.from_dict(experiment.to_dict()).rl.signals == experiment.rl.signals
  experiment.rl.objective = preset("grpo")
  with pytest.raises(ConfigError, match=r"advantage\.credit='broadcast'.*rl\.signals\[0\]"):
    experiment.validate()
