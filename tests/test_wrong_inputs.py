"""Wrong inputs of every kind end with one line that names them, and with exit status 2."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from agentjax.training.experiment import FORMAT
from tests.text.folders import write_model, write_vocabulary

_ROOT = pathlib.Path(__file__).parents[1]
_SMOKE = "--config=configs/smoke.py"
_HF = (
  "--config=configs/supervised.py",
  "--config.model.compute_dtype=float32",
  "--config.supervised.tasks_per_step=4",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with whole and broken things of each kind."""
  folder = tmp_path_factory.mktemp("wrong")
  (folder / "empty").mkdir()
  (folder / "file").write_text("text")
  (folder / "notjson.json").write_text("{")
  (folder / "list.json").write_text("[1]")
  (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
  (folder / "fields.json").write_text(json.dumps({"format": FORMAT, "nosuch": 1}))
  (folder / "raises.py").write_text("def get_config():\n  return 1 / 0\n")
  (folder / "exits.py").write_text("raise SystemExit(0)\n")
  (folder / "deep.json").write_text("[" * 100_000)
  (folder / "own_parts.py").write_text(
    "from agentjax.world import World\n"
    "class NoTasks(World):\n"
    "  def tasks(self, data): raise KeyError('no tasks today')\n"
    "  def environment(self, task): pass\n"
  )
  (folder / "syntax.py").write_text("def get_config(:\n")
  (folder / "other.py").write_text("def get_config():\n  return 3\n")
  (folder / "none.py").write_text("x = 1\n")
  rows = folder / "rows"
  rows.mkdir()
  (rows / "train.jsonl").write_text('{"messages": [{"role": "robot", "content": "a"}]}\n')
  good = folder / "good"
  good.mkdir()
  turns = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7"}]
  (good / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
  from agentjax.adapters.huggingface_text.tokenizer import HuggingFaceTokenizer

  for name in ("model", "cut", "no_weights", "no_tokenizer", "no_template", "bad_config"):
    write_vocabulary(folder / name)
    write_model(folder / name, HuggingFaceTokenizer(folder / name), [])
  whole = (folder / "cut/model.safetensors").read_bytes()
  (folder / "cut/model.safetensors").write_bytes(whole[: len(whole) // 2])
  (folder / "no_weights/model.safetensors").unlink()
  (folder / "no_tokenizer/tokenizer.json").unlink()
  (folder / "no_template/chat_template.jinja").unlink()
  (folder / "bad_config/config.json").write_text('{"model_type": "gpt_bigcode"}')
  return folder


def _train(*words):
  return ("train", "--workdir={run}", *words)


_CASES = {
  "no such config": (_train("--config=nosuch.py"), "nosuch.py"),
  "a folder as config": (_train("--config={place}/empty"), "/empty"),
  "config is not JSON": (_train("--config={place}/notjson.json"), "notjson.json"),
  "config is a list": (_train("--config={place}/list.json"), "list"),
  "config is binary": (_train("--config={place}/binary.json"), "binary.json"),
  "config has a field of another": (_train("--config={place}/fields.json"), "nosuch"),
  "config raises": (_train("--config={place}/raises.py"), "ZeroDivisionError"),
  "config exits": (_train("--config={place}/exits.py"), "SystemExit"),
  "config is too deep": (_train("--config={place}/deep.json"), "deep.json"),
  "a module that exits": (_train(_SMOKE, "--config.rl.objective.function=exits:loss"), "exits"),
  "a world that raises": (
    _train(
      _SMOKE,
      "--config.world=own_parts:NoTasks",
      "--config.data.source=none",
      "--config.supervised.steps=0",
      "--config.reward.parts=environment",
      "--config.evaluation.success_part=environment",
    ),
    "config.world='own_parts:NoTasks' raised KeyError: 'no tasks today'",
  ),
  "a rate without end": (_train(_SMOKE, "--config.rl.optimizer.learning_rate=inf"), "=inf"),
  "a seed without end": (_train(_SMOKE, "--config.seed=" + "9" * 30), "config.seed=999"),
  "config is no Python": (_train("--config={place}/syntax.py"), "SyntaxError"),
  "config gives no experiment": (_train("--config={place}/other.py"), "int"),
  "config defines nothing": (_train("--config={place}/none.py"), "get_config"),
  "no workdir": (("train", _SMOKE), "--workdir"),
  "workdir is a file": (("train", _SMOKE, "--workdir={place}/file"), "/file"),
  "fewer tasks than a step takes": (
    _train(*_HF[:2], "--config.pretrained={place}/model", "--config.data.path={place}/good"),
    "tasks_per_step",
  ),
  "workdir is read only": (("train", _SMOKE, "--workdir=/proc/run"), "/proc"),
  "workdir is full": (("train", _SMOKE, "--workdir=/dev/full/run"), "/dev/full"),
  "a value of another type": (_train(_SMOKE, "--config.seed=x"), "'x'"),
  "a value out of range": (_train(_SMOKE, "--config.seed=-1"), "config.seed=-1"),
  "a flag without a value": (_train(_SMOKE, "--config.seed"), "seed"),
  "an unknown field": (_train(_SMOKE, "--config.sead=1"), "sead"),
  "an unknown flag": (_train(_SMOKE, "--fast"), "fast"),
  "a stray word": (_train(_SMOKE, "fast"), "'fast'"),
  "flags behind --": (_train(_SMOKE, "--", "--config.seed=1"), "--config.seed=1"),
  "replay of nothing": (_train(_SMOKE, "--replay_step=1"), "1"),
  "no data folder": (_train(*_HF, "--config.pretrained={place}/model"), "config.data.path"),
  "data folder is missing": (
    _train(*_HF, "--config.pretrained={place}/model", "--config.data.path={place}/nosuch"),
    "/nosuch/train.jsonl",
  ),
  "data folder is empty": (
    _train(*_HF, "--config.pretrained={place}/model", "--config.data.path={place}/empty"),
    "/empty/train.jsonl",
  ),
  "data of a wrong role": (
    _train(*_HF, "--config.pretrained={place}/model", "--config.data.path={place}/rows"),
    "train.jsonl:1:",
  ),
  **{
    f"a model folder: {name}": (
      _train(*_HF, f"--config.pretrained={{place}}/{name}", "--config.data.path={place}/good"),
      told,
    )
    for name, told in {
      "nosuch": "nosuch",
      "empty": "config.json",
      "file": "/file",
      "cut": "model.safetensors",
      "no_weights": "safetensors",
      "no_tokenizer": "tokenizer.json",
      "no_template": "chat template",
      "bad_config": "gpt_bigcode",
    }.items()
  },
  "start from nothing": (_train(_SMOKE, "--config.start_from={place}/empty"), "/empty"),
  "no such loss": (_train(_SMOKE, "--config.rl.objective.function=nosuch:loss"), "nosuch"),
  "evaluate: no checkpoint": (("evaluate", _SMOKE, "--checkpoint={place}/empty"), "/empty"),
  "evaluate: missing": (("evaluate", _SMOKE, "--checkpoint={place}/nosuch"), "/nosuch"),
  "rescore: no journal": (
    ("rescore", _SMOKE, "--trajectories={place}/empty", "--output={run}"),
    "/empty",
  ),
  "rescore: another file": (
    ("rescore", _SMOKE, "--trajectories={place}/file", "--output={run}"),
    "/file",
  ),
  "convert: nothing": (("convert", "--input={place}/nosuch", "--output={run}"), "nosuch"),
  "convert: cut weights": (
    ("convert", "--input={place}/cut", "--output={run}"),
    "model.safetensors",
  ),
  "convert: output in use": (("convert", "--input={place}/model", "--output={place}"), "not empty"),
  "distill: no teacher": (
    ("recipes.lightning_opd.distill", _SMOKE, "--checkpoint={place}/empty", "--output={run}"),
    "config.rl.teachers",
  ),
  "miner: nothing named": (("recipes.pivotrl.mine", _SMOKE, "--output={run}"), "--trajectories"),
  "fields: two words": (("fields", "rl", "data"), "stray word 'data'"),
  "recipe's command: nothing named": (("recipes.tessy.synthesise",), "--predictor=FILE is needed"),
  "skills: nothing to replay": (
    ("recipes.skillclaw.evolve", "--transcripts={place}", "--library={run}", "--output={run}"),
    "--skills.publish=propose",
  ),
  "recipe's command: no such": (("recipes.tessy.nosuch",), "allowed: train"),
  "train_tokenizer: no file": (
    ("train_tokenizer", "--input={place}/nosuch", "--output={run}"),
    "nosuch",
  ),
}


@pytest.mark.parametrize("case", _CASES)
def test_a_wrong_input_is_one_line_and_status_2(place, tmp_path, case):
  words, told = _CASES[case]
  words = [word.format(place=place, run=tmp_path / "run") for word in words]
  done = subprocess.run(
    [sys.executable, "-m", "agentjax", *words],
    cwd=_ROOT,
    env={
      **os.environ,
      "XDG_CACHE_HOME": str(tmp_path / "cache"),
      "PYTHONPATH": os.pathsep.join([str(_ROOT), str(place)]),
    },
    capture_output=True,
    text=True,
    timeout=300,
  )
  lines = done.stderr.strip().splitlines()
  assert done.returncode == 2, done.stderr[-2000:]
  assert lines[-1].startswith("error: ") and told in lines[-1], done.stderr[-2000:]
  assert "Traceback" not in done.stderr and len(lines) <= 3
  assert not (tmp_path / "run").exists(), "a start that was refused claimed its directory"
