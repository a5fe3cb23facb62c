"""The catalogue: every recipe is in it, its commands are valid, and the page is that of today."""

import importlib.util
import json
import pathlib
import shlex
import subprocess
import sys

import pytest
from absl import flags

from agentjax.recipes import CONFIGS, find_recipes, page
from agentjax.recipes.__main__ import main, text_of
from agentjax.training.flags import define_config_flag

_ROOT = pathlib.Path(__file__).parents[1]
_RECIPES = find_recipes()
_TRAIN = "agentjax.train"
_COMMANDS = {
  f"{recipe.name}-{i}": shlex.split(command.replace("\\\n", " "))
  for recipe in _RECIPES
  for i, command in enumerate(recipe.commands)
}
_RUNS = {name: words[3:] for name, words in _COMMANDS.items() if words[2:3] == [_TRAIN]}


def test_the_page_is_written_from_the_recipes():
  """Mend it by: python -m agentjax.recipes --markdown > docs/recipes.md."""
  current = (_ROOT / "docs" / "recipes.md").read_text() == page(_RECIPES)
  assert current, "docs/recipes.md is not that of today"  # a diff of two pages takes minutes


def test_every_folder_says_what_it_is():
  folders = {file.parent.name for file in (_ROOT / "agentjax" / "recipes").glob("*/__init__.py")}
  stated = {file.parent.name for file in (_ROOT / "agentjax" / "recipes").glob("*/about.py")}
  assert folders == stated


def test_names_are_unique_and_fields_are_filled():
  names = [recipe.name for recipe in _RECIPES]
  assert len(set(names)) == len(names) and len(names) > 40
  for recipe in _RECIPES:
    assert recipe.paper and recipe.changes.endswith(".") and recipe.data and recipe.commands


@pytest.mark.parametrize("recipe", _RECIPES, ids=lambda recipe: recipe.name)
def test_what_it_refers_to_is_there(recipe):
  for test in recipe.tests:
    assert (_ROOT / test).exists(), test
  if recipe.page:
    file, _, section = recipe.page.partition("#")
    headings = [
      line.lstrip("# ").lower() for line in (_ROOT / "docs" / file).read_text().splitlines()
    ]
    slugs = {"".join(c for c in h.replace(" ", "-") if c.isalnum() or c == "-") for h in headings}
    assert not section or section in slugs, recipe.page


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A working directory with the configs and the folders that commands name by capitals."""
  (tmp_path / "configs").symlink_to(CONFIGS)
  (tmp_path / "DIR").mkdir()
  (tmp_path / "FOLDER").mkdir()
  model = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
  }
  (tmp_path / "FOLDER" / "config.json").write_text(json.dumps(model))
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.mark.parametrize("name", _RUNS)
def test_its_run_is_valid(name, folder):
  values = flags.FlagValues()
  flags.DEFINE_string("workdir", None, "", flag_values=values)
  argv = ["train", *_RUNS[name]]
  config = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  assert values.workdir
  config.value.validate()


@pytest.mark.parametrize("name", [name for name in _COMMANDS if name not in _RUNS])
def test_its_command_is_there(name):
  words = _COMMANDS[name]
  if words[0] == "make":
    assert f"\n{words[1]}:" in (_ROOT / "Makefile").read_text()
  elif words[1] == "-m":
    assert importlib.util.find_spec(words[2]) is not None
  else:
    assert (_ROOT / words[1]).exists()


def test_words_choose_recipes(capsys):
  assert main(["spa-rl", "2505.20732"]) == 0
  shown = capsys.readouterr().out
  assert "configs/spa_rl_sokoban.py" in shown and "MEDS" not in shown
  assert main(["no-such-word"]) == 1
  assert main(["--wrong"]) == 2


def test_the_list_shows_all_of_them():
  done = subprocess.run(
    [sys.executable, "-m", "agentjax.recipes"],
    capture_output=True,
    text=True,
    cwd=_ROOT,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip().splitlines() == "\n\n".join(map(text_of, _RECIPES)).splitlines()
