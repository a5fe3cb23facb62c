"""Groups of a step's episodes: who is in them, and copies of earlier ones."""

import dataclasses

from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.episode_groups import generator, replayed, usable_groups
from agentjax.trajectory.packing import to_sequences
from agentjax.trajectory.record import BRANCHES, Reward, Status


def episode(sample, reward=0.0, *, task=0, status=Status.OK, **changes):
  builder = TrajectoryBuilder(step=1, task_id=task, sample=sample, source="x")
  builder.append_sampled([1, 2], [-1.0, -1.0], [0.5, 0.5], 0)
  made = builder.build(reward=Reward(reward), status=status)
  return dataclasses.replace(made, **changes)


def test_episodes_without_a_verdict_are_in_no_group():
  made = [
    episode(0, 1.0),
    episode(1, reward=0.0, status=Status.ENV_ERROR),
    episode(2, group="agent"),
    dataclasses.replace(episode(3), reward=Reward.invalid("no verdict")),
    episode(4, task=7),
    episode(5, status=Status.POLICY_ERROR),
  ]
  groups = usable_groups(made)
  found = {key: [one.sample for one in members] for key, members in groups.items()}
  assert found == {(1, 0, ""): [0, 5], (1, 0, "agent"): [2], (1, 7, ""): [4]}
  assert [one.valid for one in to_sequences(made)] == [one.usable for one in made]
  draws = [generator(3, key).integers(2**40) for key in groups]
  assert len(set(draws)) == 3
  assert draws == [generator(3, key).integers(2**40) for key in groups]


def test_an_earlier_episode_is_marked_and_shares_nothing():
  one = episode(0, metadata={BRANCHES: [1], "seen": True}, columns={})
  (plain,), (again,) = to_sequences([one]), to_sequences([replayed(one)])
  assert plain.columns["branches"].any() and "branches" not in again.columns
  assert again.columns["replayed"] and "replayed" not in plain.columns
  assert replayed(one).metadata == {"seen": True} and one.metadata[BRANCHES] == [1]
