"""The command that checks an environment's rewards before anybody trains on them."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = f"--config={ROOT / 'configs' / 'smoke.py'}"


def _command(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "agentjax.check", CONFIG, "--tasks=2", *arguments],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
    capture_output=True, text=True, timeout=300, check=False,
  )  # fmt: skip


@pytest.mark.slow
def test_rewards_that_pay_for_nothing_fail_the_check_and_say_where():
  done = _command("--config.reward.parts=exact_match,tool_errors", "--config.reward.weights=0,-1.0")
  assert done.returncode == 1, done.stderr
  assert "word_problems" in done.stdout and "reference" in done.stdout
