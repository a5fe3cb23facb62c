"""Tests that need several devices run in a process of their own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def on_eight_devices() -> Callable[..., str]:
  """``on_eight_devices(file, *arguments)`` runs a file on 8 CPU devices, returns what it prints.

  A non-zero exit fails the test with the end of its standard error.
  """

  def run(file: str, *arguments: str) -> str:
    environment = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": str(_ROOT),
      "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
      [sys.executable, file, *arguments],
      env=environment,
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=600,
      check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout

  return run
