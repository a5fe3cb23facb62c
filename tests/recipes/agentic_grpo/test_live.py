"""Stages in a run: each is trained on before the next begins, and corrected when the last ends."""

import json
import re

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.objectives import ObjectiveConfig
from agentjax.recipes.agentic_grpo import LiveStagesConfig
from agentjax.recipes.agentic_grpo.live import LiveStages, corrections
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.seat_config import TrainedSeat
from agentjax.signals.signal import StepContext
from agentjax.training import Run
from agentjax.training.journal import JournalReader
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Outcome, Reward, Status, Task
from agentjax.trajectory.seats import learning_views
from agentjax.world.environment import Environment, Observation, Step
from agentjax.world.world import World
from tests.training.smoke import quiet
from tests.training.stages import GROUP, staged_experiment

_SYNC = ScheduleConfig()
_STAGES = ("guess", "answer")


class _OneTurn(Environment):
  """One turn of the agent whose stage it is; pays the share of even bytes."""

  def __init__(self, agent, noted):
    self.agents, self._noted = (agent,), noted

  async def reset(self, task, key):
    self._noted.append(("begins", self.agents[0]))
    return Observation((Message("user", f"Task {task.id}."),), next=self.agents[0])

  async def step(self, action):
    drawn = action.text.encode()
    paid = sum(b % 2 == 0 for b in drawn) / max(len(drawn), 1)
    return Step(Observation(()), Reward(paid), terminated=True)


class TwoStages(World):
  """Plays its stages in turn, one a training step."""

  def __init__(self):
    self.stage, self.noted = 0, []

  def tasks(self, data):
    tasks = [Task(id=i, prompt=(), answer="", source="digits") for i in range(2)]
    return TaskSplits(tasks, tasks)

  def environment(self, task):
    return _OneTurn(_STAGES[self.stage], self.noted)

  async def learn(self, finished):
    self.stage = (self.stage + 1) % 2

  def get_state(self):
    return json.dumps(self.stage).encode()

  def set_state(self, state):
    self.stage = json.loads(state)


def _experiment(**passes):
  experiment = staged_experiment(_SYNC)
  experiment.world = "tests.recipes.agentic_grpo.test_live:TwoStages"
  experiment = type(experiment).from_dict(experiment.to_dict())
  experiment.rl.steps, experiment.rollout.max_turns = 4, 1
  experiment.rl.objective = ObjectiveConfig()
  experiment.rl.passes = LiveStagesConfig(stages=_STAGES, **passes)
  return experiment


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Directory of a run, what its world and its updates did in their order, and the updates."""
  directory, seen = tmp_path_factory.mktemp("live") / "run", []
  with Run(_experiment(), directory, console=quiet())._session() as session:
    apply, noted = session.learner._apply, session.parts.world.noted

    def looking(update, state, one, number):
      name = ("immediate", "correction")[number]
      noted.append(("update", name))
      prepared = one.ready[number].prepared
      seen.append((name, one.sequences, one.packed, *map(np.asarray, (
        prepared.advantages, prepared.weights, prepared.old_log_probs))))  # fmt: skip
      return apply(update, state, one, number)

    session.learner._apply = looking
    assert session.train().finished
  return directory, noted, seen


def test_a_stage_is_updated_before_any_episode_of_the_next_begins(finished):
  _, noted, _ = finished
  runs = [noted[0]]
  for one in noted:
    if one != runs[-1]:
      runs.append(one)
  assert runs == 2 * [
    ("begins", "guess"),
    ("update", "immediate"),
    ("begins", "answer"),
    ("update", "immediate"),
    ("update", "correction"),
  ]


def _by_hand(values):
  spread = max(values) > min(values)
  return (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6) * spread


def _drawn(sequences, packed):
  """Where the drawn tokens of each episode stand, by (step, task, sample)."""
  found = {}
  for i, sequence in enumerate(sequences):
    address = tuple(map(int, re.findall(r"=(\d+)", sequence.name)[:3]))
    inside = np.asarray(packed.segment_ids) == i + 1
    found[address] = inside & (np.asarray(packed.versions) >= 0)
  return found


def _paid(directory):
  episodes = JournalReader(directory / "journal.log").trajectories(lambda _: True)
  return {address: t.reward.value for address, t in episodes.items()}


def test_the_first_updates_are_of_own_rewards_and_of_no_corrected_token(finished):
  directory, _, seen = finished
  paid = _paid(directory)
  for number, step in ((0, 1), (1, 2)):
    name, sequences, packed, advantages, weights, _ = seen[number]
    assert name == "immediate"
    places = _drawn(sequences, packed)
    for task in range(2):
      expected = _by_hand([paid[step, task, i] for i in range(GROUP)])
      for i, value in enumerate(expected):
        np.testing.assert_allclose(advantages[places[step, task, i]], value, atol=2e-4)
    assert weights.sum() == sum(p.sum() for (s, *_), p in places.items() if s == step)


def test_the_correction_is_of_the_last_reward_less_the_own_one(finished):
  directory, _, seen = finished
  paid = _paid(directory)
  name, sequences, packed, advantages, weights, old = seen[2]
  places, told_apart = _drawn(sequences, packed), 0
  assert name == "correction" and len(sequences) == 4 * GROUP
  for task in range(2):
    expected = _by_hand([paid[2, task, i] - paid[1, task, i] for i in range(GROUP)])
    for i, value in enumerate(expected):
      at = places[1, task, i]
      np.testing.assert_allclose(advantages[at], value, atol=2e-4)
      # The ratio is to the policy that sampled the stage, before the update that followed it.
      np.testing.assert_array_equal(old[at], np.asarray(packed.behaviour_log_probs)[at])
      told_apart += abs(value) > 0.1
  assert told_apart > 2
  assert weights.sum() == sum(p.sum() for (s, *_), p in places.items() if s == 1) > 0


def test_a_run_reports_its_corrections_and_is_replayed_to_the_same_bits(finished):
  directory, *_ = finished
  first, second = read_metrics(directory / "metrics.jsonl")[:2]
  assert (first["stages/kept"], first["stages/corrected"]) == (2 * GROUP, 0)
  assert (second["stages/kept"], second["stages/corrected"]) == (0, 2 * GROUP)
  assert "correction/grad_norm" not in first and second["correction/grad_norm"] > 0
  assert Run(_experiment(), directory, console=quiet()).replay(2).identical


def _episode(agent, sample, value, step=1, status=Status.OK):
  builder = TrajectoryBuilder(step=step, task_id=0, sample=sample, source="x")
  builder.append("user", [1, 2], agent=agent)
  builder.append_sampled([4, 5], [-1.0, -1.0], [0.5, 0.5], 0, agent=agent)
  reward = Reward.invalid("none") if value is None else Reward(value)
  made = builder.build(status=status, agents={agent: Outcome(True, reward, {})})
  return learning_views([made])[0]


def test_chains_without_both_rewards_have_no_correction_and_state_is_kept():
  signal, twin, context = LiveStages(_STAGES), LiveStages(_STAGES), StepContext(1, None)
  early = [_episode("guess", 0, 0.5), _episode("guess", 1, None), _episode("guess", 2, 0.25)]
  shown, _ = signal.observe(context, early)
  assert len(shown) == 3 and not any(one.columns["corrected"] for one in shown)
  twin.set_state(json.loads(json.dumps(signal.get_state())))
  last = [
    _episode("answer", 0, 1.0, 2),
    _episode("answer", 1, 1.0, 2),
    _episode("answer", 2, 1.0, 2, Status.ENV_ERROR),
  ]
  for one in (signal, twin):
    *own, added = one.observe(context, last)[0]
    assert len(own) == 3 and added.reward == Reward(0.5)
    assert (added.step, added.sample) == (1, 0) and added.columns["corrected"]
    assert one.get_state() == []
  assert corrections(early, {}) == []


def test_an_agent_that_is_no_stage_is_neither_kept_nor_corrected():
  signal, context = LiveStages(_STAGES), StepContext(1, None)
  _, metrics = signal.observe(context, [_episode("summariser", 0, 1.0)])
  assert metrics["stages/kept"] == 0
  assert len(signal.observe(context, [_episode("answer", 0, 1.0)])[0]) == 1


def test_settings_that_cannot_be_are_refused():
  experiment = _experiment()
  experiment.validate()
  experiment.rl.old_log_probs = "recomputed"
  with pytest.raises(ConfigError, match=r"old_log_probs='recomputed'; allowed: 'behaviour'"):
    experiment.validate()
  experiment = _experiment()
  experiment.rl.schedule = ScheduleConfig(mode="one_step_off")
  with pytest.raises(ConfigError, match=r"schedule\.mode"):
    experiment.validate()
  experiment = _experiment()
  experiment.seats["guess"] = TrainedSeat()
  with pytest.raises(ConfigError, match=r"one policy plays all stages"):
    experiment.validate()
  with pytest.raises(ConfigError, match="two or more agents"):
    LiveStagesConfig(stages=("guess",)).validate()
  experiment = _experiment(correction_clip_low=0.5)
  with pytest.raises(ConfigError, match="correction_clip_low"):
    experiment.validate()
