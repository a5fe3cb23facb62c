"""``module:attribute``: one form, one way to the object, and errors that name the setting."""

import subprocess
import sys

import pytest

from agentjax.config import ConfigError
from agentjax.names import check_name, is_own, load, wrong

PATH = "config.thing"


@pytest.mark.parametrize("name", ["plain", "module:thing", "package.module:Class.method"])
def test_built_in_names_and_well_formed_ones_are_right(name):
  check_name(name, PATH, ("plain",))
  assert is_own(name) == (name != "plain")


@pytest.mark.parametrize("name", ["", "other", "a:", ":b", "a:b:c", "a b:c", "x.py:f/g", "1a:b"])
def test_others_are_refused_with_what_is_allowed(name):
  with pytest.raises(ConfigError) as error:
    check_name(name, PATH, ("plain",))
  assert str(error.value) == f"{PATH}={name!r}; allowed: plain, 'module:attribute'."


@pytest.mark.parametrize(
  ("name", "message"),
  [
    (
      "no_such_module:f",
      "no module 'no_such_module'.*names a duck",
    ),
    ("json:no_such", "json has no 'no_such', but .*JSONDecoder.*; allowed: a duck"),
    ("json:JSONDecoder.no_such", "has no 'JSONDecoder.no_such'"),
  ],
)
def test_what_is_not_there_is_named_with_the_setting(name, message):
  with pytest.raises(ConfigError, match=f"^{PATH}='{name}'.*{message}"):
    load(name, PATH, "a duck")


def test_what_is_there_is_returned():
  import json

  assert load("json:JSONDecoder.decode", PATH, "a duck") is json.JSONDecoder.decode
  assert str(wrong("json:x", PATH, 3, "a duck")) == f"{PATH}='json:x' is int; allowed: a duck."


def test_a_module_of_the_working_directory_is_found_from_an_installed_command(tmp_path):
  """As with ``python -m``; a script's own folder is what Python puts on the path for it."""
  (tmp_path / "mine.py").write_text("thing = 'found'\n")
  (tmp_path / "bin").mkdir()
  script = tmp_path / "bin" / "command"
  script.write_text("from agentjax.names import load\nprint(load('mine:thing', 'x', 'it'))\n")
  done = subprocess.run(
    [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
  )
  assert done.stdout.strip() == "found", done.stderr
