"""GRPO-RoC: counts, penalties, the draw, and a run that trains on half of its episodes."""

import dataclasses
import pathlib

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.grpo_roc import RocConfig
from agentjax.recipes.grpo_roc.resample import ResampleOnCorrect, balance
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.signal import StepContext
from agentjax.text import ByteTokenizer
from agentjax.training import Experiment, load_experiment
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, Status, ToolRecord
from tests.training.stages import fingerprints, run, staged_experiment

_TOKENIZER = ByteTokenizer()
_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def _signal(**settings):
  return ResampleOnCorrect(RocConfig(**settings), _TOKENIZER.token_bytes())


def _episode(reward, sample, *, texts=("#### 1",), calls=(), task=0):
  builder = TrajectoryBuilder(step=1, task_id=task, sample=sample, source="x")
  builder.append("user", [1, 2])
  for text in texts:
    ids = _TOKENIZER.encode(text)
    builder.append_sampled(ids, [-1.0] * len(ids), [0.5] * len(ids), 0)
  made = builder.build(reward=Reward(reward))
  made.tools = [ToolRecord(0, "f", {}, "ok" if ok else "error", "", 0.1) for ok in calls]
  return made


def _kept(signal, episodes):
  found, metrics = signal.observe(StepContext(1, None), episodes)
  return [one.sample for one in found], metrics


@pytest.mark.parametrize(
  ("wins", "losses", "expected"),
  [(16, 16, 8), (8, 24, 4), (1, 31, 1), (31, 1, 15), (0, 32, 0), (32, 0, 16), (3, 29, 2)],
)
def test_shares_stay_with_a_floor_where_there_are_any(wins, losses, expected):
  assert balance(wins, losses, 16, 2) == expected


def test_penalties_by_hand():
  signal = _signal()
  assert signal.penalty(_episode(1.0, 0)) == 0.5  # one answer, no call
  assert signal.penalty(_episode(1.0, 0, calls=(1, 1, 0, 0))) == 0.5
  assert signal.penalty(_episode(1.0, 0, calls=(1,), texts=("no answer",))) == 1.0
  twice = _episode(1.0, 0, calls=(1,), texts=("#### 1 #### 2", "so"))
  assert signal.penalty(twice) == 0.5
  assert signal.penalty(_episode(1.0, 0, calls=(1,), texts=("####" * 9,))) == 1.0


def test_first_is_the_order_of_the_code():
  errors = [(0,), (1,), (1, 0), (1,)]
  episodes = [_episode(1.0, i, calls=c) for i, c in enumerate(errors)]
  episodes += [_episode(0.0, 4 + i) for i in range(4)]
  samples, metrics = _kept(_signal(keep=4, choose="first"), episodes)
  assert samples == [1, 3, 4, 5]
  assert metrics["roc/penalty"] == pytest.approx(1.5 / 4) and metrics["roc/penalty_kept"] == 0


def test_the_draw_prefers_fewer_errors_leaves_the_mean_and_treats_failures_alike():
  random, samples, means = np.random.default_rng(0), [], []
  signal = _signal(keep=16)
  errors, kept_errors = [], []
  failures = np.zeros(32)
  for task in range(60):
    episodes = []
    for sample in range(32):
      calls = random.random(4) < random.random()
      episodes.append(_episode(float(sample < 16), sample, calls=calls.tolist(), task=task))
    samples, _ = _kept(signal, episodes)
    assert len(samples) == 16
    means.append(np.mean([episodes[i].reward.value for i in samples]))
    errors += [signal.penalty(one) for one in episodes[:16]]
    kept_errors += [signal.penalty(episodes[i]) for i in samples if i < 16]
    failures[samples] += 1
    assert _kept(signal, episodes)[0] == samples  # addressed by step and task
  assert set(means) == {0.5}
  assert np.mean(kept_errors) < 0.75 * np.mean(errors)
  assert np.abs(failures[16:] / 60 - 0.5).max() < 0.25


def test_what_has_no_verdict_is_not_kept_and_small_groups_stay_whole():
  masked = dataclasses.replace(_episode(1.0, 9), status=Status.VERIFIER_ERROR)
  unknown = dataclasses.replace(_episode(1.0, 8), reward=Reward.invalid("no verdict"))
  episodes = [_episode(float(i), i) for i in range(2)]
  assert _kept(_signal(keep=4), [*episodes, masked, unknown])[0] == [0, 1]
  assert _kept(_signal(keep=4), [masked, unknown])[0] == [9, 8]  # the step says why it ends


@pytest.mark.slow
def test_a_run_trains_on_half_of_its_episodes_and_replays(tmp_path):
  stage = dataclasses.replace(
    staged_experiment(ScheduleConfig()).rl,
    steps=3,
    signals=(RocConfig(keep=2, floor=0, above=0.5),),
  )
  made = run(tmp_path / "run", ScheduleConfig(), rl=stage)
  assert made.train().finished
  rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "roc/kept" in row]
  assert [row["roc/kept"] for row in rows] == [0.5] * 3
  assert len(fingerprints(tmp_path / "run")) == 3
  assert made.replay(2).identical


def test_the_config_keeps_half_and_more_than_the_group_is_refused():
  experiment = load_experiment(_CONFIGS / "grpo_roc_word_problems.py")
  experiment.validate()
  again = Experiment.from_dict(experiment.to_dict())
  assert again.rl.signals == (RocConfig(keep=8),)
  experiment.rollout.group_size = 8
  with pytest.raises(ConfigError, match=r"keep=8; allowed: less than config\.rollout\.group_size"):
    experiment.validate()
