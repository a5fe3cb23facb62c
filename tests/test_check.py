"""The command that checks an environment's rewards before anybody trains on them."""

import asyncio
import os
import pathlib
import subprocess
import sys

import pytest

from agentjax.training import load_experiment
from agentjax.training.reward_gates import check_experiment

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


@pytest.mark.parametrize(
  ("name", "at_most"),
  [
    ("dapo_countdown", 0.1),  # which pays for form
    *(
      pytest.param(name, 0.0, marks=pytest.mark.slow)
      for name in ("quickstart", "ragen_sokoban", "ragen2_frozen_lake", "reasoning_gym",
                   "repair_agent", "smoke")
    ),
  ],
)  # fmt: skip
def test_bundled_configs_hold_their_gates(name, at_most):
  experiment = load_experiment(ROOT / "configs" / f"{name}.py")
  results = asyncio.run(check_experiment(experiment, tasks=2, at_most=at_most))
  assert len({r.attempt for r in results}) > 10
  assert [(r.attempt, r.reward, r.detail) for r in results if not r.held] == []
