"""Fresh random checkpoints of every family, to and from an installed `transformers`."""

from __future__ import annotations

import dataclasses
import functools
import os

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from agentjax.models.huggingface import load_pretrained, save_pretrained
from tests.golden import make_hf_checkpoints as library
from tests.models import parity

pytestmark = pytest.mark.slow

FAMILIES = sorted(library.family_configs())
SEED = int.from_bytes(os.urandom(4))  # drawn anew at each run; messages tell it
# Other weights meet other roundings than the golden files did.
TOLERANCE = 2 * parity.TOLERANCE


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
  """Family name to a folder that transformers wrote, and what it computes."""

  @functools.cache
  def make(name):
    folder = tmp_path_factory.mktemp(name)
    model = library.build(name, SEED)
    expected = library.compute_expected(model, library.draw_token_ids(name, SEED))
    library.save(name, model, expected, folder)
    return folder, expected

  return make


@pytest.mark.parametrize("name", FAMILIES)
def test_fresh_weights_compute_what_transformers_computes(name, fresh):
  folder, expected = fresh(name)
  params, config = load_pretrained(folder)
  config = dataclasses.replace(config, compute_dtype="float32")
  computed = parity.compute(params, config, jnp.asarray(expected["token_ids"]))
  distances = parity.distances(computed, expected)
  assert max(distances.values()) <= TOLERANCE, f"{name}, seed {SEED}: {distances} of the scale"


# Published LongCat folders hold no projections of the experts that compute nothing, and neither do
# ours; transformers 5.23 wants them.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "longcat_flash"])
def test_transformers_computes_the_same_bits_from_what_we_write(name, fresh, tmp_path):
  folder, expected = fresh(name)
  save_pretrained(tmp_path / "ours", *load_pretrained(folder))
  logits = library.full_logits(library.read(tmp_path / "ours"), expected["token_ids"])
  assert np.array_equal(logits, expected["logits"]), f"{name}, seed {SEED}"
