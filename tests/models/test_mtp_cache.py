"""Heads over slots say what they say in training."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models.blocks import Appended
from tests.models.rows import TINY, draw, pack

SLOTS, LENGTH, TOKENS = 4, 16, 3


def with_heads(pattern: str, **settings) -> models.ModelConfig:
  return dataclasses.replace(TINY, pattern="M*-", mtp=models.MtpConfig(pattern=pattern, **settings))


CONFIGS = {
  "shared": with_heads("*E", depths=3),
  "own": with_heads("*-", depths=2, shared=False),
  "one": with_heads("-*", depths=1),
}


@functools.partial(jax.jit, static_argnums=1)
def in_training(params, config, rows):
  """Hidden states, and log-probs [depths, T] of one sequence."""
  hidden = models.forward(params, config, *rows).hidden
  return hidden, models.mtp_scores(params, config, hidden, *rows).log_probs[:, 0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pieces", [[10], [1, 2, 4, 1, 2]], ids=str)
def test_drafted_log_probs_are_those_of_training(name, pieces):
  config = CONFIGS[name]
  config.validate()
  params = draw(config, seed=0)
  tokens = np.random.default_rng(1).integers(0, config.vocab_size, LENGTH)
  hidden, expected = in_training(params, config, pack([tokens], [[0]], LENGTH))
  weights = jax.jit(functools.partial(models.prepare_decode_params, heads=True), static_argnums=1)(
    params, config
  )
  follow = jax.jit(functools.partial(models.follow, config=config, max_length=LENGTH))
  slot, held = 2, 0
  mtp_cache = models.init_mtp_cache(config, SLOTS, LENGTH, TOKENS)

  @jax.jit
  def drafted(mtp_cache, held, following):
    """Log-probs of three tokens behind the next one, which are what is drafted."""
    said = []

    def choose(step, logits):
      said.append(jax.nn.log_softmax(logits[slot])[following[step + 1]])
      return jnp.full(SLOTS, following[step + 1])

    active = jnp.arange(SLOTS) == slot
    lengths, first = jnp.where(active, held, 0), jnp.full(SLOTS, following[0])
    _, after = models.draft(
      weights, config, mtp_cache, lengths, first, active, tokens=TOKENS, max_length=LENGTH,
      choose=choose,
    )  # fmt: skip
    return jnp.stack(said), after

  for count in pieces:
    # Four columns at least, and a row that is not used: padding must not matter.
    width = max(count, 4)
    ids, states = np.zeros((2, width), int), np.ones((2, width, config.d_model), np.float32)
    ids[0, :count] = tokens[held : held + count]
    states[0, :count] = hidden[0, held : held + count]
    where = Appended(
      jnp.array([slot, SLOTS]), held + jnp.arange(width)[None] * jnp.ones((2, 1), int),
      jnp.array([count, 0]),
    )  # fmt: skip
    mtp_cache = follow(weights, mtp_cache=mtp_cache, where=where, hidden=states, token_ids=ids)
    held += count
    said, mtp_cache = drafted(mtp_cache, held, jnp.asarray(tokens[held : held + TOKENS + 1]))
    for depth in range(config.mtp.depths):
      np.testing.assert_allclose(
        said[depth], expected[depth, held + 1 + depth], atol=2e-5, err_msg=f"{held} {depth}"
      )
    assert np.isfinite(said).all()


def test_models_whose_heads_cannot_draft_say_why():
  assert models.undraftable(CONFIGS["shared"]) is None
  assert "model.mtp is None" in models.undraftable(TINY)
  assert "recurrent" in models.undraftable(with_heads("M-"))
