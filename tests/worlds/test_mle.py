"""Machine-learning engineering: tasks, milestones, tricks with the file."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import io
import json

import pytest

from agentjax.config import ConfigError
from agentjax.data.config import DataConfig, load_tasks
from agentjax.data.errors import DataError
from agentjax.rewards.config import RewardConfig, build_rewards
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout.integrity import check_environment, play_turns
from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.tools.registry import ToolRegistry
from agentjax.world.world import Site
from agentjax.worlds.mle.environment import Milestones, MleWorld, MleWorldConfig, judge_submission
from agentjax.worlds.mle.secret import run_secret
from agentjax.worlds.mle.tasks import KINDS, MleTaskConfig, mle_tasks, read_mle_folder

SECRET = bytes(range(32))


@pytest.fixture(scope="module")
def tasks():
  return mle_tasks(MleTaskConfig(), train_size=6, test_size=3, seed=0, secret=SECRET)


def _submission(answers):
  return "id,target\n" + "".join(f"{i},{target}\n" for i, target in answers.items())


def _rows(task, name):
  return list(csv.DictReader(io.StringIO(task.metadata["files"][name])))


def test_tasks_are_repeatable_and_their_labels_are_in_no_file(tasks):
  assert mle_tasks(MleTaskConfig(), train_size=6, test_size=3, seed=0, secret=SECRET) == tasks
  assert mle_tasks(MleTaskConfig(), train_size=6, test_size=3, seed=1, secret=SECRET) != tasks
  assert [t.metadata["level"] for t in tasks.train] == [1, 2, 3, 1, 2, 3]
  for task in tasks.train:
    test = _rows(task, "test.csv")
    assert len(_rows(task, "train.csv")) == 200 and len(test) == 100
    assert "target" not in test[0]
    assert {row["id"] for row in test} == set(task.metadata["labels"])
    assert not {row["id"] for row in test} & {row["id"] for row in _rows(task, "train.csv")}
    assert set(task.metadata["files"]) == {"train.csv", "test.csv"}


def _labels_by_guess(files, guesses):
  """What a policy can do with this repository and its own files: generate data sets of likely seeds
  until one has the same files."""
  for guess in guesses:
    for seed in range(4):
      splits = mle_tasks(MleTaskConfig(), train_size=6, test_size=1, seed=seed, secret=guess)
      for made in (*splits.train, *splits.test):
        if made.metadata["files"] == files:
          return made.metadata["labels"]
  return None


def test_labels_cannot_be_generated_again_without_the_secret(tasks, tmp_path):
  task = tasks.train[1]
  files = task.metadata["files"]
  assert _labels_by_guess(files, [SECRET]) == task.metadata["labels"]
  assert _labels_by_guess(files, [b"", bytes(32), b"secret", b"mle"]) is None
  one, other = run_secret(tmp_path / "one"), run_secret(tmp_path / "other")
  assert one != other and len(one) == 32
  assert run_secret(tmp_path / "one") == one  # resumed, evaluated, replayed
  assert (tmp_path / "one" / "secret").stat().st_mode & 0o777 == 0o600
  assert SECRET.hex() not in repr(task)


def test_a_run_draws_its_secret_and_others_must_name_it(tmp_path):
  folder, data = tmp_path / "run" / "world", DataConfig(train_size=2, test_size=1)
  with pytest.raises(ConfigError, match="config.world.tasks.secret_file=None"):
    MleTaskConfig().load(data)
  tasks = MleTaskConfig().load(data, folder)
  assert MleTaskConfig().load(data, folder) == tasks
  named = MleTaskConfig(secret_file=str(folder / "secret"))
  assert named.load(data, tmp_path / "another" / "world") == named.load(data) == tasks
  assert MleTaskConfig().load(data, tmp_path / "another" / "world").train != tasks.train
  (folder / "secret").write_text("00")
  with pytest.raises(ConfigError, match="holds 1 bytes"):
    named.load(data)


def test_a_run_that_was_begun_without_a_secret_is_not_continued(tmp_path):
  (tmp_path / "journal.log").write_bytes(b"")
  with pytest.raises(ConfigError, match=str(tmp_path)):
    run_secret(tmp_path / "world")


def test_milestones_follow_one_another(tasks):
  for task in tasks.train[:3]:
    labels = task.metadata["labels"]
    ids = list(labels)
    targets = [row["target"] for row in _rows(task, "train.csv")]
    constant = _submission(dict.fromkeys(ids, targets[0]))
    few = _submission({i: labels[i] for i in ids[:60]})
    none, made, loaded, valid, right = (
      judge_submission(task, s) for s in (None, "id,target\n", few, constant, _submission(labels))
    )
    assert none == Milestones()
    assert made == Milestones(submitted=1.0)
    assert loaded == Milestones(submitted=1.0, loaded=1.0)
    assert (valid.valid, valid.beats_strong) == (1.0, 0.0) and valid.score < 0.5
    assert right == Milestones(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("kind", range(3))
def test_no_trick_with_the_file_is_valid(tasks, kind):
  task = tasks.train[kind]
  labels = task.metadata["labels"]
  first, second = list(labels)[:2]
  odd = {"nan": "nan", "inf": "inf", "-inf": "-inf", "empty": "", "list": "[1]", "huge": "1e200",
         "unknown": "perhaps"}  # fmt: skip
  tricks = {name: _submission({**labels, first: value}) for name, value in odd.items()}
  tricks["all_nan"] = _submission(dict.fromkeys(labels, "nan"))
  tricks["twice"] = _submission(labels) + f"{first},{labels[first]}\n"
  tricks["one_for_another"] = _submission(labels).replace(f"\n{second},", f"\n{first},")
  tricks["more_rows"] = _submission({**labels, "0x": labels[first]})
  tricks["fewer_rows"] = _submission({i: t for i, t in labels.items() if i != first})
  tricks["three_columns"] = _submission(labels).replace("\n", ",1\n", 3)
  tricks["other_header"] = _submission(labels).replace("id,target", "target,id")
  tricks["no_header"] = _submission(labels).partition("\n")[2]
  tricks["empty"] = ""
  tricks["nul"] = _submission(labels).replace("\n", "\0\n")
  for name, submission in tricks.items():
    milestones = judge_submission(task, submission)
    assert (milestones.valid, milestones.beats_constant, milestones.score) == (0, 0, 0), name


def test_targets_of_the_training_rows_are_no_answer(tasks):
  for task in tasks.train:
    copied = [row["target"] for row in _rows(task, "train.csv")]
    answers = dict(zip(task.metadata["labels"], copied, strict=False))
    milestones = judge_submission(task, _submission(answers))
    assert milestones.valid == 1.0  # in form it is right
    assert milestones.beats_strong == 0.0
    assert milestones.score < 0.2


def _world(work, **settings):
  registry = build_tools(ToolsConfig(names=()))
  world = MleWorld(MleWorldConfig(**settings), Site(registry, max_turns=4, tool_timeout=30.0))

  async def run():
    try:
      return await work(world)
    finally:
      await world.close()
      await registry.close()

  return asyncio.run(run())


def test_a_worked_solution_of_each_kind_reaches_every_milestone(tasks):
  async def work(world):
    everything = RewardConfig(parts=tuple(world.scorers), weights=(1.0,) * len(world.scorers))
    rewards = build_rewards(everything, {**SCORERS, **world.scorers})
    scored = []
    for task in tasks.train[:3]:
      scored.append(await play_turns(task, task.demonstration, world.environment))
      await rewards.score(scored[-1], task)
    return scored

  for trajectory in _world(work):
    assert {n: r.value for n, r in trajectory.reward_parts.items()} == {
      f"mle_{f.name}": 1.0 for f in dataclasses.fields(Milestones)
    }
    assert trajectory.tools[0].status == "ok"


@pytest.mark.slow
def test_the_worked_solutions_of_many_data_sets_reach_the_strong_answer():
  tasks = mle_tasks(MleTaskConfig(), train_size=60, test_size=0, seed=3, secret=SECRET).train

  async def work(world):
    rewards = build_rewards(RewardConfig(parts=("mle_beats_strong",)), dict(world.scorers))
    return await check_environment(
      tasks, make_environment=world.environment, rewards=rewards, cheats=lambda task: {}
    )

  results = _world(work)
  assert [r for r in results if not r.held] == []


def test_a_folder_of_csv_files_is_a_source(tmp_path, tasks):
  task = tasks.train[1]
  folder = tmp_path / "train" / "flowers"
  folder.mkdir(parents=True)
  for name, text in task.metadata["files"].items():
    (folder / name).write_text(text)
  (folder / "labels.csv").write_text(_submission(task.metadata["labels"]))
  about = {"description": "Flowers.", "metric": "accuracy", "strong": 0.9}
  (folder / "task.json").write_text(json.dumps(about))
  source = MleTaskConfig()
  config = DataConfig(source=source, path=str(tmp_path), train_size=None, test_size=None)
  (read,) = load_tasks(config).train
  assert read.metadata["labels"] == task.metadata["labels"]
  assert read.metadata["constant"] == task.metadata["constant"]
  assert read.prompt[0].content.startswith("Flowers.\n")
  (folder / "task.json").write_text(json.dumps(about | {"strong": 0.1}))
  with pytest.raises(DataError, match="is no better than the constant"):
    read_mle_folder(tmp_path)
  (folder / "labels.csv").unlink()
  with pytest.raises(DataError, match="labels.csv: cannot be read"):
    read_mle_folder(tmp_path)
  with pytest.raises(DataError, match="no folder train/"):
    read_mle_folder(tmp_path / "none")


def test_a_python_tool_of_the_run_is_in_the_way():
  class Python:
    name, description = "python", ""
    parameters = {"type": "object", "properties": {}}

  with pytest.raises(ConfigError, match="take it out of config.tools.names"):
    MleWorld(MleWorldConfig(), Site(ToolRegistry([Python()])))


def test_settings_that_cannot_be_are_refused():
  assert KINDS == MleTaskConfig().kinds
  for settings, field in (({"noise": 0.5}, "noise"), ({"train_rows": 3}, "train_rows")):
    with pytest.raises(ConfigError, match=f"config.world.tasks.{field}="):
      MleTaskConfig(**settings).validate()
