"""DMax in runs: both stages, the commands, and settings that do not fit."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from agentjax.config import ConfigError
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.objectives import preset
from agentjax.recipes.dmax import DecodingConfig, DMaxConfig
from agentjax.recipes.dmax.measure import measure
from agentjax.rollout import RolloutConfig
from agentjax.training import OptimizerConfig, RLStage, Run, load_experiment
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.metrics import read_metrics
from tests.training.smoke import quiet

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def small(**changes):
  experiment = load_experiment(CONFIGS / "dmax_running_sums.py")
  experiment.model = ModelConfig(
    vocab_size=265,
    d_model=16,
    pattern="*-",
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    d_mlp=16,
  )
  experiment.data.train_size, experiment.data.test_size = 64, 4
  experiment.engine = EngineConfig(slots=8, max_length=96)
  experiment.evaluation.tasks = 4
  experiment.supervised.steps, experiment.supervised.tasks_per_step = 2, 4
  experiment.supervised.microbatch_rows = 4
  experiment.checkpoint = CheckpointConfig(every=2)
  return dataclasses.replace(experiment, **changes)


def reinforced(experiment, **changes):
  experiment.rl = RLStage(
    steps=1,
    tasks_per_step=2,
    row_length=96,
    microbatch_rows=4,
    minibatches=2,
    old_log_probs="recomputed",
    objective=preset("grpo"),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    **changes,
  )
  experiment.rollout = RolloutConfig(
    group_size=2, max_turns=1, max_tokens_per_turn=24, max_total_tokens=96
  )
  return experiment


def test_a_run_learns_and_is_decoded_in_several_ways(tmp_path):
  report = Run(reinforced(small()), tmp_path, console=quiet()).train()
  assert report.finished
  rows = read_metrics(tmp_path / "metrics.jsonl")
  assert 5 < rows[0]["nll"] < 9  # nothing is known yet: about log 265 a token and a fill
  (reinforcement,) = (row for row in rows if "reward/mean" in row)
  assert not any(name.startswith("mismatch/") for name in reinforcement)
  ways = [DecodingConfig("threshold", 1e-6), DecodingConfig("soft", 1.0)]
  found = measure(small(), tmp_path, ways, samples_file=tmp_path / "samples.txt")
  fast, greedy = (one.stats for one in found)
  assert greedy.tokens_per_decision == 1
  assert fast.tokens_per_decision > 2
  assert fast.tokens_per_forward < fast.tokens_per_decision
  assert (tmp_path / "samples.txt").stat().st_size


@pytest.mark.slow
def test_the_command_compares_ways_to_decode(tmp_path):
  assert Run(small(), tmp_path / "run", console=quiet()).train().finished
  command = [sys.executable, "-m", "agentjax.recipes.dmax.decode", "--checkpoint=run"]
  ways = ["--config=run/config.json", "--modes=threshold", "--thresholds=1e-6,1"]
  done = subprocess.run(
    [*command, *ways, "--output=found.json"],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  fast, greedy = json.loads((tmp_path / "found.json").read_text())
  assert (fast["threshold"], greedy["threshold"]) == (1e-6, 1.0)
  assert fast["tokens_per_decision"] > greedy["tokens_per_decision"] == 1
  for one in (fast, greedy):
    assert one["tokens_per_forward"] == one["tokens"] / (one["forwards"] + one["commits"])


def test_old_and_new_log_probs_are_of_one_mask(tmp_path):
  """Before the first update the ratio is 1: nothing is clipped, and KL to the reference is 0."""
  experiment = reinforced(small())
  experiment.rl.minibatches = 1
  Run(experiment, tmp_path, console=quiet()).train()
  (row,) = (r for r in read_metrics(tmp_path / "metrics.jsonl") if "reward/mean" in r)
  assert row["policy/kl_old"] == pytest.approx(0, abs=1e-5)
  assert row["policy/kl_reference"] == pytest.approx(0, abs=1e-5)
  assert row["policy/clip_fraction"] == 0


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda e: setattr(e.model, "pattern", "M*-"), r"pattern='M\*-'"),
    (lambda e: setattr(e.model, "vocab_size", 264), r"config\.model\.vocab_size=264"),
    (lambda e: setattr(e.supervised, "row_length", 60), r"config\.supervised\.row_length=60"),
    (lambda e: setattr(e.engine, "max_length", 100), r"config\.engine\.max_length=100"),
    (lambda e: setattr(e.engine, "lanes", 2), r"config\.engine\.lanes=2"),
    (lambda e: setattr(e.rl, "old_log_probs", "behaviour"), r"config\.rl\.old_log_probs"),
    (lambda e: setattr(e.rollout, "max_turns", 3), r"config\.rollout\.max_turns=3"),
    (lambda e: setattr(e.likelihood.decoding, "threshold", 0.0), r"threshold=0"),
  ],
)
def test_settings_that_do_not_fit_stop_before_anything_is_built(change, message, tmp_path):
  experiment = reinforced(small())
  change(experiment)
  with pytest.raises(ConfigError, match=message):
    Run(experiment, tmp_path, console=quiet()).train()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("dmax_*.py")), ids=lambda p: p.stem)
def test_a_config_is_valid(path):
  experiment = load_experiment(path)
  if experiment.data.source.reads_path:
    experiment.data.path = "texts"
  experiment.validate()
  assert isinstance(experiment.likelihood, DMaxConfig)


def test_settings_are_saved_and_read_again():
  settings = DMaxConfig(block=8, decoding=DecodingConfig(mode="threshold"))
  text = json.dumps(settings.to_short_dict(None))
  assert "agentjax.recipes.dmax" in text
  assert type(settings).from_dict(json.loads(text)) == settings
