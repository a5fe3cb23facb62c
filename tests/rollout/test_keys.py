"""Addressed keys: stable over time, different for every address."""

import itertools

import numpy as np
import pytest

from agentjax.rollout import keys


def test_keys_are_the_same_in_every_version_of_the_program():
  # A changed figure here means that recorded runs can no longer be replayed.
  np.testing.assert_array_equal(keys.turn_key(0, (0, 0, 0), 0), [3423531426, 2831296700])
  np.testing.assert_array_equal(keys.turn_key(7, (3, 2**40, 5), 2), [4045056955, 544714720])


def test_every_address_has_its_own_key():
  seen = set()
  space = itertools.product((0, 1), (0, 3), (0, 1, 2**32), (0, 1), (0, 1))
  for seed, step, task, sample, turn in space:
    seen.add(tuple(keys.turn_key(seed, (step, task, sample), turn).tolist()))
    seen.add(keys.environment_key(seed, (step, task, sample)))
  assert len(seen) == 2 * 2 * 3 * 2 * 2 + 2 * 2 * 3 * 2


def test_wide_numbers_never_run_into_their_neighbours():
  # As plain SeedSequence entropy, (2**32,) and (0, 1) are the same words.
  first = keys.derive(0, keys.Stream.SAMPLE, 2**32, 0)
  second = keys.derive(0, keys.Stream.SAMPLE, 0, 1)
  assert first.tolist() != second.tolist()


def test_streams_are_unrelated():
  drawn = {tuple(keys.derive(5, stream, 1, 2, 3).tolist()) for stream in keys.Stream}
  assert len(drawn) == len(keys.Stream)


def test_an_evaluation_never_repeats_the_draws_of_training():
  seed = keys.evaluation_seed(11)
  assert 0 <= seed < 2**63
  assert keys.turn_key(seed, (0, 1, 0), 0).tolist() != keys.turn_key(11, (0, 1, 0), 0).tolist()


def test_numbers_beyond_64_bits_are_refused():
  with pytest.raises(ValueError, match=r"parts\[1\]=.*64 bits"):
    keys.turn_key(0, (0, 2**63, 0), 0)
