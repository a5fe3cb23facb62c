"""Batches of another number of sequences or rows take the programs that are compiled already."""

import dataclasses

import jax
import numpy as np
import pytest

from agentjax.objectives import preset
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.training.build import build_parts
from agentjax.training.experiment import resolve
from agentjax.training.learner import Learner
from agentjax.training.packs import sequence_places
from agentjax.training.rows import MeshRows
from agentjax.trajectory.columns import core_fields
from agentjax.trajectory.packing import pack, to_sequences
from tests.training.stages import extensions, staged_experiment
from tests.training.teachers import MODEL, episodes


def test_places_for_sequences_have_few_sizes():
  assert [sequence_places(n, 6) for n in (1, 6, 7, 12, 13, 40)] == [6, 6, 12, 12, 24, 48]


def test_prepare_and_update_are_compiled_once_for_many_sizes(tmp_path):
  experiment = staged_experiment(ScheduleConfig())
  experiment.model = dataclasses.replace(MODEL)
  experiment.rl = dataclasses.replace(
    experiment.rl,
    microbatch_rows=1,
    tasks_per_step=4,
    row_length=128,
    objective=preset("ppo"),
  )
  experiment.rollout.group_size = 4
  parts = build_parts(resolve(experiment), tmp_path, extensions())
  learner = Learner(parts, policy_objective(experiment.rl.objective))
  state = learner.begin_rl(learner.initial_state("rl"))
  (only,) = learner._phases["policy"][0].passes
  rows = set()
  for step, count in enumerate((16, 13, 9), 1):
    state, metrics = learner.rl_step(state, episodes(step, group=4)[:count], step)
    assert np.isfinite(metrics["loss"])
    packed = learner._pack(to_sequences(episodes(step, group=4)[:count]))
    rows.add(int(np.asarray(packed.segment_ids).any(axis=1).sum()))
    assert packed.num_sequences == 16
  assert rows == {2, 3}  # micro-batches that hold tokens, of four
  assert only.prepare._cache_size() == only.update._cache_size() == 1


def test_a_batch_stays_on_the_mesh_and_comes_back_as_it_was():
  batch = pack(to_sequences(episodes()), row_length=32, pad_id=0, rows=8, max_sequences=16)
  rows = MeshRows(make_mesh(MeshConfig(), jax.devices()[:1]), 2)
  placed = rows.place(batch)
  cut = rows.split(placed.token_ids)
  again, used = rows.join(cut), rows.used(placed.segment_ids)
  assert cut.shape == (4, 2, 32) and all(
    isinstance(getattr(placed, c.name), jax.Array) for c in core_fields(type(placed))
  )
  np.testing.assert_array_equal(again, batch.token_ids)
  filled = np.flatnonzero(np.asarray(batch.segment_ids).any(axis=1))
  assert int(used) == filled[-1] // 2 + 1


@pytest.mark.parametrize("count", [3, 5])
def test_unused_places_change_no_advantage(count):
  sequences = to_sequences(episodes())[: 2 * count]
  found = [
    prepare(pack(sequences, row_length=32, pad_id=0, max_sequences=places), preset("rloo"))[0]
    for places in (None, 16)
  ]
  np.testing.assert_allclose(found[0].advantages, found[1].advantages, atol=1e-7)
  np.testing.assert_allclose(found[0].coefficients, found[1].coefficients, atol=1e-9)
