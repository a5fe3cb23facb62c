"""Router replay: what the sampler's routers chose is recorded and chosen again in training."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import Engine, EngineConfig, SampleRequest
from agentjax.training import Run
from agentjax.training.state import Weights
from agentjax.training.update import replayed
from agentjax.trajectory.builder import (
  TrajectoryBuilder,
  TrajectoryError,
  check_trajectory,
  token_paths,
)
from agentjax.trajectory.experts import compact_dtype, unrecorded
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.recordlog import decode_record, encode_record
from agentjax.trajectory.store import from_record, to_record
from tests.models import rows
from tests.training.machine import MIXTURE, machine, sequences, step, update_batch
from tests.training.smoke import quiet, smoke_experiment

_MODEL = dataclasses.replace(rows.TINY, pattern="*EME")
_ENGINE = EngineConfig(
  slots=4,
  max_length=48,
  chunk_tokens=4,
  extend_buckets=(4, 8),
  extend_rows=(2, 2),
  record_experts=True,
  warmup=False,
)
_PROMPT, _OBSERVATION = list(range(1, 12)), [7, 8, 9]


def _converse(engine: Engine):
  """Ids and recorded experts of a context with a prefix, a fork and an observation; a Sample."""

  async def play():
    prefix = await engine.prefill(_PROMPT)
    context = await engine.open(prefix)
    first = await context.generate(SampleRequest((1, 2), 6))
    (fork,) = await context.fork(1)
    await fork.extend(_OBSERVATION)
    held = fork.experts
    second = await fork.generate(SampleRequest((3, 4), 5))
    ids = [*_PROMPT, *first.token_ids, *_OBSERVATION, *second.token_ids]
    return np.array(ids), held, fork.experts, second

  engine.publish(rows.draw(_MODEL, seed=4), 0)
  try:
    return asyncio.run(play())
  finally:
    engine.close()


def test_the_engine_records_what_every_token_went_through():
  ids, held, experts, second = _converse(Engine(_MODEL, _ENGINE))
  assert experts.dtype == np.uint8 and experts.shape == (len(ids), 2, 2)
  # The observation waits for the next call.
  assert len(held) == len(_PROMPT) + 6
  np.testing.assert_array_equal(experts[-5:], second.experts)
  tokens = rows.Rows(*(jnp.asarray(v)[None] for v in (ids, ids * 0 + 1, np.arange(len(ids)))))
  own = rows.forward(rows.draw(_MODEL, seed=4), _MODEL, *tokens).routing.experts
  np.testing.assert_array_equal(np.sort(experts), np.sort(np.moveaxis(own[:, 0], 0, 1)))


@pytest.mark.slow
def test_nothing_is_recorded_unless_asked_for():
  quiet_engine = dataclasses.replace(_ENGINE, record_experts=False)
  _, held, experts, second = _converse(Engine(_MODEL, quiet_engine))
  assert held is None and experts is None and second.experts is None
  with pytest.raises(ConfigError, match="engine.record_experts=True.*without routers"):
    Engine(dataclasses.replace(_MODEL, pattern="*-"), _ENGINE)


def test_an_unrecorded_token_is_routed_by_the_router_itself():
  params = rows.draw(_MODEL, seed=4)
  rng = np.random.default_rng(0)
  tokens = rows.pack([rng.integers(0, 41, n) for n in (9, 7)], [[0, 1]], 16)
  own = rows.forward(params, _MODEL, *tokens)
  given = np.array(own.routing.experts)
  given[:, :, ::2] = -1
  again = rows.forward(params, _MODEL, *tokens, experts=jnp.asarray(given))
  np.testing.assert_array_equal(again.hidden, own.hidden)
  given[:, :, 1::2] = (given[:, :, 1::2] + 1) % 4
  other = rows.forward(params, _MODEL, *tokens, experts=jnp.asarray(given))
  np.testing.assert_array_equal(other.routing.experts[:, :, 1::2], given[:, :, 1::2])
  assert np.abs(np.asarray(other.hidden - own.hidden)).max() > 1e-3


def test_choices_travel_through_a_trajectory_into_the_rows_of_a_batch():
  builder = TrajectoryBuilder(step=1, task_id=2, sample=0, source="s")
  builder.append("user", [1, 2, 3])
  builder.append_sampled([4, 5], [-1.0, -1.0], [0.5, 0.5], 0)
  builder.append("tool", [6, 7])  # never run: the episode ended here
  experts = np.arange(5 * 2 * 2).reshape(5, 2, 2).astype(np.uint8)
  builder.record_path({"experts": experts})
  trajectory = from_record(decode_record(encode_record(to_record(builder.build()))))
  (path,) = token_paths(trajectory)
  none = unrecorded(experts.dtype)
  found = path.columns["experts"]
  np.testing.assert_array_equal(found[:5], experts)
  assert (found[5:] == none).all() and found.dtype == np.uint8
  batch = pack(to_sequences([trajectory]), row_length=10, pad_id=0)
  packed = batch.columns["experts"]
  assert packed.shape == (1, 10, 2, 2) and (packed[0, 5:] == none).all()
  asked = np.asarray(replayed(jnp.asarray(packed)))
  np.testing.assert_array_equal(asked[:, 0, :5], np.moveaxis(experts, 1, 0))
  assert (asked[:, 0, 5:] == -1).all()
  trajectory.segments[0].columns = {"experts": experts[:2]}
  with pytest.raises(TrajectoryError, match=r"experts is uint8\[2, 2, 2\].*\[3, routers, choices"):
    check_trajectory(trajectory)


def test_ids_take_one_byte_as_long_as_one_value_is_left_over():
  assert [compact_dtype(n) for n in (8, 255, 256, 768)] == [
    np.uint8,
    np.uint8,
    np.uint16,
    np.uint16,
  ]


def _sampled():
  """Sequences whose log-probs and experts are those of the fresh policy, and that policy."""
  made = machine(MIXTURE)
  policy = made.fresh().weights.policy
  members = sequences()
  ids = np.stack([s.token_ids for s in members])
  scores = models.score_tokens(
    policy,
    MIXTURE,
    jnp.asarray(ids),
    jnp.ones_like(ids),
    jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
  )
  experts = np.moveaxis(np.asarray(scores.routing.experts), 0, 2).astype(np.uint8)
  return made, [
    dataclasses.replace(
      s, behaviour_log_probs=np.asarray(scores.log_probs[i]), columns={"experts": experts[i]}
    )
    for i, s in enumerate(members)
  ]


def _with_other_router(state):
  """The same state but for a router that a change of weights has moved."""
  attention, mixture = state.weights.policy.groups[0]
  noise = 0.5 * jax.random.normal(jax.random.key(5), mixture.mixer.router.shape)
  mixer = dataclasses.replace(mixture.mixer, router=mixture.mixer.router + noise)
  groups = ((attention, dataclasses.replace(mixture, mixer=mixer)),)
  policy = dataclasses.replace(state.weights.policy, groups=groups)
  own = state.networks["policy"]
  return state.with_network("policy", dataclasses.replace(own, weights=Weights(policy)))


@pytest.mark.slow
def test_an_update_goes_the_sampler_s_way_and_still_trains_the_router():
  made, members = _sampled()
  batch, whole = update_batch(members, 4)
  perturbed = _with_other_router(made.fresh())
  load = models.forward(
    perturbed.weights.policy,
    MIXTURE,
    *(jnp.asarray(v) for v in (batch.token_ids, batch.segment_ids, batch.positions)),
    experts=replayed(jnp.asarray(batch.columns["experts"])),
  ).routing.load
  recorded = np.bincount(
    np.concatenate([s.columns["experts"] for s in members]).reshape(-1), minlength=4
  )
  np.testing.assert_array_equal(load[0], recorded)

  before = np.asarray(perturbed.weights.policy.groups[0][1].mixer.router)
  free = dataclasses.replace(whole, experts=None)
  _, without = step(made, _with_other_router(made.fresh()), free, 2)
  state, with_replay = step(made, perturbed, whole, 2)
  assert with_replay["router_imbalance"] == pytest.approx(recorded.max() / recorded.mean())
  assert 0 < with_replay["mismatch/mean"] < 0.7 * without["mismatch/mean"]
  assert np.abs(np.asarray(state.weights.policy.groups[0][1].mixer.router) - before).max() > 1e-3
  # Against the weights that sampled there is nothing to correct, replayed or not.
  _, same = step(made, made.fresh(), whole, 2)
  assert same["mismatch/max"] < 1e-5


@pytest.mark.slow
def test_a_run_with_replay_can_be_resumed_and_replayed_to_the_same_bits(tmp_path):
  experiment = smoke_experiment()
  experiment = dataclasses.replace(
    experiment,
    supervised=dataclasses.replace(experiment.supervised, steps=0),
    rl=dataclasses.replace(experiment.rl, steps=2, replay_experts=True, microbatch_rows=2),
    evaluation=dataclasses.replace(experiment.evaluation, tasks=0),
    model=dataclasses.replace(experiment.model, num_experts=4),
  )
  directory = tmp_path / "run"
  report = Run(experiment, directory, console=quiet()).train()
  assert report.finished
  again = Run(dataclasses.replace(experiment), directory, console=quiet())
  with again._session() as session:
    trajectories = session.journal.trajectories(lambda address: address[0] == 2).values()
    segments = [s for t in trajectories for s in t.segments]
    assert segments and all(s.columns["experts"].shape == (len(s), 1, 1) for s in segments)
    drawn = [s for s in segments if s.sampled.any()]
    assert drawn and all((s.columns["experts"] < 4).all() for s in drawn)
    assert session.replay(2).identical


def test_replay_needs_a_router():
  experiment = smoke_experiment()
  experiment = dataclasses.replace(
    experiment,
    model=dataclasses.replace(experiment.model, pattern="*-"),
    rl=dataclasses.replace(experiment.rl, replay_experts=True),
  )
  with pytest.raises(ConfigError, match=r"config\.rl\.replay_experts=True.*without a router"):
    experiment.validate()
