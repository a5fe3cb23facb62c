"""A whole run, small: what it writes, and that one that was stopped goes on to the same bits."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from agentjax.config import ConfigError
from agentjax.recipes.rad2.measuring import POLICIES, report_of
from agentjax.recipes.rad2.runs import run
from tests.recipes.rad2.tiny import tiny_config


class _Stopped(Exception):
  pass


def _files(folder):
  return {
    path.relative_to(folder): path.read_bytes()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }


def _unreported(what, done, total):
  pass


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  result = run(tiny_config(), whole, _unreported)

  def stop_at(what, done):
    def report(now, at, total):
      if (now, at) == (what, done):
        raise _Stopped

    return report

  for what, done in (("seed 0, generator", 1), ("seed 0, both", 3)):
    with pytest.raises(_Stopped):  # a round after the last saved state is lost each time
      run(tiny_config(), stopped, stop_at(what, done))
  run(tiny_config(), stopped, _unreported)
  assert _files(whole) == _files(stopped)

  assert {"report.json", "policies.png", "replay.gif"} <= {p.name for p in whole.iterdir()}
  assert json.loads((whole / "report.json").read_text()) == json.loads(json.dumps(result))
  rows = [json.loads(x) for x in (whole / "seed_0" / "both.jsonl").read_text().splitlines()]
  assert [row["round"] for row in rows] == [0, 1, 2, 3]
  assert "edit_loss" in rows[2] and "edit_loss" not in rows[1] and "entropy" in rows[0]
  with Image.open(whole / "replay.gif") as moving:
    assert moving.n_frames == 21  # 40 steps, every second one
  with pytest.raises(ConfigError, match="settings.training.rounds is 5 here and 4 there"):
    run(tiny_config(rounds=5), whole, _unreported)


def test_the_report_compares_policies_scenario_by_scenario():
  config = tiny_config()
  crashed = {"imitation": [1, 1, 1, 0], "generator": [1, 1, 0, 0], "discriminator": [1, 0, 0, 0]}
  rows = {
    name: [
      {"crashed": crashed.get(name, [0] * 4), "progress": [0.5] * 4, "safe_1s": [1] * 4,
       "progress_1": [0] * 4}
    ] * 2
    for name in POLICIES
  }  # fmt: skip
  found = report_of(config, [0, 1, 1, 3], rows)
  assert found["order_of_the_source"]
  assert found["policies"]["imitation"]["crashed"]["mean"] == 0.75
  assert found["policies"]["generator"]["crashed_by_kind"] == {
    "brake": 1.0, "cut_in": 0.5, "standing": 0.0,
  }  # fmt: skip
  assert found["crashed"]["imitation - generator"]["mean"] == 0.25
  rows["both"][0]["crashed"] = rows["both"][1]["crashed"] = [1, 1, 1, 1]
  assert not report_of(config, [0, 1, 1, 3], rows)["order_of_the_source"]


def test_the_command_refuses_impossible_settings(tmp_path):
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "agentjax.recipes.rad2.train",
      f"--output={tmp_path / 'x'}",
      "--rad2.seeds=0",
    ],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 2 and "rad2.seeds=0; allowed: >= 1." in done.stderr, done.stderr
  assert not (tmp_path / "x").exists()
