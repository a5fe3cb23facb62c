"""Stages that build on each other: their order, what is done again, what is refused."""

import json
import shutil

import jax
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.training import Experiment, HeldOutConfig
from agentjax.training.checkpoint import latest_checkpoint, load_whole_policy
from agentjax.training.stage_graph import (
  Stage,
  StageGraph,
  begun_from,
  load_stages,
  needed_for,
  order_stages,
)
from tests.training.smoke import quiet, smoke_experiment


def nothing(done, folder):
  """Leaves an empty folder."""


def stage(name, *after, work=nothing):
  return Stage(name, work=work, after=after)


def done_with(stages, workdir, **settings):
  return StageGraph(order_stages(stages), workdir, settings, quiet()).run()


def test_stages_come_behind_those_they_name_and_otherwise_as_given():
  stages = [stage("d", "b", "c"), stage("c", "a"), stage("b", "a"), stage("a"), stage("e")]
  assert [s.name for s in order_stages(stages)] == ["a", "c", "b", "d", "e"]


@pytest.mark.parametrize(
  "stages, said",
  [
    ([stage("a", "b"), stage("b", "a")], "wait for each other: .*a"),
    ([stage("a", "a")], "wait for each other"),
    ([stage("a"), stage("a")], "different names"),
    ([stage("a", "z")], r"'a' comes after \['z'\]; allowed: a"),
  ],
)
def test_wrong_graphs_are_refused(stages, said):
  with pytest.raises(ConfigError, match=said):
    order_stages(stages)


def test_wrong_stages_are_refused():
  with pytest.raises(ConfigError, match="either an experiment or work"):
    Stage("a")
  with pytest.raises(ConfigError, match="either an experiment or work"):
    Stage("a", experiment=lambda done: smoke_experiment(), work=nothing)
  with pytest.raises(ConfigError, match="identifier"):
    stage("../a")


def test_only_what_is_needed():
  stages = order_stages([stage("a"), stage("b", "a"), stage("c", "b"), stage("d", "a")])
  assert [s.name for s in needed_for(stages, ["c"])] == ["a", "b", "c"]
  with pytest.raises(ConfigError, match=r"--until has \['z'\]; allowed: a, b, c, d"):
    needed_for(stages, ["z"])


@pytest.mark.parametrize(
  "text, said",
  [
    ("def get_stages(): return (1,)", "has 1; allowed: Stage"),
    ("x = 1", "defines no get_stages"),
    ("def get_stages(): raise OSError('no disk')", "fails: OSError: no disk"),
  ],
)
def test_wrong_files_are_refused(tmp_path, text, said):
  file = tmp_path / "stages.py"
  file.write_text(text)
  with pytest.raises(ConfigError, match=said):
    load_stages(file)
  with pytest.raises(ConfigError, match=r"allowed: a \.py file"):
    load_stages(tmp_path / "none.py")


def chain(calls, fail=()):
  """a, then b and c, each of which writes what it has read."""

  def work(name):
    def done(folders, folder):
      calls.append(name)
      (folder / "half").write_text("")
      if name in fail:
        raise OSError(f"{name} was stopped")
      read = sorted((folders[n] / "words").read_text() for n in folders)
      (folder / "words").write_text(name + "".join(read))

    return done

  return [
    stage("a", work=work("a")),
    stage("b", "a", work=work("b")),
    stage("c", "a", "b", work=work("c")),
  ]


def test_work_that_was_stopped_is_begun_again_and_finished_work_is_not(tmp_path):
  calls = []
  with pytest.raises(OSError, match="b was stopped"):
    done_with(chain(calls, fail=("b",)), tmp_path)
  assert not (tmp_path / "b").exists()  # nothing half-made
  assert done_with(chain(calls), tmp_path)
  assert calls == ["a", "b", "b", "c"]
  assert (tmp_path / "c" / "words").read_text() == "caba"
  assert done_with(chain(calls), tmp_path) and len(calls) == 4
  assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_killed_between_work_and_note_it_is_not_done_twice(tmp_path):
  calls = []
  done_with(chain(calls), tmp_path)
  file = tmp_path / "stages.json"
  state = json.loads(file.read_text())
  state["c"]["finished"] = False
  file.write_text(json.dumps(state))
  assert done_with(chain(calls), tmp_path)
  assert calls == ["a", "b", "c"]
  assert json.loads(file.read_text())["c"]["finished"]


def test_removed_stage_is_done_again(tmp_path):
  calls = []
  done_with(chain(calls), tmp_path)
  shutil.rmtree(tmp_path / "b")
  done_with(chain(calls), tmp_path)
  assert calls == ["a", "b", "c", "b"]


def test_settings_of_no_stage_are_refused(tmp_path):
  with pytest.raises(ConfigError, match="--set=z"):
    done_with([stage("a")], tmp_path, z=[("rl.steps", "1")])
  with pytest.raises(ConfigError, match="--set=a"):
    done_with([stage("a")], tmp_path, a=[("rl.steps", "1")])


class FakeRun:
  """Counts what would be trained; the first time it is interrupted where asked."""

  trained: list[tuple[str, int]] = []
  interrupted: set[str] = set()

  def __init__(self, experiment, folder, console):
    self.experiment, self.finished = experiment, True
    self.folder = folder

  def train(self):
    name = self.folder.name
    self.folder.mkdir(parents=True, exist_ok=True)
    self.trained.append((name, self.experiment.rl.steps))
    self.finished = name not in self.interrupted
    self.interrupted.discard(name)
    return self


@pytest.fixture
def fake(monkeypatch):
  monkeypatch.setattr("agentjax.training.stage_graph.Run", FakeRun)
  FakeRun.trained, FakeRun.interrupted = [], set()
  return FakeRun


def trained(name, *after, steps=3) -> Stage:
  def make(done) -> Experiment:
    experiment = smoke_experiment()
    experiment.rl.steps = steps
    if done:
      experiment.start_from = str(next(iter(done.values())))
    return experiment

  return Stage(name, make, after=after)


def test_interrupted_stage_stops_the_graph_and_goes_on(tmp_path, fake):
  fake.interrupted = {"b"}
  stages = [trained("a"), trained("b", "a"), trained("c", "b")]
  assert not done_with(stages, tmp_path)
  assert done_with(stages, tmp_path)
  assert [name for name, _ in fake.trained] == ["a", "b", "b", "c"]


def test_folder_may_be_moved(tmp_path, fake):
  stages = [trained("a"), trained("b", "a")]
  done_with(stages, tmp_path / "old")
  (tmp_path / "old").rename(tmp_path / "new")
  assert done_with(stages, tmp_path / "new")
  assert len(fake.trained) == 2


def test_what_was_built_on_other_settings_is_refused_until_it_is_removed(tmp_path, fake):
  stages = [trained("a"), trained("b", "a")]
  done_with(stages, tmp_path)
  longer = {"a": [("rl.steps", "5")]}
  with pytest.raises(ConfigError, match="b was built on earlier settings of a; remove it"):
    done_with(stages, tmp_path, **longer)
  assert fake.trained == [("a", 3), ("b", 3), ("a", 5)]
  shutil.rmtree(tmp_path / "b")
  assert done_with(stages, tmp_path, **longer)
  assert fake.trained[-1] == ("b", 3)
  assert len(fake.trained) == 4


def test_wrong_field_of_a_stage_names_it(tmp_path, fake):
  with pytest.raises(ConfigError, match=r"a\.rl.*stepps"):
    done_with([trained("a")], tmp_path, a=[("rl.stepps", "5")])


@pytest.mark.slow
def test_two_stages_begin_from_one_and_both_from_its_networks(tmp_path):
  def warm(done):
    experiment = smoke_experiment(evaluation=HeldOutConfig(tasks=0))
    experiment.rl.steps = 0
    experiment.tokenizer.kind, experiment.tokenizer.vocab_size = "sentencepiece_from_tasks", 400
    return experiment

  def still(done):
    experiment = begun_from(
      smoke_experiment(evaluation=HeldOutConfig(tasks=0), seed=5), done["warm"]
    )
    experiment.supervised.steps, experiment.rl.steps = 0, 1
    experiment.rl.optimizer.learning_rate = 1e-30
    experiment.rl.router_bias_rate = 0.0
    return experiment

  stages = [Stage("warm", warm), *(Stage(name, still, after=("warm",)) for name in "bc")]
  assert done_with(stages, tmp_path)
  policies = [
    jax.tree.leaves(load_whole_policy(latest_checkpoint(tmp_path / name)))
    for name in ("warm", "b", "c")
  ]
  for one in policies[1:]:
    for left, right in zip(policies[0], one, strict=True):
      np.testing.assert_array_equal(left, right)
