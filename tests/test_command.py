"""Commands: help, one line for what cannot be used, exit statuses, the trace in the log."""

import os
import pathlib
import subprocess
import sys

import pytest

from agentjax.__main__ import COMMANDS
from agentjax.command import COMMON_FIELDS
from agentjax.fields import find_fields, list_fields

_ROOT = pathlib.Path(__file__).parents[1]
_PROGRAM = """
from agentjax.command import main
def run(argv):
  {body}
main(run)
"""


def _run(tmp_path, *words, **environment):
  return subprocess.run(
    [sys.executable, *words],
    cwd=_ROOT,
    env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment},
    capture_output=True,
    text=True,
    timeout=120,
  )


def _program(tmp_path, body):
  return _run(tmp_path, "-c", _PROGRAM.format(body=body))


@pytest.mark.parametrize(
  ("words", "told"),
  [
    (["--nosuch=1"], "'nosuch'"),
    pytest.param(["stray"], "'stray'", marks=pytest.mark.slow),
    pytest.param(["--", "--config.seed=1"], "'--config.seed=1'", marks=pytest.mark.slow),
    (["--config.seedy=1"], "did you mean seed"),
    pytest.param(["--config=nosuch.py"], "'nosuch.py': no such file", marks=pytest.mark.slow),
    ([], "--config is missing"),
  ],
)
def test_a_command_line_that_cannot_be_used_ends_with_one_line_and_2(tmp_path, words, told):
  words = ["--workdir", str(tmp_path / "run"), *words]
  if "is missing" not in told and "no such file" not in told:
    words.insert(0, "--config=configs/smoke.py")
  done = _run(tmp_path, "-m", "agentjax", "train", *words)
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert done.stderr.startswith("error: ") and told in done.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("body", "told"),
  [
    ("raise OSError(28, 'No space left on device', 'weights')", "No space left on device: weights"),
    ("open('/proc/nosuch/file', 'w')", "No such file or directory: /proc/nosuch/file"),
    (
      "from agentjax.config import ConfigError as E; raise E('line 3' + chr(10) + 'is no object')",
      "line 3 is no object",
    ),
  ],
)
def test_the_trace_of_what_cannot_be_used_goes_to_the_log(tmp_path, body, told):
  done = _program(tmp_path, body)
  log = tmp_path / "cache/agentjax/errors.log"
  assert done.returncode == 2, done.stderr
  assert done.stderr == f"error: {told} (trace: {log})\n"
  assert "Traceback" in log.read_text()


def test_a_fault_of_the_program_shows_its_trace_and_ends_with_1(tmp_path):
  done = _program(tmp_path, "return {}['missing']")
  assert done.returncode == 1 and "Traceback" in done.stderr and "KeyError" in done.stderr


@pytest.mark.slow
def test_compiled_programs_are_kept_unless_told_otherwise(tmp_path):
  body = "import jax; print(jax.config.jax_compilation_cache_dir)"
  environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
  environment["XDG_CACHE_HOME"] = str(tmp_path)
  command = [sys.executable, "-c", _PROGRAM.format(body=body)]
  found = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
  assert found.stdout.strip() == str(tmp_path / "agentjax" / "compiled"), found.stderr
  assert _run(tmp_path, *command[1:], JAX_COMPILATION_CACHE_DIR="").stdout.strip() in ("", "None")


def test_help_names_the_config_and_its_common_fields(tmp_path):
  done = _run(tmp_path, "-m", "agentjax", "train", "--help")
  assert done.returncode == 0, done.stderr
  for name in ("--config=", "--workdir=", "--replay_step=", *COMMON_FIELDS):
    assert name in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"train"}))
def test_every_command_has_help(tmp_path, command):
  done = _run(tmp_path, "-m", "agentjax", command, "--help")
  assert done.returncode == 0 and "agentjax" in done.stdout, done.stderr


def test_an_unknown_command_is_refused(tmp_path):
  done = _run(tmp_path, "-m", "agentjax", "trian")
  assert done.returncode == 2 and "'trian'" in done.stderr and "train" in done.stderr


def test_fields_are_listed_by_beginning_else_by_part():
  names = {field.name for field in list_fields()}
  assert names.issuperset(COMMON_FIELDS)
  assert all(f.meaning for f in list_fields() if f.name in COMMON_FIELDS)
  (rate,) = find_fields("--config.rl.optimizer.learning_rate")
  assert (rate.allowed, rate.meaning[:4]) == ("float, > 0", "peak")
  assert {f.name.split(".")[0] for f in find_fields("rl.optimizer")} == {"rl"}
  parts = {f.name for f in find_fields("learning_rate")}
  assert {"rl.optimizer.learning_rate", "supervised.optimizer.learning_rate"} <= parts
  assert find_fields("nosuch") == []


def test_a_terminal_does_not_obey_what_an_error_or_a_warning_quotes(tmp_path):
  body = "import logging; logging.warning('a\\x1b[2J'); raise OSError(2, 'no', 'b\\x1b[2J')"
  done = _program(tmp_path, body)
  assert done.returncode == 2 and "\x1b" not in done.stderr
  assert "a\\x1b[2J" in done.stderr and "error: no: b\\x1b[2J" in done.stderr


def test_a_locale_without_a_letter_stops_no_command(tmp_path):
  program = _PROGRAM.format(body="print('caf\\xe9')")
  done = _run(tmp_path, "-c", program, PYTHONIOENCODING="ascii")
  assert (done.returncode, done.stdout) == (0, "caf\\xe9\n")
