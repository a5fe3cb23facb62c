"""A transformer in numpy whose attention takes any mask, and a tiny policy of blocks."""

from __future__ import annotations

import numpy as np

from agentjax.models import ModelConfig
from agentjax.recipes.dmax.settings import NoiseSettings
from tests.models.rows import draw

BLOCK, STOP = 4, 3
MODEL = ModelConfig(
  vocab_size=12,
  d_model=16,
  pattern="*-*-",
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  rope_theta=1e4,
  d_mlp=24,
  mlp_activation="relu2",
  attention_block=8,
  logits_chunk=5,
).freeze()
MASK = MODEL.vocab_size - 1
SETTINGS = NoiseSettings(BLOCK, MASK, vocab_limit=10, stop_ids=(STOP,))


def policy(seed: int = 0, sharpness: float = 1.0):
  """Parameters; ``sharpness`` multiplies all logits."""
  params = draw(MODEL, seed)
  return params.replace(lm_head=sharpness * params.lm_head)


def logits(params, ids, positions, seen, embedded=None):
  """float64 [T, vocab] of one row; ``seen[i, j]`` says whether token i sees token j."""

  def array(x):
    return np.asarray(x, np.float64)

  def norm(x, weight):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + MODEL.norm_eps) * array(weight)

  def rotated(x):
    half = x.shape[-1] // 2
    frequencies = 1e4 ** (-np.arange(half) / half)
    angle = np.asarray(positions)[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    turned = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
    return np.concatenate(turned, axis=-1)

  table = array(params.embedding)
  x = table[np.asarray(ids)] if embedded is None else array(embedded)
  ((attention, mlp),) = params.groups
  for i in range(2):
    h = norm(x, attention.norm[i])
    weights = attention.mixer
    q, k, v = (
      np.einsum("td,dhk->thk", h, array(w[i])) for w in (weights.query, weights.key, weights.value)
    )
    q, k = rotated(q), rotated(k)
    scores = np.einsum("qhd,kd->hqk", q, k[:, 0]) / np.sqrt(MODEL.head_dim)
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,kd->qhd", shares, v[:, 0])
    x = x + np.einsum("qhd,hdm->qm", mixed, array(weights.out[i]))
    h = norm(x, mlp.norm[i])
    x = x + np.maximum(h @ array(mlp.mixer.up[i]), 0) ** 2 @ array(mlp.mixer.down[i])
  return norm(x, params.final_norm) @ array(params.lm_head)


def log_softmax(x):
  top = x.max(-1, keepdims=True)
  return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def block_log_probs(params, clean, noisy, number, embedded=None):
  """float64 [S, vocab]: one noised block behind the clean blocks before it, and nothing else."""
  before = number * BLOCK
  ids = np.concatenate([clean[:before], noisy])
  blocks = np.arange(len(ids)) // BLOCK
  seen = blocks[:, None] >= blocks
  rows = None
  if embedded is not None:
    rows = np.concatenate([np.asarray(params.embedding)[clean[:before]], embedded])
  return log_softmax(logits(params, ids, np.arange(len(ids)), seen, rows))[before:]
