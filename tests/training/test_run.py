"""A run from its start to its report; resumed, replayed, refused where it must be."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import AdvantageConfig
from agentjax.training import Extensions, Run, TrainingError
from agentjax.training.evaluation import evaluate_checkpoint
from agentjax.training.journal import read_journal
from agentjax.training.metrics import read_metrics
from tests.training.figures import without_times
from tests.training.smoke import quiet, smoke_experiment

_ROOT = pathlib.Path(__file__).parents[2]
_STEPS = 5


def _rows(directory):
  return without_times(read_metrics(directory / "metrics.jsonl"))


def _fingerprints(directory):
  return {
    r.step: r.fingerprint for kind, r in read_journal(directory / "journal.log") if kind == "step"
  }


def test_a_run_leaves_everything_it_promises(finished_run):
  directory, report, text = finished_run
  assert report.finished and report.steps == _STEPS
  assert set(report.before) == set(report.after) and "greedy" in report.after
  for name in (
    "config.json",
    "journal.log",
    "metrics.jsonl",
    "rewards.png",
    "samples_after.txt",
    "report.json",
    f"checkpoints/{_STEPS}",
    "tensorboard",
  ):
    assert (directory / name).exists(), name
  assert "held-out tasks" in text and "before RL" in text and "pass@2" in text
  stages = [(r["step"], r["stage"]) for r in _rows(directory)]
  assert stages == [(1, "supervised"), (2, "supervised"), (3, "rl"), (4, "rl"), (5, "rl")]


def test_rows_hold_learning_rate_memory_and_time_by_phase(finished_run):
  directory, *_ = finished_run
  every = read_metrics(directory / "metrics.jsonl")
  assert [row["learning_rate"] for row in every] == [1e-3, 1e-3, 1e-2, 1e-2, 1e-2]
  for row in every:
    phases = ("step", "update", "evaluation", "compilation", "publish", "save")
    seconds = {name: row[f"time/{name}"] for name in phases}
    assert min(seconds.values()) >= 0 and row["memory/host_peak"] > 0
    assert seconds["update"] + seconds["evaluation"] <= seconds["step"]
    if row["stage"] == "rl":
      assert row["memory/published"] > 0 and seconds["publish"] > 0
      assert row["time/lanes"] > 0 <= row["time/lanes_idle"]
  assert every[0]["time/compilation"] > 0


def test_sampler_and_trainer_agree_at_every_step(finished_run):
  directory, *_ = finished_run
  gaps = [r["mismatch/max"] for r in _rows(directory) if r["stage"] == "rl"]
  assert len(gaps) == 3 and max(gaps) < 2e-5


def test_a_finished_run_started_again_changes_nothing(finished_run):
  directory, report, _ = finished_run
  before = _rows(directory), _fingerprints(directory)
  again = Run(smoke_experiment(), directory, console=quiet()).train()
  assert again.after == report.after and (_rows(directory), _fingerprints(directory)) == before


@pytest.mark.parametrize(
  "step", [1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, _STEPS)), _STEPS]
)
def test_every_recorded_step_replays_to_the_same_hash(finished_run, step):
  directory, *_ = finished_run

  def no_world(task):
    raise AssertionError("a replay must not act")

  own = Extensions(make_environment=no_world)
  run = Run(smoke_experiment(), directory, extensions=own, console=quiet(), allow_changes=True)
  assert run.replay(step).identical


def test_replay_of_an_unrecorded_step_names_those_there_are(finished_run):
  directory, *_ = finished_run
  with pytest.raises(ConfigError, match=r"--replay_step=9 .*recorded: 1 to 5"):
    Run(smoke_experiment(), directory, console=quiet()).replay(9)


_CHILD = """
import sys
from agentjax.training import Run
from tests.training.smoke import quiet, smoke_experiment
Run(smoke_experiment(), sys.argv[1], console=quiet()).train()
"""


def _start(directory):
  return subprocess.Popen(
    [sys.executable, "-c", _CHILD, str(directory)],
    cwd=_ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
  )


def _wait_for(child, condition, seconds=240.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert child.poll() is None, child.stderr.read().decode()[-3000:]
    assert time.monotonic() < deadline, "the child never got there"
    time.sleep(0.005)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_bits_of_an_uninterrupted_run(
  finished_run, tmp_path
):
  straight, report, _ = finished_run
  directory = tmp_path / "killed"
  rng = np.random.default_rng()
  for step in sorted(rng.choice(np.arange(1, _STEPS), size=2, replace=False).tolist()):
    child = _start(directory)
    rows = directory / "metrics.jsonl"
    _wait_for(child, lambda: len(read_metrics(rows)) >= step)  # noqa: B023
    time.sleep(float(rng.uniform(0.0, 0.3)))
    child.send_signal(signal.SIGKILL)
    child.wait()
  resumed = Run(smoke_experiment(), directory, console=quiet()).train()
  assert _rows(directory) == _rows(straight)
  assert _fingerprints(directory) == _fingerprints(straight)
  assert resumed.after == report.after


@pytest.mark.slow
def test_killed_in_the_middle_of_a_rollout_it_keeps_the_episodes_that_were_finished(
  finished_run, tmp_path
):
  straight, *_ = finished_run
  directory = tmp_path / "killed"
  child = _start(directory)

  def partly() -> bool:
    if not (directory / "journal.log").exists():
      return False
    kinds = [kind for kind, _ in read_journal(directory / "journal.log")]
    return "trajectory" in kinds and kinds[-1] == "trajectory"

  _wait_for(child, partly)
  child.send_signal(signal.SIGKILL)
  child.wait()
  Run(smoke_experiment(), directory, console=quiet()).train()
  assert _rows(directory) == _rows(straight)
  addresses = [t.address for k, t in read_journal(directory / "journal.log") if k == "trajectory"]
  assert len(addresses) == len(set(addresses)) == 12


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(finished_run, tmp_path):
  straight, *_ = finished_run
  directory = tmp_path / "stopped"
  child = _start(directory)
  _wait_for(child, lambda: len(read_metrics(directory / "metrics.jsonl")) >= 3)
  child.send_signal(signal.SIGTERM)
  assert child.wait(timeout=120) == 0
  assert len(_rows(directory)) < _STEPS
  Run(smoke_experiment(), directory, console=quiet()).train()
  assert _rows(directory) == _rows(straight)


def test_a_directory_of_another_run_is_refused_by_field(finished_run):
  directory, *_ = finished_run
  other = smoke_experiment(seed=1)
  with pytest.raises(ConfigError, match=r"config\.seed is 1 .* 0"):
    Run(other, directory, console=quiet()).train()


def test_a_directory_of_other_files_is_refused_and_left_alone(tmp_path):
  (tmp_path / "thesis.tex").write_text("mine")
  with pytest.raises(ConfigError, match=r"files that are no run \(thesis\.tex\)"):
    Run(smoke_experiment(), tmp_path, console=quiet()).train()
  assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".lock") == ["thesis.tex"]


def test_a_checkpoint_is_evaluated_as_the_run_did(finished_run):
  directory, report, _ = finished_run
  measured = evaluate_checkpoint(smoke_experiment(), directory)
  assert measured.metrics()["greedy"] == report.after["greedy"]
  assert measured.metrics()["avg@2"] == report.after["avg@2"]


def test_a_checkpoint_of_another_model_is_refused(finished_run):
  directory, *_ = finished_run
  experiment = smoke_experiment()
  experiment.model.d_mlp = 32
  with pytest.raises(ConfigError, match=r"config\.model\.d_mlp is 32 .* 16"):
    evaluate_checkpoint(experiment, directory)


def test_the_saved_config_runs_again(finished_run):
  from agentjax.training.flags import load_experiment

  directory, *_ = finished_run
  assert load_experiment(str(directory / "config.json")) == smoke_experiment()
  assert json.loads((directory / "config.json").read_text())["rl"]["steps"] == 3


def test_a_prompt_longer_than_the_context_is_refused_before_anything_starts(tmp_path):
  experiment = smoke_experiment()
  experiment.rollout.max_total_tokens = 40
  with pytest.raises(ConfigError, match=r"prompt of task \d+ of 'word_problems' has \d+ tokens"):
    Run(experiment, tmp_path / "run", console=quiet()).train()
  assert not (tmp_path / "run").exists()


def test_a_demonstration_longer_than_a_row_is_refused_before_anything_starts(tmp_path):
  experiment = smoke_experiment()
  experiment.supervised.steps, experiment.supervised.row_length = 1, 64
  said = r"supervised\.row_length=64: \d+ of \d+ demonstrations .* allowed: at least \d+"
  with pytest.raises(ConfigError, match=said):
    Run(experiment, tmp_path / "run", console=quiet()).train()
  assert not (tmp_path / "run").exists()


def test_pages_that_cannot_hold_an_episode_are_refused_by_their_name(tmp_path):
  experiment = smoke_experiment()
  experiment.engine.block_tokens = experiment.engine.cache_tokens = 16
  said = r"config\.engine\.cache_tokens=16: a lane holds a context of 16 tokens"
  with pytest.raises(ConfigError, match=said):
    Run(experiment, tmp_path / "run", console=quiet()).train()


@pytest.mark.slow
def test_gradients_that_stay_non_finite_stop_the_run_and_change_nothing(tmp_path, finished_run):
  straight, *_ = finished_run
  experiment = smoke_experiment()
  experiment.rl.optimizer.max_bad_steps = 2

  def broken(inputs):
    return jnp.sum(inputs.coefficients * inputs.log_probs) * jnp.nan, {}

  with pytest.raises(TrainingError, match=r"step 4: 2 updates in a row had non-finite gradients"):
    Run(experiment, tmp_path / "run", objective=broken, console=quiet()).train()
  fingerprints = _fingerprints(tmp_path / "run")
  assert fingerprints[2] == _fingerprints(straight)[2] == fingerprints[3]


@pytest.mark.slow
def test_a_run_can_start_from_the_networks_of_another(finished_run, tmp_path):
  directory, *_ = finished_run
  experiment = smoke_experiment(start_from=str(directory))
  experiment.supervised.steps = 0
  experiment.rl.steps = 1
  # The byte tokenizer is the same for both runs; a trained one would have to be given by path.
  report = Run(experiment, tmp_path / "run", console=quiet()).train()
  before = finished_run[1].after
  assert report.before["greedy/rollout/sampled_tokens"] == before["greedy/rollout/sampled_tokens"]
  replayed = Run(experiment, tmp_path / "run", console=quiet()).replay(1)
  assert replayed.identical


@pytest.mark.slow
def test_ppo_with_a_value_head_minibatches_and_a_reference_trains_and_replays(tmp_path):
  experiment = smoke_experiment()
  experiment.supervised.steps = 0
  experiment.rl.steps = 2
  experiment.rl.minibatches = 2
  experiment.rl.epochs = 2
  experiment.rl.old_log_probs = "recomputed"
  experiment.rl.objective.advantage = AdvantageConfig(centre="none", scale="none", credit="gae")
  experiment.rl.objective.policy_loss.kl_coefficient = 0.01
  experiment.evaluation.tasks = 0
  directory = tmp_path / "run"
  Run(experiment, directory, console=quiet()).train()
  rows = _rows(directory)
  assert all(np.isfinite(r["policy/value_loss"]) for r in rows)
  assert rows[0]["policy/kl_reference"] >= 0 and rows[1]["policy/kl_reference"] > 0
  again = Run(experiment, directory, console=quiet())
  assert again.replay(2).identical
  with again._session() as session:
    state, step = session._restore()
    assert int(state.step) == step == 2  # of eight updates


@pytest.mark.slow
def test_the_command_line_evaluates_and_replays(finished_run, tmp_path):
  directory, report, _ = finished_run
  config = f"--config={directory / 'config.json'}"

  def command(module, *flags):
    return subprocess.run(
      [sys.executable, "-m", f"agentjax.{module}", config, *flags],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=600,
    )

  output = tmp_path / "report.json"
  evaluated = command("evaluate", f"--checkpoint={directory}", f"--output={output}")
  assert evaluated.returncode == 0 and "pass@2" in evaluated.stdout, evaluated.stderr
  assert "tool calls" in evaluated.stdout
  assert json.loads(output.read_text())["overall"]["greedy"]["mean"] == report.after["greedy"]
  replayed = command("train", f"--workdir={directory}", "--replay_step=4")
  assert replayed.returncode == 0 and "identical" in replayed.stdout, replayed.stderr
