"""Stored episodes get the rewards that a new graph gives them; what is stored stays as it is."""

import asyncio
import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig, load_tasks
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.rewards.formula import Formula
from agentjax.rewards.graph import RewardGraph
from agentjax.rollout.integrity import play_turns
from agentjax.rollout.rescoring import compare, rescore
from agentjax.rollout.scoring import score
from agentjax.training.build import Extensions, build_scoring
from agentjax.training.experiment import resolve
from agentjax.training.journal import Journal
from agentjax.training.rescoring import read_trajectories, rescore_trajectories
from agentjax.trajectory.record import Reward, Segment, Status, Task, ToolRecord, Trajectory
from agentjax.trajectory.store import read_store, to_record, write_store
from agentjax.world.cheats import Setting
from agentjax.worlds.mle import MleWorldConfig
from agentjax.worlds.question.word_problems import WordProblemConfig
from tests.worlds.test_gates import GATED, experiment

ROOT = pathlib.Path(__file__).parents[1]
TASKS = {n: Task(n, (), str(n), "made") for n in range(3)}


def trajectory(task_id, answer, sample=0, **fields):
  ids = np.arange(3, dtype=np.int32)
  zeros = np.zeros(3, np.float32)
  segment = Segment("assistant", ids, ids >= 0, zeros + 1, zeros, zeros, ids)
  return Trajectory(1, task_id, sample, "made", [segment], answer=answer, **fields)


def again(trajectories, graph=None, tasks=TASKS):
  graph = graph or build_rewards(RewardConfig())
  return asyncio.run(rescore(trajectories, tasks, graph, timeout=10.0))


def test_parts_are_computed_anew_and_what_the_environment_paid_stays():
  paid = {"environment": Reward(0.5), "old": Reward(3.0)}
  before = trajectory(1, "1", reward=Reward(3.5), reward_parts=paid, metadata={"old": "x"})
  graph = build_rewards(RewardConfig(parts=("exact_match", "environment"), weights=(1.0, 2.0)))
  (after,) = again([before], graph)
  assert after.reward == Reward(2.0)
  assert after.reward_parts == {"environment": Reward(0.5), "exact_match": Reward(1.0)}
  assert after.metadata == {}
  assert before.reward == Reward(3.5) and before.reward_parts == paid
  assert after.segments is before.segments


@pytest.mark.parametrize(
  ("status", "metadata", "answer", "now", "value"),
  [
    (Status.VERIFIER_ERROR, {"ended": "truncated"}, "1", Status.TRUNCATED, 1.0),
    (Status.VERIFIER_ERROR, {"ended": "policy_error"}, "1", Status.POLICY_ERROR, 0.0),
    (Status.VERIFIER_ERROR, {}, "1", Status.OK, 1.0),
    (Status.OK, {}, "2", Status.OK, 0.0),
    (Status.ENV_ERROR, {"reason": "gone"}, "1", Status.ENV_ERROR, None),
  ],
)  # fmt: skip
def test_a_verifier_that_works_now_gives_back_how_the_episode_ended(
  status, metadata, answer, now, value
):
  lost = Reward.invalid("no verifier")
  (after,) = again([trajectory(1, answer, status=status, reward=lost, metadata=metadata)])
  assert after.status is now and after.reward.value == value


def test_what_a_graph_masks_can_be_scored_again_to_the_same():
  async def broken(t, task):
    raise OSError("gone")

  original = trajectory(1, "1", status=Status.TRUNCATED)
  (masked,) = again([original], RewardGraph({"x": broken}, Formula("x")))
  assert masked.status is Status.VERIFIER_ERROR
  (back,) = again([masked])
  assert back.status is Status.TRUNCATED and back.reward == Reward(1.0)


def test_a_verifier_that_hangs_takes_nothing_that_a_later_one_needs():
  async def hangs(t, task):
    await asyncio.sleep(60)

  ended = (Status.OK, Status.TRUNCATED, Status.POLICY_ERROR)
  stored = [trajectory(1, "1", n, status=status) for n, status in enumerate(ended)]
  graph = RewardGraph({"x": hangs}, Formula("x"))
  masked = asyncio.run(rescore(stored, TASKS, graph, timeout=0.2))
  kept = (Status.VERIFIER_ERROR, Status.VERIFIER_ERROR, Status.POLICY_ERROR)
  assert tuple(t.status for t in masked) == kept
  assert [t.reward.value for t in masked] == [None, None, 0.0]
  back = again(masked)
  assert tuple(t.status for t in back) == ended
  assert [t.reward.value for t in back] == [1.0, 1.0, 0.0]
  assert all(t.metadata == {} for t in back)


def test_groups_are_compared_as_groups_and_the_order_stays():
  def rank(members, task):
    return [float(len(members))] * len(members)

  graph = RewardGraph({}, Formula("rank"), {"rank": rank})
  stored = [trajectory(1, "1", 1), trajectory(2, "2"), trajectory(1, "1", 0)]
  after = again(stored, graph)
  assert [t.address for t in after] == [t.address for t in stored]
  assert [t.reward.value for t in after] == [2.0, 1.0, 2.0]


def test_episodes_of_unknown_tasks_are_refused():
  with pytest.raises(ValueError, match="id 9"):
    again([trajectory(9, "1")])


def test_the_table_counts_what_changed():
  before = [trajectory(1, "1", reward=Reward(0.0)), trajectory(2, "2", reward=Reward(1.0))]
  before[0].status = Status.VERIFIER_ERROR
  rows = {row[0]: row[1:] for row in compare(before, again(before))}
  assert rows["reward"] == ("0.5000", "1.0000", "1")
  assert rows["exact_match"] == ("-", "1.0000", "2")
  assert rows["without a verdict"] == ("1", "0", "1")


def test_a_store_is_whole_or_not_there(tmp_path):
  path = tmp_path / "new" / "store.log"
  write_store(path, [trajectory(1, "1")])
  bad = trajectory(2, "2", metadata={"x": object()})
  with pytest.raises(TypeError):
    write_store(path, [trajectory(2, "2"), bad])
  assert [t.task_id for t in read_store(path)] == [1]
  assert os.listdir(path.parent) == ["store.log"]


def _command(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "agentjax.rescore", *arguments],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
    capture_output=True, text=True, timeout=300, check=False,
  )  # fmt: skip


def test_the_command_reads_a_journal_and_writes_a_store(tmp_path):
  data = DataConfig(
    train_size=32, test_size=4, source=WordProblemConfig(levels=(1,), program_share=0.0)
  )
  tasks = load_tasks(data).train[:2]
  right = trajectory(tasks[0].id, tasks[0].answer, reward=Reward(0.0))
  used = trajectory(
    tasks[1].id, "?", tools=[ToolRecord(0, "calculator", {"expression": "1"}, "ok", "1", 0.1)]
  )
  run = tmp_path / "run"
  run.mkdir()
  journal = Journal(run / "journal.log")
  for t in (right, used):
    journal.add_trajectory(t)
  journal.close()
  stored = (run / "journal.log").read_bytes()
  config = f"--config={ROOT / 'configs' / 'smoke.py'}"
  output = tmp_path / "new.store"
  done = _command(
    config, f"--trajectories={run}", f"--output={output}",
    "--config.reward.parts=exact_match,tool_used", "--config.reward.weights=1.0,0.5",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "exact_match" in done.stdout and "tool_used" in done.stdout
  assert [t.reward.value for t in read_store(output)] == [1.0, 0.5]
  assert (run / "journal.log").read_bytes() == stored
  (first, _) = read_store(output)
  same = dataclasses.replace(first, reward=right.reward, reward_parts={})
  assert str(to_record(same)) == str(to_record(right))


WORLDS = ("word_problems", "code", "sql", "repair", "mle", "pivot_arguments", "bandit",
          "frozen_lake", "sokoban", "countdown")  # fmt: skip


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("repair", "mle") else n for n in WORLDS]
)
def test_every_world_scores_its_stored_episodes_to_the_rewards_they_had(name, tmp_path):
  gated = GATED[name]
  if gated.needs is not None:
    pytest.importorskip(gated.needs)
  config = resolve(experiment(gated, tmp_path))
  setting = Setting(gated.tools, config.rollout.answer)

  async def play():
    scoring = build_scoring(config, Extensions())
    played = []
    try:
      for task in scoring.tasks.train[:1]:
        world = scoring.world
        cheat = next(iter(world.cheats(task, setting).values()))
        attempts = (world.solution(task, setting), cheat)
        for sample, turns in enumerate(attempts):
          episode = await play_turns(task, turns, world.environment)
          episode.sample = sample
          await score(scoring.rewards, [episode], task, timeout=60.0)
          played.append(episode)
    finally:
      await scoring.close()
    return played

  before = asyncio.run(play())
  assert len({t.reward.value for t in before if t.reward.valid}) == 2
  write_store(tmp_path / "episodes.store", before)
  after = rescore_trajectories(config, read_trajectories(tmp_path / "episodes.store"))
  assert [t.reward for t in after] == [t.reward for t in before]
  assert [t.reward_parts for t in after] == [t.reward_parts for t in before]


def test_labels_of_a_run_follow_from_its_own_secret(tmp_path):
  gated = dataclasses.replace(experiment(GATED["mle"], tmp_path), world=MleWorldConfig())
  config = resolve(gated)

  def labels(run):
    scoring = build_scoring(config, Extensions(), tmp_path / run)
    asyncio.run(scoring.close())
    return [task.metadata["labels"] for task in scoring.tasks.train]

  assert labels("a") == labels("a") != labels("b")
  with pytest.raises(ConfigError, match="tasks.secret_file=None"):
    build_scoring(config, Extensions())


_READ = """
import pathlib, sys
from agentjax.config import ConfigError
from agentjax.training.rescoring import read_trajectories
from agentjax.trajectory.store import StoreError
for path in sys.argv[1:]:
  try:
    read_trajectories(pathlib.Path(path))
  except (ConfigError, StoreError) as error:
    print(error)
"""


def test_files_that_are_none_are_refused_in_one_line(tmp_path):
  (tmp_path / "other").write_bytes(b"x" * 100)
  paths = [tmp_path, tmp_path / "other", tmp_path / "missing"]
  done = subprocess.run(
    [sys.executable, "-c", _READ, *map(str, paths)], capture_output=True, text=True, timeout=120
  )
  lines = done.stdout.splitlines()
  assert len(lines) == 3 and all("trajectories=" in line for line in lines), done
