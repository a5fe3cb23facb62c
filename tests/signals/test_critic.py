"""A critic that is a network of its own: what it says, what it learns, what a run keeps of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentjax.config import ConfigError
from agentjax.models import forward
from agentjax.models.lora import LoraConfig
from agentjax.objectives import preset
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.preparation import prepare
from agentjax.objectives.value_loss import ValueLossConfig
from agentjax.recipes.sppo import PromptCriticConfig
from agentjax.recipes.sppo.critic import prompts
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.signals.critic import CRITIC, CriticConfig
from agentjax.signals.signal import BatchContext, SignalTools
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.metrics import read_metrics
from agentjax.training.optimizer import OptimizerConfig, build_optimizer
from agentjax.training.packs import pack_rows
from agentjax.training.rows import MeshRows
from agentjax.training.state import StateSpec, network_specs
from agentjax.training.update import state_values
from tests.training.machine import ATTENTION, sequences
from tests.training.stages import fingerprints, run, staged_experiment, train_until_killed

MESH = make_mesh(MeshConfig(), jax.devices()[:1])
SMALL = dataclasses.replace(ATTENTION, d_model=4, num_heads=1)
GAE = preset("vapo")


def episodes(prompt=2):
  """Eight of them, whose first ``prompt`` tokens the policy did not draw."""
  result = []
  for sequence in sequences():
    drawn = np.arange(len(sequence)) >= prompt
    result.append(
      dataclasses.replace(
        sequence,
        weights=drawn.astype(np.float32),
        versions=np.where(drawn, 0, -1).astype(np.int32),
      )
    )
  return result


class Bench:
  """A critic with its networks and a batch."""

  def __init__(
    self, rows=4, loss=None, lora=None, model=ATTENTION, critic=None, kind=CriticConfig, **own
  ):
    pack = functools.partial(pack_rows, row_length=12, rows=rows, pad_id=0, expected=8)
    settings = {"start": "random", "optimizer": OptimizerConfig(learning_rate=0.02)} | own
    tools = SignalTools(model, (), MESH, pack, rows)
    self.critic = kind(model=critic, **settings).build(loss or ValueLossConfig(), tools, 10)
    optimizer = build_optimizer(OptimizerConfig(), 10, network_specs(model, False, lora))
    spec = StateSpec(model, optimizer, MESH, lora=lora, further=self.critic.networks)
    self.state = spec.create(jax.random.key(0))
    network = self.state.networks[CRITIC]
    head = jax.random.normal(jax.random.key(1), network.weights.value.weight.shape)  # not from 0
    value = dataclasses.replace(network.weights.value, weight=head)
    weights = dataclasses.replace(network.weights, value=value)
    self.networks = {CRITIC: dataclasses.replace(network, weights=weights)}
    self.packed, rows_ = pack(episodes()), MeshRows(MESH, rows)
    self.batch = rows_.place(self.packed)
    self.context = BatchContext(1, lambda: None, episodes(), self.packed, None, rows_)

  def values(self):
    return np.asarray(self.critic(self.context, self.networks, self.batch).columns["values"])

  def learn(self, objective=GAE):
    """Metrics of one batch; the critic's network moves."""
    prepared, _ = prepare(self.batch, objective, values=jnp.asarray(self.values()))
    found = self.critic.learn(self.context, self.networks, self.batch, prepared)
    self.networks = {**self.networks, **found.networks}
    return {k: float(v) for k, v in found.metrics.items()}, prepared

  def predict(self, weights):
    ids = self.batch.token_ids, self.batch.segment_ids, self.batch.positions
    return state_values(weights, forward(weights.policy, ATTENTION, *ids).hidden)


@pytest.mark.slow
def test_its_values_are_those_of_its_own_model():
  bench = Bench(rows=2)
  found = bench.values()
  np.testing.assert_allclose(found, bench.predict(bench.networks[CRITIC].weights), atol=1e-6)
  assert np.ptp(found) > 1e-2
  assert Bench(rows=2, critic=SMALL).values().shape == found.shape


def test_a_critic_of_prompts_says_the_same_of_a_prompt_as_one_of_episodes():
  short, ends = prompts(episodes())
  assert ends == [2] * 8 and {len(s) for s in short} == {3}
  whole, prompt = Bench(), Bench(kind=PromptCriticConfig)
  drawn = np.asarray(prompt.packed.versions) >= 0
  first = drawn & ~np.roll(drawn, 1, axis=1)
  assert first.sum() == 8
  np.testing.assert_allclose(prompt.values()[first], whole.values()[first], atol=1e-5)
  assert np.ptp(whole.values()[first]) > 1e-3 and not prompt.values()[~first].any()


@pytest.mark.parametrize("kind", [PromptCriticConfig, CriticConfig])
def test_it_learns_the_chance_of_success_from_prompts(kind):
  """With SPPO's credit: a sigmoid of its output goes to the share of episodes that succeed."""
  objective, loss = preset("sppo"), preset("sppo").value_loss
  bench = Bench(loss=loss, kind=kind, epochs=4)
  found = [bench.learn(objective)[0]["critic/loss"] for _ in range(8)]
  assert found[-1] < 0.5 * found[0]


def test_its_step_is_that_of_its_loss_and_does_not_depend_on_the_micro_batches():
  found = {}
  for rows in (1, 4):
    bench = Bench(rows=rows)
    # The step takes its buffers over.
    weights = jax.tree.map(jnp.copy, bench.networks[CRITIC].weights)
    found[rows], prepared = bench.learn()

    def loss(weights, bench=bench, prepared=prepared):
      errors = 0.5 * jnp.square(bench.predict(weights) - prepared.returns)
      return jnp.sum(prepared.value_coefficients * errors)

    value, grads = jax.value_and_grad(loss)(weights)
    assert found[rows]["critic/loss"] == pytest.approx(float(value), rel=1e-5)
    assert found[rows]["critic/grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
    assert float(loss(bench.networks[CRITIC].weights)) < float(value)
  assert found[1] == pytest.approx(found[4], rel=1e-4)


def test_a_critic_that_begins_as_the_policy_is_a_copy_with_adapters_added_in():
  lora = LoraConfig(rank=2)
  plain, adapted = Bench(start="policy"), Bench(start="policy", lora=lora)
  for bench, policy in (
    (plain, plain.state.weights.policy),
    (adapted, adapted.state.reference),  # fresh adapters add nothing
  ):
    own = bench.networks[CRITIC].weights
    assert own.value is not None
    jax.tree.map(np.testing.assert_array_equal, own.policy, policy)


def _settings(objective="vapo", kind=CriticConfig, **critic):
  experiment = staged_experiment(ScheduleConfig())
  model = dataclasses.replace(experiment.model, d_model=8, pattern="*", num_heads=1, num_kv_heads=1)
  settings = {"model": model, "start": "random"} | critic
  config = kind(**settings, optimizer=OptimizerConfig(learning_rate=0.02))
  rl = dataclasses.replace(experiment.rl, steps=3, objective=preset(objective), critic=config)
  return dict(rl=rl, checkpoint=CheckpointConfig(every=2))


@pytest.mark.slow
def test_a_run_trains_a_small_critic_and_a_killed_one_goes_on_to_the_same_bits(tmp_path):
  schedule = ScheduleConfig()
  with run(tmp_path / "straight", schedule, **_settings())._session() as session:
    networks = session.learner.abstract_state("rl").networks
    assert session.train().finished
  assert set(networks) == {"policy", CRITIC}
  assert networks["policy"].weights.value is None and networks[CRITIC].weights.value is not None
  rows = read_metrics(tmp_path / "straight" / "metrics.jsonl")
  assert all(row["critic/loss"] > 0 and "policy/value_loss" not in row for row in rows)
  train_until_killed(run(tmp_path / "cut", schedule, **_settings()), 3)
  assert run(tmp_path / "cut", schedule, **_settings()).train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "straight")
  assert run(tmp_path / "cut", schedule, **_settings()).replay(3).identical


def test_what_does_not_fit_is_refused_by_name():
  def refused(words, objective=None, **critic):
    changes = _settings(**critic)
    if objective is not None:
      changes["rl"] = dataclasses.replace(changes["rl"], objective=objective)
    experiment = staged_experiment(ScheduleConfig(), **changes)
    with pytest.raises(ConfigError, match=words):
      experiment.validate()

  refused(r"config\.rl\.critic\.epochs=0", epochs=0)
  refused(r"config\.rl\.critic\.start='policy'", start="policy")
  refused(r"config\.rl\.critic='prompt'; allowed: 'episode' unless", kind=PromptCriticConfig)
  refused(r"objective\.advantage\.credit='broadcast'", ObjectiveConfig())
