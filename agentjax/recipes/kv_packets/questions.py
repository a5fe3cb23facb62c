"""Questions over documents in batches, and what a model answers behind a cache that holds them.

B questions, K documents each; N tokens a document, P a preamble, Q a prompt and A an answer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.cache import Cache, decode_step, extend
from agentjax.models.config import ModelConfig
from agentjax.models.heads import compute_logits
from agentjax.models.stack import DecodeParams

Array = jax.Array


class Questions(NamedTuple):
  """Questions of equal shapes. All of it is one context: preamble, documents, prompt, answer.

  Attributes:
    preamble: int32 [B, P], in front of the documents; at least one token.
    documents: int32 [B, K, N].
    prompts: int32 [B, Q].
    answers: int32 [B, A], those that are right.
  """

  preamble: Array
  documents: Array
  prompts: Array
  answers: Array

  @property
  def context(self) -> Int[Array, "questions tokens"]:
    """Preamble and documents, [B, P + K N]."""
    return jnp.concatenate([self.preamble, self.documents.reshape(len(self.documents), -1)], axis=1)


def continued(
  params: DecodeParams, config: ModelConfig, cache: Cache, token_ids: Int[Array, "slots time"]
) -> tuple[Float[Array, "slots time vocab"], Cache]:
  """Logits behind each of the tokens that follow what the slots hold; differentiable."""
  slots, time = token_ids.shape
  out = extend(params, config, cache, jnp.arange(slots), token_ids, jnp.full(slots, time))
  assert out.hidden is not None
  return compute_logits(params, config, out.hidden), out.cache


def greedy(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  prompts: Int[Array, "slots time"],
  tokens: int,
) -> Int[Array, "slots tokens"]:
  """The most likely next token, ``tokens`` times, behind prompts."""
  logits, cache = continued(params, config, cache, prompts)
  drawn = [jnp.argmax(logits[:, -1], axis=-1)]
  active = jnp.ones(len(prompts), bool)
  while len(drawn) < tokens:
    step = decode_step(params, config, cache, drawn[-1], active)
    cache = step.cache
    drawn.append(jnp.argmax(step.logits, axis=-1))
  return jnp.stack(drawn, axis=1)
