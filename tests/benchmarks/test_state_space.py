"""The benchmark of the state space kernels: what it computes from times, and that it runs."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks import state_space

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny(monkeypatch):
  """Sizes that compile and run in a moment."""
  sizes = {
    "HEADS": 2,
    "WIDTH": 4,
    "STATE": 4,
    "CHANNELS": 4,
    "CHANNEL_STATE": 2,
    "CONVOLVED": 4,
    "FIRST_TIME": 4,
  }
  for name, size in sizes.items():
    monkeypatch.setattr(state_space, name, size)


def test_growth_is_the_exponent_of_time_in_tokens():
  tokens = np.array([512, 2048, 8192])
  assert state_space.growth(tokens, 3e-6 * tokens) == pytest.approx(1.0)
  assert state_space.growth(tokens, 1e-9 * tokens**2) == pytest.approx(2.0)


@pytest.mark.parametrize(
  ("longest", "expected"),
  [(512, [512]), (600, [512, 600]), (2048, [512, 2048]), (65536, [512, 2048, 8192, 32768, 65536])],
)
def test_tokens_go_in_steps_of_four_to_the_longest(longest, expected):
  assert state_space.times(longest) == expected


def test_a_kernel_of_another_backend_is_timed_only_by_name(capsys):
  available = ["reference", "xla", "pallas_tpu", "pallas_gpu"]
  assert state_space.chosen(available, [], "cpu") == ["xla", "reference"]
  assert "pallas_tpu" in capsys.readouterr().out
  assert state_space.chosen(available, [], "gpu") == ["xla", "pallas_gpu", "reference"]
  assert state_space.chosen(available, ["pallas_tpu"], "cpu") == ["pallas_tpu"]


@pytest.mark.parametrize("kernel", sorted(state_space.KERNELS))
def test_it_prints_time_memory_and_growth_of_every_implementation(kernel, tiny, capsys):
  state_space.time_kernel(kernel, state_space.Settings(max_time=8, repeats=1))
  lines = capsys.readouterr().out.splitlines()
  for implementation in ("xla", "reference"):
    for passed in ("forward", "gradient"):
      rows = [line.split() for line in lines if passed in line and implementation in line]
      assert [row[0] for row in rows[:2]] == ["4", "8"]
      assert all(float(v) >= 0 for row in rows[:2] for v in row[3:])
      assert rows[2][:3] == [kernel, implementation, f"{passed}:"]


def test_slower_implementations_are_left_out_where_they_would_take_too_long(tiny, capsys):
  state_space.time_kernel("ssd", state_space.Settings(max_time=64, repeats=1, seconds=0.0))
  rows = [line.split() for line in capsys.readouterr().out.splitlines() if " forward " in line]
  assert [(row[0], row[2]) for row in rows] == [
    ("4", "xla"),
    ("4", "reference"),
    ("16", "xla"),
    ("64", "xla"),
  ]


def test_settings_that_are_not_there_are_named():
  with pytest.raises(ValueError, match="--kernels=mamba; allowed: ssd, selective_scan"):
    state_space.run(state_space.Settings(kernels=("mamba",)))
  with pytest.raises(ValueError, match="--max_time=100; allowed: at least 512"):
    state_space.run(state_space.Settings(max_time=100))


def test_a_peer_that_does_not_start_is_an_error():
  with pytest.raises(RuntimeError, match="the peer ended with"):
    state_space.PeerCase(sys.executable, 8, gradient=False)
