"""What runs on other devices, or in several processes, are held to."""

import socket

import pytest

from agentjax.training.metrics import read_metrics


def without_times(rows):
  """Rows without times and memory: what two runs of one seed must agree on exactly."""
  machine = ("time/", "memory/")
  return [{k: v for k, v in row.items() if not k.startswith(machine)} for row in rows]


def assert_same_figures(directory, straight, rows):
  """Every metric of every step, to the rounding of another summation order."""
  here, there = (without_times(read_metrics(d / "metrics.jsonl")) for d in (directory, straight))
  assert len(here) == len(there) == rows
  for row, expected in zip(here, there, strict=True):
    assert set(row) == set(expected)
    for name, value in expected.items():
      if isinstance(value, float) and not name.startswith("mismatch/"):
        assert row[name] == pytest.approx(value, rel=2e-3, abs=2e-4), (row["step"], name)


def free_address():
  """Where processes of one run may meet."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{probe.getsockname()[1]}"
