"""Stored episodes with a teacher's word on them: written once, trained on without the teacher."""

import asyncio
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.files import CheckpointError
from agentjax.objectives import preset
from agentjax.recipes.lightning_opd.precompute import precompute
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.teacher import TeacherConfig
from agentjax.training import HeldOutConfig, OptimizerConfig, Run
from agentjax.training.build import Extensions, build_parts
from agentjax.training.checkpoint import CheckpointConfig, load_whole_policy
from agentjax.training.experiment import PhaseConfig, resolve
from agentjax.training.extended import Extended, describe, write_description
from agentjax.training.metrics import read_metrics
from agentjax.training.stored import (
  StoredGroups,
  read_episodes,
  read_manifest,
  warn_of_other_policy,
)
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.store import StoreWriter
from tests.training.smoke import quiet
from tests.training.stages import extensions, staged_experiment
from tests.training.teachers import MODEL, WIDER, episodes, save_policy

_ROOT = pathlib.Path(__file__).parents[3]


def experiment(**stage):
  made = staged_experiment(ScheduleConfig())
  made.model = dataclasses.replace(MODEL)
  made.engine.warmup = False  # nothing is sampled
  made.rollout.group_size = 1
  made.evaluation = HeldOutConfig(tasks=0)
  made.checkpoint = CheckpointConfig(every=2)
  made.rl = dataclasses.replace(
    made.rl,
    steps=4,
    tasks_per_step=2,
    objective=preset("lightning_opd"),
    old_log_probs="recomputed",
    mismatch_alarm=50.0,
    optimizer=OptimizerConfig(learning_rate=3e-3),
    **stage,
  )
  return made


def _precomputed(root, objective):
  """(folder of stored episodes, checkpoint of the student), its manifest; the teacher is gone."""
  save_policy(root / "teacher", WIDER, seed=1)
  save_policy(root / "student", MODEL, seed=0)
  with StoreWriter(root / "played") as writer:
    for trajectory in episodes(step=0, group=1):
      writer.append_trajectory(trajectory)
  config = experiment(teachers=(TeacherConfig(str(root / "teacher")),))
  config.rl.objective = objective
  manifest, _ = precompute(
    config, root / "student", root / "stored", episodes=root / "played", extensions=extensions()
  )
  shutil.rmtree(root / "teacher")
  return (root / "stored", root / "student"), manifest


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  made, manifest = _precomputed(tmp_path_factory.mktemp("lightning"), preset("lightning_opd"))
  assert manifest == read_manifest(made[0]) and manifest.episodes == 4
  return made


@pytest.fixture(scope="module")
def candidates(tmp_path_factory):
  """With the log-probs of 4 candidates a token, of the student's likeliest."""
  made, manifest = _precomputed(tmp_path_factory.mktemp("candidates"), top_k(4))
  assert (manifest.top_k, manifest.candidates) == (4, "student")
  return made


def top_k(k, **changes):
  objective = preset("lightning_opd_top_k")
  objective.distillation = dataclasses.replace(objective.distillation, top_k=k, **changes)
  return objective


def lightning(stored, **changes):
  folder, student = stored
  made = experiment(rollouts=str(folder))
  made.start_from = str(student)
  for name, value in changes.items():
    setattr(made, name, value)
  return made


def test_every_token_is_stored_with_what_the_teacher_thinks_of_it(stored):
  before, after = episodes(step=0, group=1), read_episodes(stored[0])
  for plain, scored in zip(before, after, strict=True):
    for ours, theirs in zip(plain.segments, scored.segments, strict=True):
      np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
      assert theirs.columns["teacher_log_probs"].shape == theirs.token_ids.shape
      assert (theirs.columns["teacher_log_probs"][theirs.sampled] < 0).all()


def test_a_run_without_teacher_and_sampler_moves_the_student_to_the_teacher(stored, tmp_path):
  run = Run(lightning(stored), tmp_path / "run", extensions=extensions(), console=quiet())
  assert run.train().finished
  assert run.replay(3).identical
  # What the teacher likes better than the student did has gained, and the other way round.
  paths = [token_paths(t)[0] for t in read_episodes(stored[0])]
  before, after = (
    models.score_responses(
      load_whole_policy(path / "checkpoints" / step),
      MODEL,
      [p.token_ids[:1] for p in paths],
      [p.token_ids[1:] for p in paths],
    )
    for path, step in ((stored[1], "0"), (tmp_path / "run", "4"))
  )
  drawn = np.concatenate([p.sampled[1:] for p in paths])
  old, new = (np.concatenate([s.log_probs for s in scores])[drawn] for scores in (before, after))
  teacher = np.concatenate([p.columns["teacher_log_probs"][1:] for p in paths])[drawn]
  assert np.corrcoef(new - old, teacher - old)[0, 1] > 0.3

  # The first step learns from what the two policies themselves say of its own episodes.
  parts = build_parts(resolve(lightning(stored)), tmp_path, extensions())
  step = asyncio.run(StoredGroups(read_episodes(stored[0]), parts, first=1).take(1, 2))
  assert 0 < len(step) < len(paths)
  first = [token_paths(t)[0] for t in step]
  drawn = np.concatenate([p.sampled[1:] for p in first])
  by_student, by_teacher = (
    np.concatenate([
      s.log_probs
      for s in models.score_responses(
        policy, model, [p.token_ids[:1] for p in first], [p.token_ids[1:] for p in first]
      )
    ])[drawn]
    for policy, model in (
      (load_whole_policy(stored[1] / "checkpoints/0"), MODEL),
      (models.init(dataclasses.replace(WIDER, init_scale=3.0), jax.random.key(1)), WIDER),
    )
  )  # fmt: skip
  stored_word = np.concatenate([p.columns["teacher_log_probs"][1:] for p in first])[drawn]
  np.testing.assert_allclose(stored_word, by_teacher, atol=1e-4)
  metrics = read_metrics(tmp_path / "run/metrics.jsonl")
  assert metrics[0]["distillation/advantage"] == pytest.approx(
    np.mean(by_teacher - by_student), abs=1e-4
  )


@pytest.mark.slow
def test_candidates_are_learnt_from_without_the_teacher(candidates, tmp_path):
  config = lightning(candidates)
  config.rl = dataclasses.replace(config.rl, objective=top_k(4), old_log_probs="behaviour")
  run = Run(config, tmp_path / "run", extensions=extensions(), console=quiet())
  assert run.train().finished
  assert run.replay(3).identical
  rows = read_metrics(tmp_path / "run/metrics.jsonl")
  found = [row["policy/divergence"] for row in rows]
  # Two steps an epoch: every pair of them has seen all episodes.
  assert sum(found[2:]) < sum(found[:2]) - 0.05
  assert rows[-1]["mismatch/kl"] != 0


@pytest.mark.parametrize(
  ("has", "objective", "message"),
  [
    ("candidates", top_k(8), "student's 4 likeliest tokens and .* for .* student's 8 likeliest"),
    ("candidates", top_k(4, candidates="teacher"), "asks for .* the teacher's 4 likeliest"),
    ("candidates", preset("lightning_opd"), "student's 4 likeliest .* log-probs of the sampled"),
    ("stored", top_k(4), "log-probs of the sampled tokens and .* asks for .* 4 likeliest"),
  ],
)
def test_what_was_not_stored_is_not_learnt_from(request, tmp_path, has, objective, message):
  config = lightning(request.getfixturevalue(has))
  config.rl.objective = objective
  with pytest.raises(ConfigError, match=message):
    Run(config, tmp_path / "run", extensions=extensions(), console=quiet()).train()


def test_what_cannot_be_stored_is_refused_before_anything_is_played(stored, tmp_path):
  made = experiment(teachers=(TeacherConfig("x"),))
  made.rl.objective = preset("opd_full")
  with pytest.raises(ConfigError, match="form='full' needs the teacher in every update; allowed"):
    precompute(made, stored[1], tmp_path / "new", extensions=extensions())
  made = experiment(teachers=(TeacherConfig("x"),), phases=(PhaseConfig(2, top_k(4)),))
  with pytest.raises(ConfigError, match=r"different things \(form sampled, top_k\); allowed"):
    precompute(made, stored[1], tmp_path / "new", extensions=extensions())


def test_a_policy_trained_in_a_world_of_its_own_plays_in_no_other(stored, tmp_path):
  shutil.copytree(stored[1], tmp_path / "student")
  own = Extended(Extensions(make_environment=lambda task: None))
  write_description(tmp_path / "student", describe(own))
  made = experiment(teachers=(TeacherConfig("x"),))
  with pytest.raises(ConfigError, match=r"extended with make_environment=.*precompute\("):
    precompute(made, tmp_path / "student", tmp_path / "new")


@pytest.mark.slow
def test_a_policy_that_left_the_stored_episodes_behind_is_stopped(stored, tmp_path):
  """At the first step above the bound, for good, and with everything that ends a run."""

  def train(name, limit):
    made = lightning(stored)
    made.rl.stop_above_kl = limit
    run = Run(made, tmp_path / name, extensions=extensions(), console=quiet())
    return run, run.train()

  def drift(name):
    return [row["mismatch/kl"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]

  assert train("free", 1e6)[1].steps == 4
  free = drift("free")
  limit = float(np.mean(sorted(free)[-2:]))  # the largest alone is above
  run, report = train("bound", limit)
  assert report.finished and report.steps == 1 + int(np.argmax(free)) < 4
  assert drift("bound") == free[: report.steps]
  assert run.train() == report and drift("bound") == free[: report.steps]
  with pytest.raises(ConfigError, match="stop_above_kl=0.1; allowed: none without config.rl.roll"):
    experiment(stop_above_kl=0.1, teachers=(TeacherConfig("x"),)).validate()


def test_every_task_comes_once_an_epoch_and_a_resume_goes_on_in_the_order(stored, tmp_path):
  parts = build_parts(resolve(lightning(stored)), tmp_path, extensions())

  def groups():
    return StoredGroups(read_episodes(stored[0]), parts, first=1)

  async def taken(stream, steps):
    return [[t.address for t in await stream.take(step, 2)] for step in steps]

  stream = groups()
  first = asyncio.run(taken(stream, (1, 2)))
  assert sorted(task for step in first for _, task, _ in step) == [0, 1, 2, 3]
  assert [step for addresses in first for step, *_ in addresses] == [1, 1, 2, 2]
  state = json.loads(json.dumps(asyncio.run(stream.get_state()).plain))
  resumed = groups()
  resumed.set_state(state)
  assert asyncio.run(taken(stream, (3, 4))) == asyncio.run(taken(resumed, (3, 4)))
  greedy = dataclasses.replace(parts.experiment.rl, tasks_per_step=5)
  more = dataclasses.replace(parts, experiment=dataclasses.replace(parts.experiment, rl=greedy))
  with pytest.raises(ConfigError, match="episodes of 4 training tasks"):
    StoredGroups(read_episodes(stored[0]), more, first=1)


def _edited(stored, tmp_path, **changes):
  folder = tmp_path / "edited"
  shutil.copytree(stored[0], folder)
  values = json.loads((folder / "manifest.json").read_text())
  (folder / "manifest.json").write_text(json.dumps(values | changes))
  return folder, stored[1]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tokenizer": "0" * 64}, "made with tokenizer 000000000000 .* the same vocabulary"),
    ({"template": "0" * 64}, "made with template 000000000000 .* system prompt"),
    ({"temperature": 0.5}, "made with temperature 0.5 .*rl.sampling.temperature"),
  ],
)
def test_episodes_of_another_tokenizer_or_template_are_refused(stored, tmp_path, changes, message):
  config = lightning(_edited(stored, tmp_path, **changes))
  with pytest.raises(ConfigError, match=message):
    Run(config, tmp_path / "run", extensions=extensions(), console=quiet()).train()


def test_a_system_prompt_changes_the_template(stored, tmp_path):
  config = lightning(stored)
  config.chat.system_prompt = "Be brief."
  with pytest.raises(ConfigError, match="made with template"):
    Run(config, tmp_path / "run", extensions=extensions(), console=quiet()).train()


def test_another_teacher_or_policy_is_warned_of(stored, tmp_path, caplog):
  edited = _edited(stored, tmp_path, demonstrations_by="a" * 32, policy="b" * 32)
  manifest = read_manifest(edited[0])
  with caplog.at_level(logging.WARNING):
    manifest.warn_of_inconsistency()
  assert "is not the model aaaaaaaaaaaa that wrote the demonstrations" in caplog.text
  same = dataclasses.replace(manifest, demonstrations_by=manifest.teachers[""])
  caplog.clear()
  same.warn_of_inconsistency()
  read_manifest(stored[0]).warn_of_inconsistency()
  assert not caplog.text
  with caplog.at_level(logging.WARNING):
    warn_of_other_policy(manifest, "c" * 32)
  assert "sampled by the policy bbbbbbbbbbbb and training starts from cccccccccccc" in caplog.text


@pytest.mark.parametrize(
  "text", ["{", "[]", "[" * 100_000, '{"format": 1, "x": 1}', '{"format": 0}']
)
def test_a_damaged_manifest_is_named(tmp_path, text):
  (tmp_path / "manifest.json").write_text(text)
  with pytest.raises(CheckpointError, match="manifest.json (is damaged|has another format)"):
    read_manifest(tmp_path)


def test_what_is_no_folder_of_episodes_is_named(stored, tmp_path):
  with pytest.raises(CheckpointError, match="holds no manifest.json"):
    read_manifest(tmp_path)
  with pytest.raises(CheckpointError, match="is there already"):
    precompute(
      experiment(teachers=(TeacherConfig("x"),)), stored[1], stored[0], extensions=extensions()
    )
  with pytest.raises(ConfigError, match="rl.teachers="):
    made = experiment()
    made.rl.objective = preset("grpo")
    made.rollout.group_size = 2
    precompute(made, stored[1], tmp_path / "new")


_CONFIG = """
import dataclasses
from agentjax.objectives import preset
from agentjax.training import load_experiment
from agentjax.signals.teacher import TeacherConfig

def get_config():
  experiment = load_experiment({smoke!r})
  experiment.supervised.steps = 1
  experiment.rl = dataclasses.replace(
    experiment.rl,
    steps={steps},
    objective=preset("opd"),
    old_log_probs="recomputed",
    teachers=(TeacherConfig({teacher!r}),) if {steps} > 1 else (),
  )
  if {steps} <= 1:
    experiment.rl.objective = preset("grpo")
  experiment.evaluation.tasks = 0
  return experiment
"""


@pytest.mark.slow
def test_the_command_plays_scores_and_stores(tmp_path):
  smoke = str(_ROOT / "configs" / "smoke.py")
  environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
  for name, steps in (("warm", 1), ("distil", 2)):
    text = _CONFIG.format(smoke=smoke, steps=steps, teacher=str(tmp_path / "run"))
    (tmp_path / f"{name}.py").write_text(text)

  def command(module, *flags):
    done = subprocess.run(
      [sys.executable, "-m", f"agentjax.{module}", *flags],
      env=environment,
      capture_output=True,
      text=True,
      timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  command("train", f"--config={tmp_path}/warm.py", f"--workdir={tmp_path}/run")
  said = command(
    "recipes.lightning_opd.distill",
    f"--config={tmp_path}/distil.py",
    f"--checkpoint={tmp_path}/run",
    f"--output={tmp_path}/stored",
    "--tasks=4",
    "--samples=2",
    f"--demonstrations_by={tmp_path}/run",
  )
  assert "8 episodes" in said
  manifest = read_manifest(tmp_path / "stored")
  # Its own teacher: the log-probs are those it sampled with, up to rounding.
  assert manifest.policy and manifest.demonstrations_by == manifest.teachers[""]
  for trajectory in read_episodes(tmp_path / "stored"):
    for segment in trajectory.segments:
      drawn = segment.sampled
      np.testing.assert_allclose(
        segment.columns["teacher_log_probs"][drawn], segment.behaviour_log_probs[drawn], atol=1e-3
      )
  command(
    "train",
    f"--config={tmp_path}/distil.py",
    f"--workdir={tmp_path}/distilled",
    f"--config.rl.rollouts={tmp_path}/stored",
    "--config.supervised.steps=0",
    f"--config.start_from={tmp_path}/run",
  )
