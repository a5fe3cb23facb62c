"""Addresses of random draws: one key for every turn of every episode, computed on the host.

A key depends on the run's seed and on where in the run the draw is made, never on time, slots or
neighbours. ``numpy.random.SeedSequence`` mixes the address; every number enters as two 32-bit
words, so that no two addresses share their words. The host derives keys because only the engine's
thread may touch the device.
"""

from __future__ import annotations

import enum

import numpy as np

Address = tuple[int, int, int]  # (step, task_id, sample), as in Trajectory.address
BASELINE = -1  # sample of a group's greedy episode, which is compared with and not trained on


class Stream(enum.IntEnum):
  """The purpose of a key; keys of different streams are unrelated."""

  SAMPLE = 0  # tokens of one turn
  ENVIRONMENT = 1  # the environment's own random choices
  EVALUATION = 2  # seed of an evaluation, so that it never repeats the draws of training
  BOOTSTRAP = 3  # resampling for confidence intervals
  BRANCH = 4  # whether an episode is branched before one turn
  JUDGE = 5  # a judge's reply
  WRITER = 6  # a piece of a text that several models write
  SERVICE = 7  # a turn that a service writes


def derive(run_seed: int, stream: Stream, *parts: int) -> np.ndarray:
  """uint32 [2], the key of one address.

  Args:
    run_seed: the run's seed.
    stream: what the key is for.
    parts: the address, integers in [-2**63, 2**63).
  """
  words: list[int] = [int(stream), len(parts)]
  for name, value in (("run_seed", run_seed), *((f"parts[{i}]", p) for i, p in enumerate(parts))):
    if not -(2**63) <= value < 2**63:
      raise ValueError(f"{name}={value} does not fit 64 bits; use a seed or id in [-2**63, 2**63)")
    words += [value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF]
  return np.random.SeedSequence(words).generate_state(2, np.uint32)


def turn_key(run_seed: int, address: Address, turn: int) -> np.ndarray:
  """uint32 [2], key of turn ``turn``; the engine folds the index of each token into it."""
  return derive(run_seed, Stream.SAMPLE, *address, turn)


def environment_key(run_seed: int, address: Address) -> int:
  """Seed in [0, 2**64) given to ``Environment.reset``."""
  return _as_int(derive(run_seed, Stream.ENVIRONMENT, *address))


def service_key(run_seed: int, address: Address, turn: int) -> int:
  """Seed in [0, 2**63) of a turn that a service writes."""
  return _as_int(derive(run_seed, Stream.SERVICE, *address, turn)) >> 1


def branch_draw(run_seed: int, address: Address, turn: int) -> float:
  """Uniform in [0, 1): decides whether the episode is branched before turn ``turn``."""
  return (_as_int(derive(run_seed, Stream.BRANCH, *address, turn)) >> 11) * 2.0**-53


def evaluation_seed(run_seed: int) -> int:
  """Seed in [0, 2**63) of the evaluations of a run."""
  return _as_int(derive(run_seed, Stream.EVALUATION)) >> 1


def _as_int(key: np.ndarray) -> int:
  return int(key[0]) | int(key[1]) << 32
