"""A signal with a network of its own, outside of a run."""

import dataclasses

import jax
import jax.numpy as jnp

from agentjax.models import ModelConfig
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.signals.signal import BatchContext, SignalTools, StepContext, order_signals
from agentjax.text.tokenizer import ByteTokenizer
from agentjax.training import OptimizerConfig
from agentjax.training.optimizer import build_optimizer
from agentjax.training.rows import MeshRows
from agentjax.training.state import StateSpec, network_specs
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences, unpack
from agentjax.trajectory.record import Reward

MODEL = ModelConfig(
  vocab_size=264, d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=32
).freeze()
TOKENIZER = ByteTokenizer()


def make_episode(turns, reward, sample=0, *, weights=None, answers=None):
  """A prompt, and turns of the texts with what was answered to each but the last."""
  builder = TrajectoryBuilder(step=1, task_id=0, sample=sample, source="x")
  builder.append("user", TOKENIZER.encode("go"))
  for i, text in enumerate(turns):
    ids = TOKENIZER.encode(text)
    own = None if weights is None else [weights[i]] * len(ids)
    builder.append_sampled(ids, [-1.0] * len(ids), [1.0] * len(ids), 0, weights=own)
    if i + 1 < len(turns):
      builder.append("user", TOKENIZER.encode("Done." if answers is None else answers[i]))
  return builder.build(reward=Reward(reward))


class SignalSetup:
  """The signal of a config: its only network, and what it says of episodes."""

  def __init__(self, config, *, rows=2, row_length=64):
    self.mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    self.rows, self.row_length = rows, row_length
    config.validate()
    tools = SignalTools(MODEL, TOKENIZER.token_bytes(), self.mesh, self._pack, rows)
    self.signal = config.build(tools)
    (self.name,) = self.signal.networks
    order_signals([self.signal])  # registers its columns, as a run does
    self.cut = MeshRows(self.mesh, rows)

  def _pack(self, sequences):
    return pack(sequences, row_length=self.row_length, pad_id=0, rows=4)

  def network(self, head=None):
    """As a stage begins; ``head`` seeds a head that is not 0."""
    optimizer = build_optimizer(OptimizerConfig(), 1, network_specs(MODEL, critic=False))
    spec = StateSpec(MODEL, optimizer, self.mesh, further=self.signal.networks)
    state = spec.create(jax.random.key(0))
    network = state.networks[self.name]
    if head is not None:
      drawn = jax.random.normal(jax.random.key(head), (MODEL.d_model,))
      value = dataclasses.replace(network.weights.value, weight=drawn, bias=jnp.float32(0.2))
      network = network.replace(weights=network.weights.replace(value=value))
    return network

  def step(self, network, episodes):
    """The network after the step, the batch with the signal's columns, packed, metrics."""
    marked, metrics = self.signal.observe(StepContext(1, None), episodes)
    sequences = to_sequences(marked)
    packed = self._pack(sequences)
    context = BatchContext(1, None, sequences, packed, None, self.cut)
    batch = self.cut.place(packed)
    network = jax.tree.map(jnp.copy, network)  # a step takes its buffers over
    said = self.signal(context, {self.name: network}, batch)
    columns = {k: self.cut.place_column(k, v) for k, v in said.columns.items()}
    batch = batch.with_columns(columns)
    learnt = self.signal.learn(context, {self.name: network}, batch, None)
    found = {k: float(v) for k, v in {**metrics, **said.metrics, **learnt.metrics}.items()}
    return learnt.networks.get(self.name, network), batch, packed, found


def by_turn(batch, packed, count, name="token_rewards"):
  """Of each sequence what its tokens are paid, where that is not 0."""
  parts = unpack(batch.columns[name], packed.segment_ids, count)
  return [part[part != 0] for part in parts]
