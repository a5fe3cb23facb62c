"""Process rewards in a run: by scorers through the reward graph, by two policies in the update."""

import dataclasses

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig, preset
from agentjax.recipes.monte_carlo import MonteCarloConfig
from agentjax.recipes.prime import ProcessConfig, ProcessRewards
from agentjax.recipes.prime.rewards import StepRewards
from agentjax.rewards import RewardConfig, TurnScores
from agentjax.rollout.config import IndependentConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.signals.signal import BatchContext, SignalTools
from agentjax.signals.teacher import TeacherConfig
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.training.build import Extensions, build_parts
from agentjax.training.journal import JournalReader
from agentjax.training.learner import _means
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.packing import pack, to_sequences, unpack
from tests.signals.tracing import trace
from tests.training.stages import (
  Crash,
  fingerprints,
  run,
  staged_experiment,
  train_until_killed,
)
from tests.training.teachers import MODEL, episodes, save_policy

_SYNC = ScheduleConfig()


def _scorer(tmp_path, **settings):
  for name, seed in (("model", 1), ("reference", 2)):
    save_policy(tmp_path / name, MODEL, seed=seed)
  config = ProcessConfig(
    model=TeacherConfig(str(tmp_path / "model")),
    reference=TeacherConfig(str(tmp_path / "reference")),
    beta=0.5,
    **settings,
  )

  def packed(sequences):
    return pack(sequences, row_length=64, pad_id=0, rows=4)

  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  chat = MarkedChat(ByteTokenizer())
  return ProcessRewards(config, SignalTools(MODEL, (), mesh, packed, 4, chat=chat)), packed


def _score(tmp_path, **settings):
  scorer, packed = _scorer(tmp_path, **settings)
  sequences = to_sequences(episodes())
  batch = packed(sequences)
  model, reference = (
    scorer.log_probs(name, batch, sequences, None) for name in ("model", "reference")
  )
  rewards, metrics = scorer.score(batch, batch, model, reference)
  return sequences, unpack(rewards, batch.segment_ids, len(sequences)), metrics


def test_steps_are_tokens_that_stay_selected_and_are_rewarded_where_the_batch_is():
  config = ProcessConfig(beta=0.5, centre="leave_one_out")
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  sequences = to_sequences(episodes())
  packed = pack(sequences, row_length=64, pad_id=0)
  grid = packed.token_ids.shape
  gained = packed.segment_ids.astype(np.float32)
  batch = packed.with_columns(
    {
      "old_log_probs": gained,
      "reference_log_probs": np.zeros(grid, np.float32),
      "selected": np.broadcast_to(np.arange(grid[1]) % 2 == 0, grid),
    }
  )
  signal = StepRewards(ProcessRewards(config, SignalTools(MODEL, (), mesh, None, 4)))
  context = BatchContext(1, None, sequences, packed, None, None)

  def columns(given):
    return signal(context, {}, given).columns

  steps = (packed.weights > 0) & batch.columns["selected"]
  # Members of a group of two gain 1 more or less than the other.
  expected = np.where(steps, np.where(packed.segment_ids % 2 == 1, -0.5, 0.5), 0)
  np.testing.assert_allclose(columns(batch)["token_rewards"], expected, atol=1e-6)
  assert trace(columns, batch)["token_rewards"].shape == grid


def _by_hand(tmp_path, sequences):
  """beta log(pi / pi_ref) of all tokens, by another way of scoring."""
  both = []
  for seed in (1, 2):
    params = models.init(dataclasses.replace(MODEL, init_scale=3.0), jax.random.key(seed))
    first = [s.token_ids[:1] for s in sequences]
    rest = [s.token_ids[1:] for s in sequences]
    both.append([s.log_probs for s in models.score_responses(params, MODEL, first, rest)])
  return [0.5 * np.r_[0, a - b] for a, b in zip(*both, strict=True)]


def test_metrics_that_only_some_updates_have_are_means_over_those():
  every = [{"loss": 1.0}, {"loss": 3.0, "process/step": 2.0}, {"loss": 2.0, "process/step": 4.0}]
  assert _means(every) == {"loss": 2.0, "process/step": 3.0}
  assert _means(every[::-1]) == _means(every)
  assert _means([]) == {}


@pytest.mark.filterwarnings("error")
def test_a_batch_without_steps_has_no_metrics_of_steps(tmp_path):
  scorer, packed = _scorer(tmp_path)
  batch = packed(to_sequences(episodes()))
  batch = dataclasses.replace(batch, weights=np.zeros_like(batch.weights))
  zeros = np.zeros(batch.token_ids.shape, np.float32)
  rewards, metrics = scorer.score(batch, batch, zeros, zeros)
  assert metrics == {} and not rewards.any()


def test_a_turn_is_paid_the_log_ratio_of_its_tokens_at_its_end(tmp_path):
  sequences, rewards, metrics = _score(tmp_path, per="turn")
  steps = []
  for sequence, ratio, ours in zip(sequences, _by_hand(tmp_path, sequences), rewards, strict=True):
    expected = np.zeros(len(sequence))
    for turn in (0, 1):
      own = np.flatnonzero((sequence.turns == turn) & (sequence.weights > 0))
      expected[own[-1]] = ratio[own].sum()
      steps.append(ratio[own].sum())
    np.testing.assert_allclose(ours, expected, atol=2e-5)
  assert metrics["process/step"] == pytest.approx(np.mean(steps), abs=1e-5)


def test_the_other_members_of_a_group_are_the_baseline_of_every_token(tmp_path):
  sequences, rewards, _ = _score(tmp_path, centre="leave_one_out")
  ratios = _by_hand(tmp_path, sequences)
  means = [r[s.weights > 0].mean() for r, s in zip(ratios, sequences, strict=True)]
  for i, (sequence, ratio, ours) in enumerate(zip(sequences, ratios, rewards, strict=True)):
    drawn = sequence.weights > 0
    np.testing.assert_allclose(ours[drawn], ratio[drawn] - means[i ^ 1], atol=2e-5)
    assert not ours[~drawn].any()


def _even_bytes(trajectory, task):
  """A process scorer: the share of even ids of every turn."""
  drawn = [s.token_ids for s in trajectory.segments if s.sampled.any()]
  return TurnScores.of_turns(trajectory, [float(np.mean(ids % 2 == 0)) for ids in drawn])


def _experiment(*, process=None, by_turn=("steps",)):
  credit = AdvantageConfig(
    centre="none", scale="none", credit="reward_to_go", index_set="turn", turn_rewards=by_turn
  )
  rl = dataclasses.replace(
    staged_experiment(_SYNC).rl,
    steps=3,
    objective=ObjectiveConfig(credit, PolicyLossConfig(clip="none")),
    process=process,
  )
  reward = RewardConfig(parts=("environment", "steps"), weights=(1.0, 0.5))
  return dict(rl=rl, reward=reward, scorers={"steps": _even_bytes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  directory = tmp_path_factory.mktemp("process") / "run"
  process = ProcessConfig(beta=2.0, per="turn")
  assert run(directory, _SYNC, **_experiment(process=process)).train().finished
  return directory, process


def test_a_scorer_of_turns_is_recorded_by_turn_and_its_part_is_the_sum(finished):
  directory, _ = finished
  for trajectory in JournalReader(directory / "journal.log").trajectories(lambda _: True).values():
    paid = [p for p in trajectory.turn_rewards["steps"] if p is not None]
    assert len(paid) == sum(s.sampled.any() for s in trajectory.segments)
    assert trajectory.reward_parts["steps"].value == pytest.approx(sum(paid))
  rows = read_metrics(directory / "metrics.jsonl")
  # Half of the part, as its weight says; the environment pays at the end.
  assert rows[0]["reward/by_turn"] == pytest.approx(0.5 * rows[0]["reward/part_steps"], rel=1e-5)


def test_the_progress_of_the_policy_is_a_reward_that_a_replay_has_again(finished):
  directory, process = finished
  rows = read_metrics(directory / "metrics.jsonl")
  # At first the policy is its own reference, as far as sampler and trainer agree.
  assert abs(rows[0]["process/step"]) < 1e-4 < abs(rows[2]["process/step"])
  assert run(directory, _SYNC, **_experiment(process=process)).replay(3).identical


@pytest.mark.slow
def test_a_resumed_run_has_the_same_process_rewards(finished, tmp_path):
  directory, process = finished
  settings = _experiment(process=process)
  made = run(tmp_path / "run", _SYNC, **settings)
  train_until_killed(made, 3)
  assert run(tmp_path / "run", _SYNC, **settings).train().finished
  assert fingerprints(tmp_path / "run") == fingerprints(directory)


@pytest.mark.slow
def test_without_it_a_run_takes_another_way(finished, tmp_path):
  run(tmp_path / "plain", _SYNC, **_experiment()).train()
  assert fingerprints(tmp_path / "plain")[2] != fingerprints(finished[0])[2]


@pytest.mark.slow
def test_the_prime_preset_learns_from_a_reward_model_where_outcomes_agree(tmp_path):
  """Plain GRPO learns nothing of a group that is paid alike; the implicit rewards tell it apart."""
  save_policy(tmp_path / "model", staged_experiment(_SYNC).model, seed=3)
  process = ProcessConfig(
    model=TeacherConfig(str(tmp_path / "model")), beta=0.5, centre="leave_one_out"
  )
  rl = dataclasses.replace(staged_experiment(_SYNC).rl, steps=2)
  alike = RewardConfig(parts=("constant",))
  learnt = {}
  for name, changes in (
    ("grpo", dict(objective=preset("dr_grpo"))),
    ("prime", dict(objective=preset("prime"), process=process)),
  ):
    made = run(
      tmp_path / name,
      _SYNC,
      rl=dataclasses.replace(rl, **changes),
      reward=alike,
      scorers={"constant": lambda trajectory, task: 0.0},  # as much as a lost episode has
    )
    assert made.train().finished
    learnt[name] = read_metrics(tmp_path / name / "metrics.jsonl")[0]["grad_norm"]
  assert learnt["grpo"] == 0.0 < learnt["prime"]
  assert made.replay(2).identical


def test_settings_without_a_place_for_single_steps_are_refused():
  experiment = staged_experiment(_SYNC)
  experiment.rl.process = ProcessConfig()
  with pytest.raises(ConfigError, match=r"advantage\.credit='broadcast'.*rl\.process"):
    experiment.validate()


def _monte_carlo(completions=2):
  settings = _experiment(by_turn=("monte_carlo",))
  experiment = staged_experiment(_SYNC)
  experiment.rollout.sampler = MonteCarloConfig(completions=completions)
  reward = RewardConfig(parts=("environment", "monte_carlo"), weights=(1.0, 1.0))
  return dict(rl=settings["rl"], reward=reward, rollout=experiment.rollout)


@pytest.mark.slow
def test_completions_between_turns_reward_a_run_and_survive_its_crash(tmp_path):
  settings, count = _monte_carlo(), 0
  made = run(tmp_path / "run", _SYNC, **settings)
  with pytest.raises(Crash), made._session() as session:
    keep = session.journal.add_trajectory

    def dies(trajectory):
      nonlocal count
      keep(trajectory)
      count += 1
      if count == 11:  # in the middle of a group of the second step
        raise Crash

    session.stream._playing.on_finish = dies
    session.train()
  assert run(tmp_path / "run", _SYNC, **settings).train().finished
  run(tmp_path / "straight", _SYNC, **settings).train()
  assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "straight")
  assert made.replay(3).identical
  episodes = JournalReader(tmp_path / "run" / "journal.log").trajectories(lambda _: True)
  assert len(episodes) == 3 * 8 and all(a[2] >= 0 for a in episodes)
  expected = [t.reward_parts["monte_carlo"].value for t in episodes.values()]
  assert min(expected) < 0 >= max(expected)  # an episode's part is less what was expected of it


def test_the_part_and_the_sampler_of_completions_belong_together():
  experiment = staged_experiment(_SYNC)
  experiment.rollout.sampler = MonteCarloConfig()
  with pytest.raises(ConfigError, match=r"reward\.parts=.*'monte_carlo' among them"):
    experiment.validate()
  experiment.rollout.sampler = IndependentConfig()
  experiment.reward = RewardConfig(parts=("environment", "monte_carlo"), weights=(1.0, 1.0))
  with pytest.raises(ConfigError, match=r"reward\.parts='monte_carlo'"):
    build_parts(experiment, None, Extensions())
