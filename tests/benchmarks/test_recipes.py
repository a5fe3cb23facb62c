"""The comparison of recipes: intervals, the table, and a short run of two of them."""

import dataclasses
import pathlib
import sys

import pytest
from absl import logging

from agentjax.objectives import preset
from agentjax.text import TokenizerConfig
from agentjax.text.tokenizer import build_tokenizer
from agentjax.training import RunReport, load_experiment
from benchmarks import recipes
from benchmarks.recipes import Estimate, table

QUICKSTART = pathlib.Path(recipes.__file__).parents[1] / "configs" / "quickstart.py"
CHANGES = recipes.find_changes()


def test_the_interval_is_that_of_student_over_seeds():
  """Of .1, .2, .3: .2 +- 4.303 * .1 / 3^.5."""
  found = Estimate.of([0.1, 0.2, 0.3])
  assert found.mean == pytest.approx(0.2)
  assert found.high - found.mean == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
  assert Estimate.of([0.1]).high == float("inf")


def test_the_best_stands_first_beside_plain_grpo():
  rows = table({"grpo": [0.5, 0.5], "good": [0.6, 0.6], "poor": [0.4, 0.4]})[2:]
  assert [row.split(" | ")[0].strip("| ") for row in rows] == ["good", "grpo", "poor"]
  assert "10.0% [10.0, 10.0]" in rows[0] and "-10.0%" in rows[2] and rows[1].endswith("|  |")


def test_every_change_is_a_config_of_the_same_name_or_a_preset():
  assert {"grpo", "kimi", "ppr", "agent0", "grpo_roc", "aepo", "preset:dapo"} <= CHANGES.keys()
  changed = CHANGES["preset:gspo"](load_experiment(QUICKSTART))
  assert changed.rl.objective == preset("gspo")


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
  """A folder with a vocabulary, and no policy."""
  folder = tmp_path_factory.mktemp("warm")
  words = TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=300)
  build_tokenizer(words, lines=["Mia has 24 books. Leo gives Mia 17."] * 9, directory=folder)
  return folder


@pytest.mark.parametrize("name", [name for name in CHANGES if ":" not in name])
def test_a_recipe_plays_as_many_episodes_of_the_same_problems(name, warm):
  made = recipes.experiment_of(QUICKSTART, CHANGES[name], 3, warm, held_out=64)
  made.validate()
  whole = made.rl.tasks_per_step * made.rollout.group_size
  assert abs(whole - 128) < made.rollout.group_size
  assert (made.seed, made.data.test_size, made.evaluation.tasks) == (3, 64, 64)
  assert made.model == dataclasses.replace(load_experiment(QUICKSTART).model, vocab_size=300)


def test_an_interrupted_run_is_not_taken_for_a_finished_one(tmp_path, monkeypatch):
  class Interrupted:
    def __init__(self, experiment, directory, console):
      directory.mkdir()

    def train(self):
      return RunReport(tmp_path, {"greedy": 0.1}, {}, 3, finished=False)

  monkeypatch.setattr(recipes, "Run", Interrupted)
  with pytest.raises(SystemExit, match="the same command goes on"):
    recipes.train(load_experiment(QUICKSTART), tmp_path / "grpo_0")
  assert not list((tmp_path / "grpo_0").iterdir())


@pytest.mark.slow
def test_two_recipes_are_run_from_one_warm_start(tmp_path, monkeypatch, capsys):
  arguments = ["recipes.py", "--recipes=kimi", "--seeds=1", "--steps=1", "--warm_steps=1"]
  monkeypatch.setattr(sys, "argv", [*arguments, f"--out={tmp_path}"])
  told = logging.get_verbosity()
  recipes.main()
  assert logging.get_verbosity() == told  # else whoever calls it hears no warning any more
  out = capsys.readouterr().out
  assert "seed 0: grpo" in out and "| kimi |" in out
  assert (tmp_path / "recipes.png").stat().st_size > 1000
  recipes.main()  # what is finished is not run again
  assert capsys.readouterr().out == out
