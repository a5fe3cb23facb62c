"""A run in which the policy plays a game against itself, or an earlier self."""

import collections
import dataclasses

import numpy as np
import pytest

from agentjax.config import ConfigError, Table
from agentjax.data import TaskSplits
from agentjax.models import ModelConfig
from agentjax.models.lora import LoraConfig
from agentjax.rollout.program import tool_episode
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.seat_config import CheckpointSeat, SeatConfig, SnapshotSeat
from agentjax.rollout.seats import SeatPlayer
from agentjax.sharding import fingerprint
from agentjax.training import Extensions, Run, load_experiment
from agentjax.training.build import build_parts
from agentjax.training.evaluation import load_snapshot
from agentjax.training.journal import JournalReader
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.record import Message, Reward, Task
from agentjax.trajectory.seats import learning_views
from agentjax.world.environment import Environment, Observation, Step
from tests.training.smoke import quiet
from tests.training.stages import fingerprints, staged_experiment, train_until_killed


class Duel(Environment):
  """Each of two agents writes once; whoever wrote more even bytes wins the difference."""

  agents = ("black", "white")

  async def reset(self, task, key):
    self._shares = {}
    return Observation((Message("user", f"Black, {task.id}."),), next="black")

  async def step(self, action):
    drawn = action.text.encode()
    self._shares[action.agent] = sum(b % 2 == 0 for b in drawn) / max(len(drawn), 1)
    if len(self._shares) == 1:
      return Step(Observation((Message("user", "White."),), next="white"))
    gain = self._shares["white"] - self._shares["black"]
    return Step(Observation(()), Reward(gain), terminated=True, rewards={"black": Reward(-gain)})


def made(
  directory,
  *,
  schedule=None,
  steps=4,
  seats=None,
  world=Duel,
  program=tool_episode,
  lora=None,
  **changes,
):
  seats = Table(seats or {})
  experiment = staged_experiment(schedule or ScheduleConfig(), seats=seats, lora=lora)
  experiment.rl.steps = steps
  experiment.checkpoint.every = 2
  for name, value in changes.items():
    setattr(experiment.rollout, name, value)
  tasks = [Task(id=i, prompt=(), answer="", source="duels") for i in range(6)]
  extensions = Extensions(
    tasks=TaskSplits(tasks, tasks[:2]), make_environment=lambda task: world(), program=program
  )
  return Run(experiment, directory, extensions=extensions, console=quiet())


def episodes_of(directory):
  found = JournalReader(directory / "journal.log").trajectories(lambda _: True)
  return [found[address] for address in sorted(found)]


def versions(episodes, policy):
  """Of what a policy drew, by step; an episode that black ends by a breach has no turn of white."""
  found = collections.defaultdict(set)
  for episode in episodes:
    drawn = [s for s in episode.segments if s.policy == policy and s.sampled.any()]
    found[episode.step] |= {int(v) for s in drawn for v in s.versions}
  return dict(found)


@pytest.mark.slow
def test_self_play_against_a_snapshot_goes_on_after_a_kill_with_the_same_bits(tmp_path):
  seats = {"white": SnapshotSeat(every=2)}
  made(tmp_path / "straight", seats=seats).train()
  run = made(tmp_path / "killed", seats=seats)
  train_until_killed(run, step=4)  # after the checkpoint of step 2 and the snapshot of step 3
  made(tmp_path / "killed", seats=seats).train()
  assert fingerprints(tmp_path / "killed") == fingerprints(tmp_path / "straight")
  straight = episodes_of(tmp_path / "straight")
  assert versions(straight, "policy") == {1: {1}, 2: {2}, 3: {3}, 4: {4}}
  assert versions(straight, "seat_white") == {1: {1}, 2: {1}, 3: {3}, 4: {3}}
  for episode, again in zip(straight, episodes_of(tmp_path / "killed"), strict=True):
    assert episode.agents == again.agents
    for one, other in zip(episode.segments, again.segments, strict=True):
      np.testing.assert_array_equal(one.token_ids, other.token_ids)
      np.testing.assert_array_equal(one.behaviour_log_probs, other.behaviour_log_probs)
  assert made(tmp_path / "killed", seats=seats).replay(4).identical


def test_a_snapshot_draws_with_the_weights_that_it_was_taken_with(tmp_path):
  """White draws the same whether it is frozen or not, until the policy has moved on."""
  made(tmp_path / "own", steps=2).train()
  made(tmp_path / "frozen", steps=2, seats={"white": SnapshotSeat(every=0)}).train()
  own, frozen = episodes_of(tmp_path / "own"), episodes_of(tmp_path / "frozen")

  def drawn(episode, agent):
    segments = [s for s in episode.segments if s.agent == agent and s.sampled.any()]
    return np.concatenate([np.zeros(0), *(s.behaviour_log_probs for s in segments)])

  first = [(a, b) for a, b in zip(own, frozen, strict=True) if a.step == 1]
  assert len(first) == 8
  assert sum(len(drawn(one, "white")) for one, _ in first)
  for one, other in first:
    np.testing.assert_array_equal(drawn(one, "white"), drawn(other, "white"))
  views = [len(learning_views([e])) for e in (own[0], frozen[0])]
  assert views == [2, 1]
  assert fingerprints(tmp_path / "own") != fingerprints(tmp_path / "frozen")


@pytest.mark.slow
def test_what_a_frozen_seat_writes_does_not_change_the_update(tmp_path):
  """Other words of the frozen seat give the same update; other words of the policy do not."""

  def train(name, replaced):
    run = made(tmp_path / name, steps=1, seats={"white": SnapshotSeat()})
    with run._session() as session:
      step = session.learner.rl_step

      def other_words(state, episodes, number):
        return step(state, [reworded(e, replaced) for e in episodes], number)

      session.learner.rl_step = other_words
      session.train()
    return fingerprints(tmp_path / name)

  def reworded(episode, policy):
    return dataclasses.replace(
      episode,
      segments=[
        dataclasses.replace(s, token_ids=np.full_like(s.token_ids, 65)) if s.policy == policy else s
        for s in episode.segments
      ],
    )

  plain = train("plain", None)
  assert train("frozen", "seat_white") == plain
  assert train("own", "policy") != plain


def test_seats_change_places_from_sample_to_sample(tmp_path):
  made(tmp_path, steps=1, seats={"white": SnapshotSeat()}, rotate_seats="sample").train()
  learnt = [(e.sample, v.group[-5:]) for e in episodes_of(tmp_path) for v in learning_views([e])]
  assert set(learnt) == {(0, "black"), (1, "white"), (2, "black"), (3, "white")}


@pytest.mark.slow
def test_a_finished_run_plays_a_seat(tmp_path):
  made(tmp_path / "first", steps=1).train()
  seat = CheckpointSeat(path=str(tmp_path / "first"))
  made(tmp_path / "second", steps=1, seats={"black": seat}).train()
  second = episodes_of(tmp_path / "second")
  assert versions(second, "seat_black") == {1: {0}} and versions(second, "policy") == {1: {1}}


@pytest.mark.slow
def test_one_step_off_the_opponent_stays_whole(tmp_path):
  schedule = ScheduleConfig(mode="one_step_off")
  made(tmp_path / "a", schedule=schedule, seats={"white": SnapshotSeat(every=1)}).train()
  run = made(tmp_path / "b", schedule=schedule, seats={"white": SnapshotSeat(every=1)})
  train_until_killed(run, step=4)
  made(tmp_path / "b", schedule=schedule, seats={"white": SnapshotSeat(every=1)}).train()
  assert fingerprints(tmp_path / "a") == fingerprints(tmp_path / "b")
  assert all(len(versions([e], "seat_white")[e.step]) <= 1 for e in episodes_of(tmp_path / "a"))


class Parrot:
  async def reply(self, messages, *, key):
    return messages[-1].content


@dataclasses.dataclass(unsafe_hash=True)
class ParrotSeat(SeatConfig):
  """Says what it heard."""

  def play(self, bank, name):
    return SeatPlayer(name, bank.chat, service=Parrot())


def test_a_seat_of_ones_own_is_chosen_by_name(tmp_path):
  seat = SeatConfig.from_name(f"{__name__}:ParrotSeat", "config.seats.black")
  run = made(tmp_path, steps=1, seats={"black": seat})
  run.train()
  saved = load_experiment(tmp_path / "config.json")
  assert saved.seats["black"].chosen == f"{__name__}:ParrotSeat"
  for episode in episodes_of(tmp_path):
    asked, text = (s for s in episode.segments if s.agent == "black" and s.owner == "assistant")
    assert not text.weights.any() and len(text) > len(asked)


def test_where_only_the_policy_plays_other_seats_are_refused(tmp_path):
  experiment = staged_experiment(ScheduleConfig(), seats=Table({"white": SnapshotSeat()}))
  experiment.model = ModelConfig(vocab_size=264, d_model=16, pattern="-", d_mlp=16)
  tasks = [Task(id=0, prompt=(), answer="", source="duels")]
  extensions = Extensions(tasks=TaskSplits(tasks, tasks), make_environment=lambda t: Duel())
  parts = build_parts(experiment.freeze(), tmp_path, extensions)
  with pytest.raises(ConfigError, match=r"config\.seats names white"):
    parts.player(None, experiment.rl.sampling, 0)
  with pytest.raises(ConfigError, match=r"every=-1; allowed: >= 0"):
    SnapshotSeat(every=-1).validate()
  with pytest.raises(ConfigError, match=r"path=None; allowed: RUN"):
    CheckpointSeat().validate()


async def forgetful(episode):
  """Black and white see nothing but the latest message of each turn."""
  await episode.open(await episode.reset())
  while True:
    step = await episode.step(await episode.act())
    await episode.rewrite(step.observation)


class LongDuel(Duel):
  """Two turns each; the last turns count."""

  async def step(self, action):
    self._turns = getattr(self, "_turns", 0) + 1
    if self._turns <= 2:
      other = {"black": "white", "white": "black"}[action.agent]
      return Step(Observation((Message("user", f"{other}, again."),), next=other))
    return await super().step(action)


def test_trainer_and_sampler_agree_on_every_branch_of_a_rewritten_history(tmp_path):
  run = made(tmp_path, steps=1, world=LongDuel, program=forgetful)
  run.train()
  episodes = episodes_of(tmp_path)
  views = [view for view in learning_views(episodes) if len(token_paths(view)) > 1]
  assert views  # whose history was rewritten
  (row,) = read_metrics(tmp_path / "metrics.jsonl")
  assert row["mismatch/max"] < 1e-4


@pytest.mark.parametrize("lora", [None, pytest.param(LoraConfig(rank=2), marks=pytest.mark.slow)])
def test_an_evaluation_takes_the_snapshot_from_the_checkpoint(tmp_path, lora):
  """The run's policy has moved on; the snapshot in its checkpoint draws as on the first step."""
  run = made(tmp_path, steps=2, seats={"white": SnapshotSeat(every=0)}, lora=lora)
  with run._session() as session:
    session.train()
    state, _ = session._restore()
    held = session.learner.snapshot(state, "seat_white")
    policy = session.learner.policy(state)
    parts, path = session.parts, tmp_path / "checkpoints" / "2"
    found = load_snapshot(parts, path, "seat_white", policy)
    assert fingerprint(found) == fingerprint(held) != fingerprint(policy)
    begun = tmp_path / "checkpoints" / "0"
    # A checkpoint without it, as of another stage.
    assert load_snapshot(parts, begun, "seat_black", policy) is policy
