"""The benchmark of objectives: that its two updates agree, and that it prints what it promises."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
PEER = """
import json, sys
assert "--rows=2" in sys.argv and "--vocab=64" in sys.argv
print("# some words of its own")
print(json.dumps({"best_s": 1.0, "median_s": 2.0, "cpu_s_median": 3.0, "peak_mib": 7.0}))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  command = [sys.executable, str(ROOT / "benchmarks" / "objectives.py"), "--tiny", "--rounds=1"]
  return subprocess.run(
    [*command, "--repeats=1", *arguments], env=environment, capture_output=True, text=True
  )


def test_memory_time_and_a_peer_stand_side_by_side(tmp_path):
  script = tmp_path / "peer.py"
  script.write_text(PEER)
  done = run(
    "--part=memory", "--part=time", f"--trl_python={sys.executable}", f"--trl_script={script}"
  )
  assert done.returncode == 0, done.stderr[-3000:]
  lines = done.stdout.splitlines()[2:]
  planned = [float(line.split()[-5].replace(",", "")) for line in lines[:2]]
  assert 0 < planned[0] < planned[1]  # chunks of logits take less than all of them
  assert "naive / fused" in lines[2] and "memory" in lines[2]
  assert [line.split()[6] for line in (lines[3], lines[4], lines[6])] == ["fused", "naive", "trl"]
  assert "log-probs agree to" in lines[4] and "peak 7.0 MiB" in lines[6]
  assert "trl / fused" in lines[7]


def test_every_loss_is_timed():
  done = run("--part=losses", "--presets=dapo,sppo")
  assert done.returncode == 0, done.stderr[-3000:]
  assert [line.split()[-1] for line in done.stdout.splitlines()[2:]] == ["dapo", "sppo"]


def test_a_peer_that_fails_is_an_error(tmp_path):
  broken = tmp_path / "broken.py"
  broken.write_text("raise SystemExit('no model')")
  done = run("--part=time", f"--trl_python={sys.executable}", f"--trl_script={broken}")
  assert done.returncode != 0 and "ended with 1 and 0 results" in done.stderr


def test_a_side_with_other_log_probs_is_refused():
  code = (
    "import sys, jax.numpy as jnp\n"
    "sys.path.insert(0, 'benchmarks')\n"
    "import objectives\n"
    "right = objectives.naive_scores\n"
    "def wrong(*a, **k):\n"
    "  s = right(*a, **k)\n"
    "  return s.replace(log_probs=1.1 * s.log_probs)\n"
    "objectives.naive_scores = wrong\n"
    "objectives.app.run(objectives.main, argv=['x', '--tiny', '--part=time'])\n"
  )
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
  )
  assert done.returncode != 0 and "log-probs of the two sides differ" in done.stderr
