from __future__ import annotations

import numpy as np
import pytest

from agentjax import models
from tests.models.rows import TINY, draw


@pytest.fixture(scope="session")
def tiny() -> models.ModelConfig:
  """All four kinds of block, rotary embedding, qk-norm, chunks and blocks smaller than a row."""
  TINY.validate()
  return TINY


@pytest.fixture(scope="session")
def tiny_params(tiny) -> models.Params:
  return draw(tiny, seed=0)


@pytest.fixture(scope="session")
def sequences() -> list[np.ndarray]:
  """Token ids of five sequences, 1 to 21 tokens."""
  rng = np.random.default_rng(3)
  return [rng.integers(0, TINY.vocab_size, size) for size in (13, 21, 5, 1, 9)]
