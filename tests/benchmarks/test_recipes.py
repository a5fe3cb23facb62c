"""The comparison of recipes: intervals, the table, and a short run of two of them."""

import sys

import pytest
from absl import logging

from benchmarks import recipes
from benchmarks.recipes import Estimate, table


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


def test_every_change_is_a_config_of_the_same_name():
  changes = recipes.find_changes()
  assert {"grpo", "kimi", "ppr", "agent0", "grpo_roc"} <= changes.keys()


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
