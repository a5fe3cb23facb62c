"""TESSY with two policies on disk: traces, their return by seed, and training on their folder."""

import dataclasses
import json
import subprocess
import sys

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.config import JsonlConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.recipes.tessy.flow import TessyConfig, WordClassifier
from agentjax.recipes.tessy.traces import WriterConfig, synthesise_traces
from agentjax.training import Experiment, Extensions, OptimizerConfig, Run, SupervisedStage
from agentjax.training.experiment import write_experiment
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.record import Message, Task
from tests.recipes.table_policy import TABLE_MODEL, save_table_policy
from tests.training.smoke import quiet

# The student goes on with either kind of word, or ends its thoughts with a dot behind which stands
# its answer; the teacher writes both in turn and never ends.
_STUDENT = {
  "": "hA", "h": "m", "m": " ", " ": "hA.", "\n": "h.", "A": "B", "B": "\n", ".": "5", "5": None,
}  # fmt: skip
_TEACHER = {"": "A", "h": "m", "m": " ", " ": "A", "\n": "h", "A": "B", "B": "\n"}
_TEXTS = ["hm AB hm . hm AB AB hm", "AB hm hm . AB AB hm hm"]
_STYLE = [[(at, at + 1) for at in range(len(t)) if t[at] in "h."] for t in _TEXTS]
_CONFIG = TessyConfig(end_of_thoughts=".", max_tokens=60, answer_tokens=8)
_TASKS = [Task(i, (Message("user", f"{i}?"),), "5", "sums") for i in range(6)]


def _experiment(**changes):
  made = Experiment(
    name="tessy",
    model=dataclasses.replace(TABLE_MODEL, d_model=16),
    engine=EngineConfig(
      slots=4, max_length=128, chunk_tokens=8, extend_buckets=(64,), extend_rows=(4,), warmup=False
    ),
    supervised=SupervisedStage(
      steps=3,
      tasks_per_step=4,
      row_length=128,
      microbatch_rows=2,
      optimizer=OptimizerConfig(learning_rate=1e-2),
    ),
  )
  made.rollout.max_total_tokens = 128
  made.evaluation.tasks = 0
  for name, value in changes.items():
    setattr(made, name, value)
  return made


@pytest.fixture(scope="module")
def models_on_disk(tmp_path_factory):
  root = tmp_path_factory.mktemp("models")
  save_table_policy(root / "student", _STUDENT, 0, _experiment())
  save_table_policy(root / "teacher", _TEACHER, 1, _experiment())
  return root


def _synthesise(root, output, concurrency=3, **settings):
  predictor = WordClassifier.train(_TEXTS, _STYLE)
  sampling = SamplingConfig(temperature=1.0)
  return synthesise_traces(
    _experiment(),
    output,
    writers={
      "student": WriterConfig(str(root / "student"), sampling),
      "teacher": WriterConfig(str(root / "teacher"), sampling),
    },
    predictors={"student": predictor, "teacher": predictor},
    tessy=_CONFIG,
    concurrency=concurrency,
    extensions=Extensions(tasks=TaskSplits(_TASKS, ())),
    **settings,
  )


def _rows(folder):
  return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def test_two_policies_write_traces_that_the_supervised_stage_trains_on(models_on_disk, tmp_path):
  folder = tmp_path / "traces"
  written = _synthesise(models_on_disk, folder)
  assert written.traces >= 4 and 0 < written.teacher_share < 0.9
  words = {"student": "", "teacher": ""}
  for row in _rows(folder):
    assert row["messages"][-1]["content"].endswith(".5")
    for author, text in row["metadata"]["tessy"]["parts"]:
      words[author] += f" {text}"
  # All but words that both would have left to the other.
  assert words["teacher"].count("AB") > 2 * words["teacher"].count("hm")
  assert words["student"].count("hm") > 2 * words["student"].count("AB")

  data = DataConfig(
    path=str(folder),
    source=JsonlConfig(messages_field="messages", test_file=""),
  )
  run = Run(_experiment(data=data), tmp_path / "run", console=quiet())
  assert run.train().finished
  losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row]
  assert len(losses) == 3 and losses[-1] < losses[0]


def test_traces_follow_from_the_seed_whatever_is_under_way_beside_them(models_on_disk, tmp_path):
  _synthesise(models_on_disk, tmp_path / "one", concurrency=1, tasks=4)
  _synthesise(models_on_disk, tmp_path / "many", concurrency=4, tasks=4)
  first, second = (_rows(tmp_path / name) for name in ("one", "many"))
  assert first == second and len({row["messages"][-1]["content"] for row in first}) > 1
  assert _synthesise(models_on_disk, tmp_path / "one", tasks=4).kept == 4


def test_a_folder_of_other_models_is_refused(models_on_disk, tmp_path):
  (tmp_path / "swapped").mkdir()
  _synthesise(models_on_disk, tmp_path / "traces", tasks=1)
  for name, other in (("student", "teacher"), ("teacher", "student")):
    (tmp_path / "swapped" / name).symlink_to(models_on_disk / other)
  with pytest.raises(ConfigError, match="settings.student.policy is"):
    _synthesise(tmp_path / "swapped", tmp_path / "traces", tasks=1)


def test_a_writer_is_on_disk_or_behind_an_endpoint():
  with pytest.raises(ConfigError, match="student.path=''"):
    WriterConfig().validate("student")
  both = WriterConfig("runs/a")
  both.http.base_url = "http://x/v1"
  with pytest.raises(ConfigError, match="student.path='runs/a'"):
    both.validate("student")


@pytest.mark.slow
def test_the_command_trains_the_predictor_and_writes(models_on_disk, tmp_path):
  labels = [
    {"text": text, "spans": spans} for text, spans in zip(_TEXTS * 5, _STYLE * 5, strict=True)
  ]
  (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
  tasks = [{"question": task.prompt[0].content, "answer": task.answer} for task in _TASKS]
  (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
  (tmp_path / "config.json").write_text(write_experiment(_experiment()))

  def command(*flags):
    return subprocess.run(
      [sys.executable, "-m", "agentjax.recipes.tessy.synthesise", *flags],
      cwd=tmp_path,
      capture_output=True,
      text=True,
      timeout=300,
    )

  done = command("--spans=labels.jsonl", "--predictor=words.npy")
  assert done.returncode == 0, done.stderr
  assert "told right" in done.stdout and "trained on 10 texts" in done.stdout
  flags = [
    "--config=config.json",
    "--config.data.source=jsonl",
    f"--config.data.path={tmp_path}",
    "--config.data.source.test_file=",
    "--predictor=words.npy",
    f"--student.path={models_on_disk}/student",
    f"--teacher.path={models_on_disk}/teacher",
    "--teacher.sampling.temperature=1.0",
    "--tessy.end_of_thoughts=.",
    "--tessy.max_tokens=60",
    "--tessy.answer_tokens=8",
    "--output=traces",
  ]
  done = command(*flags, "--tasks=2")
  assert done.returncode == 0, done.stderr
  assert "0 of them from before" in done.stdout
  done = command(*flags)
  assert done.returncode == 0 and "2 of them from before" in done.stdout
  done = command(*flags, "--tessy.student_tokens=4")
  assert done.returncode == 2 and "tessy.student_tokens" in done.stderr
