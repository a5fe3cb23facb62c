"""Who holds a directory, what a resumed run may have otherwise, and what damage does to a run."""

import json
import shutil

import pytest

from agentjax.config import ConfigError
from agentjax.training import Extensions, Run, TrainingError
from agentjax.training.extended import Extended, describe
from agentjax.training.journal import Journal, StepRecord, read_journal
from agentjax.training.learner import Learner
from agentjax.training.metrics import read_metrics
from agentjax.training.nonfinite import broken_update
from agentjax.training.workdir import keep_settings, open_workdir
from tests.training.figures import without_times
from tests.training.smoke import quiet, smoke_experiment


def rows(directory):
  return without_times(read_metrics(directory / "metrics.jsonl"))


def fingerprints(directory):
  records = read_journal(directory / "journal.log")
  return {record.step: record.fingerprint for kind, record in records if kind == "step"}


def begin(directory, experiment, *, steps=0, extensions=None):
  """What a run of so many steps leaves of itself."""
  description = describe(Extended(extensions or Extensions()))
  with open_workdir(directory, experiment, description):
    journal = Journal(directory / "journal.log")
    for step in range(1, steps + 1):
      journal.finish_step(StepRecord(step, "supervised", (), f"hash{step}"))
    journal.close()


def test_a_start_that_finished_no_step_does_not_claim_its_directory(tmp_path):
  directory = tmp_path / "run"
  begin(directory, smoke_experiment(seed=1))
  (directory / "samples_before.txt").write_text("of seed 1")
  begin(directory, smoke_experiment(seed=1))
  assert (directory / "samples_before.txt").exists()  # the same run goes on
  begin(directory, smoke_experiment(seed=2))
  assert json.loads((directory / "config.json").read_text())["seed"] == 2
  assert not (directory / "samples_before.txt").exists()
  assert (directory / "abandoned" / "samples_before.txt").read_text() == "of seed 1"
  begin(directory, smoke_experiment(seed=2), extensions=Extensions(make_environment=lambda t: t))
  assert "make_environment" in (directory / "extensions.json").read_text()
  begin(directory, smoke_experiment(seed=3), steps=1)
  with pytest.raises(ConfigError, match=r"config\.seed is 4 .* 3"):
    begin(directory, smoke_experiment(seed=4))


def test_a_refused_start_leaves_nothing(tmp_path):
  experiment = smoke_experiment()
  for made in (False, True):
    if made:
      (tmp_path / "run").mkdir()
    with pytest.raises(KeyError):
      with open_workdir(tmp_path / "run", experiment):
        Journal(tmp_path / "run" / "journal.log").close()
        raise KeyError
    assert (tmp_path / "run").exists() == made
  assert not list((tmp_path / "run").iterdir())


def test_what_changes_no_mathematics_may_change_on_resume(tmp_path):
  begin(tmp_path, smoke_experiment(), steps=4)
  other = smoke_experiment(name="longer")
  other.rl.steps = 30
  other.evaluation.tasks = 0
  other.checkpoint.every = 7
  other.mesh.data = 2
  other.engine.lanes = 2
  with open_workdir(tmp_path, other):
    keep_settings(tmp_path, other, {})
  assert json.loads((tmp_path / "config.json").read_text())["rl"]["steps"] == 30
  other = smoke_experiment()
  other.rl.steps = 1
  with pytest.raises(
    ConfigError, match=r"config\.rl\.steps=1; allowed: at least 2, which this run"
  ):
    begin(tmp_path, other)
  other.rl.optimizer.learning_rate = 0.5
  other.rl.tasks_per_step = 4
  with pytest.raises(ConfigError) as refused:
    begin(tmp_path, other)
  assert "learning_rate is 0.5 here and 0.01 there" in str(refused.value)
  assert "tasks_per_step is 4 here and 2 there" in str(refused.value)
  assert "may change: name, rl.steps" in str(refused.value)


def test_a_longer_schedule_is_told(tmp_path, caplog):
  experiment = smoke_experiment()
  experiment.rl.optimizer.schedule = "cosine"
  begin(tmp_path, experiment, steps=3)
  experiment.rl.steps = 9
  begin(tmp_path, experiment)
  assert "config.rl.steps is 9 here and was 3" in caplog.text


@pytest.fixture
def copy(finished_run, tmp_path):
  """A copy of the finished run's directory."""
  shutil.copytree(finished_run[0], tmp_path / "copy")
  return tmp_path / "copy"


@pytest.mark.slow
def test_a_damaged_checkpoint_and_journal_are_told_and_the_bits_are_the_same(
  finished_run, copy, caplog
):
  straight, *_ = finished_run
  weights = max((copy / "checkpoints/5/networks").rglob("d/*"), key=lambda p: p.stat().st_size)
  data = bytearray(weights.read_bytes())
  data[len(data) // 2] ^= 4
  weights.write_bytes(bytes(data))
  journal = bytearray((copy / "journal.log").read_bytes())
  journal[20] ^= 4  # the first record's head: step 1
  (copy / "journal.log").write_bytes(bytes(journal))
  report = Run(smoke_experiment(), copy, console=quiet()).train()
  assert report.finished and rows(copy) == rows(straight)
  expected = fingerprints(straight)
  del expected[1]
  assert fingerprints(copy) == expected
  assert (copy / "checkpoints" / "damaged-5").is_dir() and (copy / "checkpoints" / "5").is_dir()
  assert "checkpoints/5 is damaged" in caplog.text
  assert "has lost records of step 1:" in caplog.text
  assert "kept as journal.log.damaged" in caplog.text
  assert Run(smoke_experiment(), copy, console=quiet()).replay(5).identical
  with pytest.raises(ConfigError, match=r"replay_step=2 begins after step 0.*records of step 1;"):
    Run(smoke_experiment(), copy, console=quiet()).replay(2)


@pytest.mark.slow
def test_a_finished_run_goes_on_for_more_steps_as_a_longer_one(copy, tmp_path):
  longer = smoke_experiment()
  longer.rl.steps = 4
  report = Run(longer, copy, console=quiet()).train()
  assert report.finished and report.steps == 6
  again = smoke_experiment()
  again.rl.steps = 4
  Run(again, tmp_path / "straight", console=quiet()).train()
  assert fingerprints(copy) == fingerprints(tmp_path / "straight")


def test_an_update_that_is_not_finite_stops_the_run_and_saves_nothing(tmp_path, monkeypatch):
  step = Learner.supervised_step

  def broken(self, state, tasks):
    state, values = step(self, state, tasks)
    return state, values | {"update_norm": float("nan")}

  monkeypatch.setattr(Learner, "supervised_step", broken)
  with pytest.raises(TrainingError, match=r"step 1: update_norm=nan.*checkpoints: \[0\]"):
    Run(smoke_experiment(), tmp_path / "run", console=quiet()).train()
  assert not fingerprints(tmp_path / "run")
  assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["0"]


def test_the_norm_that_broke_is_named():
  fine = {"update_norm": 1.0, "process/update_norm": 0.0, "grad_norm": float("inf")}
  assert broken_update(fine) == ""
  assert broken_update(fine | {"process/update_norm": float("inf")}) == "process/update_norm=inf"
