"""docs/architecture.md: its snippets run as printed, its rooms exist, its contracts are those."""

import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from absl import flags

from agentjax.objectives.objective import policy_objective
from agentjax.training.build import Extensions, build_parts
from agentjax.training.experiment import resolve
from agentjax.training.flags import define_config_flag
from agentjax.training.learner import Learner
from agentjax.trajectory import columns

_ROOT = pathlib.Path(__file__).parents[1]
_PAGE = (_ROOT / "docs" / "architecture.md").read_text()
_SECTIONS = dict(re.findall(r"^### (\w+)$(.*?)(?=^##|\Z)", _PAGE, flags=re.M | re.S))
_FILES = {
  name: code
  for text in _SECTIONS.values()
  for name, code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", text, re.S)
}
_COMMANDS = {
  section: re.findall(r"^    python -m ((?:[^\\\n]|\\\n)*)$", text, flags=re.M)
  for section, text in _SECTIONS.items()
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A working directory with the page's files; what they register is forgotten."""
  for name, code in _FILES.items():
    (tmp_path / f"{name}.py").write_text(code)
  (tmp_path / "configs").symlink_to(_ROOT / "configs")
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setattr(columns, "_REGISTRY", dict(columns._REGISTRY))
  yield tmp_path
  for name in _FILES:
    sys.modules.pop(name, None)


def _words(section):
  (command,) = _COMMANDS[section]
  return shlex.split(command.replace("\\\n", " "))


def test_every_kind_has_one_file_and_one_command():
  assert list(_SECTIONS) == ["Loss", "Signal", "World", "Tool", "Model", "Recipe"]
  assert list(_FILES) == [f"my_{section.lower()}" for section in _SECTIONS]
  for code in _FILES.values():
    assert len([line for line in code.splitlines() if line]) <= 24


@pytest.mark.parametrize("section", _SECTIONS)
def test_a_run_can_be_made_of_a_snippet(section, folder):
  """Flags are read, names found, the world and its tasks made, losses and signals traced."""
  program, *argv = _words(section)
  values = flags.FlagValues()
  flags.DEFINE_string("workdir", None, "", flag_values=values)
  config = define_config_flag(flag_values=values, argv=["train", *argv])
  values(["train", *argv])
  assert program == "agentjax.train" and values.workdir
  experiment = resolve(config.value)
  parts = build_parts(experiment, folder, Extensions())
  learner = Learner(parts, policy_objective(experiment.rl.objective))
  chosen = {
    "Loss": experiment.rl.objective.function == "my_loss:capped",
    "Signal": "surprise" in learner.signals,
    "World": type(parts.make_environment(parts.tasks.train[0])).__name__ == "Guess",
    "Tool": [tool.name for tool in parts.tools] == ["calculator", "double"],
    "Model": parts.model.pattern == "*-*-",
    "Recipe": experiment.rl.objective.function and "surprise" in learner.signals,
  }
  assert chosen[section]


@pytest.mark.slow
@pytest.mark.parametrize("section", _SECTIONS)
def test_a_command_trains(section, folder):
  done = subprocess.run(
    [sys.executable, "-m", *_words(section)],
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  (run,) = (folder / "runs").iterdir()
  assert (run / "report.json").exists()


def test_the_rooms_of_the_picture_are_the_folders():
  picture = _PAGE[: _PAGE.index("## The way of a token")]
  rooms = set(re.findall(r"\b([a-z]+)/(?!NAME)", picture.split("roof")[1]))
  there = {
    p.name for p in (_ROOT / "agentjax").iterdir() if p.is_dir() and (p / "__init__.py").exists()
  }
  assert rooms | {"worlds", "recipes", "adapters"} == there


def test_the_contracts_are_those_of_the_lint():
  settings = tomllib.loads((_ROOT / "pyproject.toml").read_text())
  names = [contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]]
  assert re.findall(r"^    (.*) KEPT$", _PAGE, flags=re.M) == names
