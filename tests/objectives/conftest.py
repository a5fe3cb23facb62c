"""A packer for tests: unpacked [N, L] arrays into rows with several sequences and gaps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.trajectory.batch import Batch


@dataclasses.dataclass(frozen=True)
class Packer:
  """Packs [N, L] arrays, ``per_row`` sequences a row with a gap after each, last sequence first."""

  count: int
  length: int
  per_row: int = 2
  gap: int = 1

  @property
  def segment_ids(self):
    ids = np.arange(1, self.count + 1)[:, None] * np.ones((1, self.length), int)
    return self.pack(ids).astype(jnp.int32)

  def pack(self, array, fill=0):
    array = np.asarray(array)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    spaced = np.full((self.count, self.length + self.gap), fill, array.dtype)
    spaced[:, : self.length] = array
    rows = -(-self.count // self.per_row)
    whole = np.full((rows * self.per_row, self.length + self.gap), fill, array.dtype)
    whole[-self.count :] = spaced[::-1]
    return jnp.asarray(whole.reshape(rows, -1), dtype)

  def unpack(self, rows):
    whole = np.asarray(rows).reshape(-1, self.length + self.gap)
    return whole[-self.count :][::-1][:, : self.length]

  def batch(self, weights, behaviour, rewards, *, turns=None, valid=None, groups=None):
    segment_ids = self.segment_ids
    zeros = jnp.zeros_like(segment_ids)
    return Batch(
      token_ids=zeros,
      segment_ids=segment_ids,
      positions=zeros,
      weights=self.pack(weights),
      behaviour_log_probs=self.pack(behaviour),
      entropies=jnp.zeros(zeros.shape),
      versions=zeros,
      turns=zeros if turns is None else self.pack(turns, fill=-1),
      rewards=jnp.asarray(rewards),
      valid=jnp.ones(self.count, bool) if valid is None else jnp.asarray(valid),
      groups=jnp.zeros(self.count, jnp.int32) if groups is None else jnp.asarray(groups),
    )


@pytest.fixture
def packer():
  return Packer


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield
