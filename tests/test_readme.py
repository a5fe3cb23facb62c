"""The README's promises: every snippet runs as printed."""

import functools
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text()
_SECTIONS = re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", _README, flags=re.M | re.S)
_PYTHON = {
  title: code
  for title, text in _SECTIONS
  for code in re.findall(r"```python\n(.*?)```", text, re.S)
}
_COMMANDS = [
  command.replace("\\\n", " ")
  for _, text in _SECTIONS
  for block in re.findall(r"```bash\n(.*?)```", text, re.S)
  for command in re.split(r"(?<!\\)\n", block.strip())
]


def test_there_are_the_three_snippets_at_the_length_promised():
  lengths = {title: len([x for x in code.splitlines() if x]) for title, code in _PYTHON.items()}
  assert set(lengths) == {"Your own loss", "Your own tool", "Your own environment"}
  own = {"Your own loss": "def my_loss", "Your own tool": "@function_tool"}
  for title, start in own.items():
    assert len(_PYTHON[title][_PYTHON[title].index(start) :].split("\n\n")[0].splitlines()) <= 10
  environment = _PYTHON["Your own environment"]
  body = environment[environment.index("class Guess") : environment.index("tasks =")]
  assert len([x for x in body.splitlines() if x]) <= 15


@pytest.mark.slow
@pytest.mark.parametrize("title", _PYTHON)
def test_snippet_runs(title, tmp_path):
  (tmp_path / "configs").symlink_to(_ROOT / "configs")
  done = subprocess.run(
    [sys.executable, "-c", _PYTHON[title]],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  (run,) = (tmp_path / "runs").iterdir()
  assert (run / "report.json").exists()


@functools.cache
def _help_text(module: str) -> str:
  return subprocess.run(
    [sys.executable, "-m", module, "--help"],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  ).stdout


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda c: " ".join(c.split()[:3]))
def test_commands_name_flags_and_files_that_exist(command):
  words = shlex.split(command)
  if words[0] == "launch/tpu_pod.sh":
    done = subprocess.run(
      [words[0], "--dry_run", *words[1:]], cwd=_ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--worker=all" in done.stdout, done.stderr
    return
  assert words[:2] == ["python", "-m"]
  help_text = _help_text(words[2])
  for word in words[3:]:
    name = word.split("=")[0].split(".")[0]
    assert f"{name}:" in help_text or f"{name}=" in help_text or f"--[no]{name[2:]}" in help_text, (
      name
    )
    if word.startswith("--config=configs/"):
      assert (_ROOT / word.removeprefix("--config=")).is_file()
