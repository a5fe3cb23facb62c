"""RoRecomp: which episodes are compared, batch statistics, the buffer, a run with both updates."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import AdvantageConfig, ObjectiveConfig
from agentjax.objectives.preparation import prepare
from agentjax.recipes.rorecomp import RecompositionConfig
from agentjax.recipes.rorecomp.recomposition import (
  COMPENSATION,
  PRIORITY,
  Recomposition,
  prepare_batch,
)
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.signal import StepContext, order_signals
from agentjax.training import Experiment, load_experiment
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences, unpack
from agentjax.trajectory.record import Reward, Status, ToolRecord
from tests.training.stages import fingerprints, run, staged_experiment, train_until_killed

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
_PLAIN = ObjectiveConfig(AdvantageConfig(scale="none"))


def _signal(**settings):
  config = RecompositionConfig(**settings)
  config.validate()
  signal = Recomposition(config)
  order_signals([signal])  # registers its column, as a run does
  return signal


def _episode(reward, sample, length=1, *, step=1, task=0):
  builder = TrajectoryBuilder(step=step, task_id=task, sample=sample, source="x")
  builder.append("user", [1, 2])
  builder.append_sampled([5] * length, [-1.0] * length, [0.5] * length, 0)
  return builder.build(reward=Reward(reward))


def _ladder(**place):
  """Five right and five wrong ones of 1 to 5 tokens."""
  return [_episode(float(i < 5), i, i % 5 + 1, **place) for i in range(10)]


def _observe(signal, episodes, step=1):
  return signal.observe(StepContext(step, None), episodes)


def _advantages(episodes, config=_PLAIN, which=None):
  sequences = to_sequences(episodes)
  packed = jax.tree.map(jnp.asarray, pack(sequences, row_length=32, pad_id=0))
  found = prepare(packed, config) if which is None else prepare_batch(packed, config, which)
  values = unpack(found[0].advantages, packed.segment_ids, len(sequences))
  return np.array([float(v[-1]) for v in values])


def test_advantage_and_length_are_tied_only_in_the_priority_batch():
  """Over lengths 1..5 of both their covariance is 0; of the two shortest right and the two longest
  wrong ones it is the mean of +-1 times +-1.5."""
  episodes = _ladder()
  lengths = np.array([len(e.segments[1]) for e in episodes])
  assert np.mean(_advantages(episodes) * (lengths - lengths.mean())) == pytest.approx(0, abs=1e-6)
  first, metrics = _observe(_signal(share=0.4), episodes)
  assert [one.sample for one in first] == [0, 1, 8, 9]
  assert metrics["rorecomp/length"] == 3 and metrics["rorecomp/length_priority"] == 1.5
  config = ObjectiveConfig(AdvantageConfig(ddof=0))
  advantages = _advantages(first, config, PRIORITY)
  lengths = np.array([len(e.segments[1]) for e in first])
  covariance = np.mean(advantages * (lengths - lengths.mean()))
  assert covariance == pytest.approx(-1.5, abs=1e-4)


def test_where_a_whole_group_succeeds_the_batch_still_teaches():
  right = [_episode(1.0, i, i + 1, task=0) for i in range(4)]
  wrong = [_episode(0.0, i, i + 1, task=1) for i in range(4)]
  assert not _advantages([*right, *wrong]).any()
  first, _ = _observe(_signal(share=0.5), [*right, *wrong])
  assert [(one.task_id, one.sample) for one in first] == [(0, 0), (0, 1), (1, 2), (1, 3)]
  assert _advantages(first, which=PRIORITY).tolist() == [0.5, 0.5, -0.5, -0.5]


def test_the_rest_is_trained_on_once_the_oldest_first_and_by_its_own_statistics():
  signal = _signal(share=0.4, capacity=9, compensation=6, probability=1.0)
  seen = []
  for step in range(1, 7):
    found, metrics = _observe(signal, _ladder(step=step), step)
    seen += [one.address for one in found]
    batches = [int(one.columns["recomposed"]) for one in found]
    later = [one for one in found if int(one.columns["recomposed"]) == COMPENSATION]
    assert batches == sorted(batches) and all(bool(one.columns["replayed"]) for one in later)
    assert len(later) == metrics["rorecomp/compensation"] == (6 if step > 1 else 0)
    assert sum(_advantages(found, which=PRIORITY)) == pytest.approx(0, abs=1e-6)
    if later:
      weights = _advantages(found, which=COMPENSATION)
      assert not weights[:4].any() and sum(weights) == pytest.approx(0, abs=1e-6)
      assert [one.address for one in later] == sorted(one.address for one in later)
  assert len(seen) == len(set(seen)) == 6 * 4 + 5 * 6
  again = _signal(share=0.4, capacity=9, compensation=6, probability=1.0)
  again.set_state(signal.get_state())
  one, other = (_observe(s, _ladder(step=9), 9)[0] for s in (signal, again))
  assert [e.address for e in one] == [e.address for e in other]


def test_without_the_draw_the_oldest_are_forgotten():
  signal = _signal(share=0.4, capacity=8, compensation=4, probability=0.0)
  for step in range(1, 5):
    found, metrics = _observe(signal, _ladder(step=step), step)
    assert len(found) == 4 and metrics["rorecomp/kept"] == min(6 * step, 8)


def test_calls_are_a_length_and_what_has_no_verdict_is_in_no_batch():
  signal = _signal(share=0.5, length="calls")
  episodes = [_episode(1.0, i) for i in range(4)]
  for i, one in enumerate(episodes):
    one.tools = [ToolRecord(0, "f", {}, "ok", "", 0.1)] * (3 - i)
  lost = dataclasses.replace(_episode(1.0, 9), status=Status.ENV_ERROR)
  found, metrics = _observe(signal, [*episodes, lost])
  assert [one.sample for one in found] == [2, 3] and metrics["rorecomp/kept"] == 2


def _run(folder):
  passes = RecompositionConfig(share=0.5, above=0.05, capacity=8, compensation=4, probability=1.0)
  stage = dataclasses.replace(staged_experiment(ScheduleConfig()).rl, steps=4, passes=passes)
  return run(folder, ScheduleConfig(), rl=stage)


@pytest.mark.slow
def test_a_run_makes_the_second_update_where_there_is_something_to_learn_from(tmp_path):
  assert _run(tmp_path / "straight").train().finished
  rows = read_metrics(tmp_path / "straight" / "metrics.jsonl")
  rows = [row for row in rows if "rorecomp/priority" in row]
  assert [row["rorecomp/compensation"] > 0 for row in rows] == [False, True, True, True]
  assert ["compensation/grad_norm" in row for row in rows] == [False, True, True, True]
  train_until_killed(_run(tmp_path / "cut"), 4)
  again = _run(tmp_path / "cut")
  assert again.train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "straight")
  assert again.replay(3).identical


def test_the_config_is_read_again_and_minibatches_are_refused():
  experiment = load_experiment(_CONFIGS / "rorecomp_word_problems.py")
  experiment.validate()
  assert Experiment.from_dict(experiment.to_dict()).rl.passes == experiment.rl.passes
  experiment.rl.minibatches = 2
  with pytest.raises(ConfigError, match=r"rl\.minibatches=2; allowed: 1 with .*passes"):
    experiment.validate()
