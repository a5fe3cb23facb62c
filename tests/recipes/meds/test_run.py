"""MEDS in a run: whose rewards are shaped, and that the memory is part of the run's state."""

import dataclasses

import jax
import numpy as np
import pytest

from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, sequence_advantages
from agentjax.recipes.meds import mistakes
from agentjax.recipes.meds.mistakes import PART, MedsConfig, RepeatedMistakes
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.signals.signal import SignalTools, StepContext
from agentjax.text.tokenizer import ByteTokenizer
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack
from agentjax.trajectory.record import Reward, Status
from tests.models.rows import draw
from tests.training.stages import run, staged_experiment

_MODEL = ModelConfig(
  vocab_size=264, d_model=16, pattern="*-*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16
)
_TOKENIZER = ByteTokenizer()


def _episode(text, reward, sample, *, task=0, step=1):
  builder = TrajectoryBuilder(step=step, task_id=task, sample=sample, source="sums")
  builder.append("user", _TOKENIZER.encode("What is 2 + 2?"))
  ids = _TOKENIZER.encode(text)
  builder.append_sampled(ids, [-1.0] * len(ids), [1.0] * len(ids), [0] * len(ids))
  return builder.build(reward=reward)


def _shaper(**settings):
  def packed(sequences):
    return pack(sequences, row_length=128, pad_id=_TOKENIZER.pad_id, rows=4)

  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  config = MedsConfig(radius=1e-3, **settings)
  return RepeatedMistakes(
    config, SignalTools(_MODEL, _TOKENIZER.token_bytes(), mesh, packed, rows=2)
  )


_WRONG, _OTHER = "so \\boxed{5}", "take 2 from 2: \\boxed{0}"


def test_only_a_mistake_that_was_made_before_is_punished_and_more_each_time():
  shaper, policy = _shaper(last_layers=2), draw(_MODEL, seed=0)

  def visit(*episodes):
    shaped, metrics = shaper.observe(StepContext(1, lambda: policy), episodes)
    return [t.reward.value for t in shaped], metrics, shaped

  first = [_episode(_WRONG, Reward(0.0), i) for i in range(3)]
  assert visit(*first)[0] == [0.0, 0.0, 0.0]
  broken = _episode(_WRONG, Reward.invalid("no verdict"), 5)
  broken.status = Status.VERIFIER_ERROR
  values, metrics, shaped = visit(
    _episode(_WRONG, Reward(0.0), 0),
    _episode("so \\boxed{4}", Reward(1.0), 1),
    _episode(_OTHER, Reward(0.0), 2),
    _episode("no idea", Reward(0.0), 3),
    _episode(_WRONG, Reward(0.0), 4, task=7),
    broken,
  )
  penalty = 0.1 * np.log(4)
  assert values == [pytest.approx(-penalty), 1.0, 0.0, 0.0, 0.0, None]
  assert shaped[0].reward_parts[PART].value == pytest.approx(-penalty)
  assert metrics["meds/repeated"] == pytest.approx(1 / 3)
  again, *_ = visit(_episode(_WRONG, Reward(0.0), 0))
  assert again[0] == pytest.approx(-0.1 * np.log(5)) and again[0] < values[0]


def test_a_group_that_is_all_wrong_learns_from_it_as_plain_grpo_does_not():
  shaper, policy = _shaper(), draw(_MODEL, seed=0)
  context = StepContext(1, lambda: policy)
  shaper.observe(context, [_episode(_WRONG, Reward(0.0), i) for i in range(3)])
  group = [_episode(_WRONG, Reward(0.0), 0), _episode(_OTHER, Reward(0.0), 1)]

  def advantages(trajectories):
    rewards = np.array([t.reward.value for t in trajectories], np.float32)
    return sequence_advantages(rewards, np.ones(2, bool), np.zeros(2, int), AdvantageConfig())

  np.testing.assert_array_equal(advantages(group), [0.0, 0.0])
  shaped, _ = shaper.observe(context, group)
  repeated, new = advantages(shaped)
  assert repeated < -0.5 and new > 0.5


@pytest.mark.slow
def test_the_memory_is_saved_with_the_run_and_replayed_from(tmp_path, monkeypatch):
  # Whatever such a small policy writes has an answer, is wrong, and is like all else.
  monkeypatch.setattr(mistakes, "answer_place", lambda pieces, marker: len(pieces) - 1)

  def make():
    schedule = ScheduleConfig()
    punished = MedsConfig(right_from=2.0, radius=2.0, alpha=0.3, beta=1.0)
    rl = dataclasses.replace(staged_experiment(schedule).rl, steps=5, signals=(punished,))
    return run(tmp_path / "run", schedule, rl=rl, checkpoint=CheckpointConfig(every=2))

  make().train()
  costs = [row["meds/penalty"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
  assert costs[0] == 0 and costs[-1] > 0
  assert make().replay(5).identical
  monkeypatch.setattr(mistakes.MistakeMemory, "set_state", lambda memory, state: None)
  assert not make().replay(5).identical
