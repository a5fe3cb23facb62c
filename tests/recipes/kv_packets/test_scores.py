"""The trainer's scores behind packets, against packets in a cache, and their gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.recipes.kv_packets import PacketMaker, compose, init_adapter
from agentjax.recipes.kv_packets.questions import continued
from agentjax.recipes.kv_packets.scores import packet_scores, spread
from tests.models.rows import TINY, draw

ATTENTION = dataclasses.replace(TINY, pattern="*-*-*")
HYBRID = dataclasses.replace(TINY, pattern="M*-M*")
CONFIGS = {
  "attention": ATTENTION,
  "no positions": dataclasses.replace(ATTENTION, rope_theta=None),
  "hybrid": HYBRID,
  "experts": dataclasses.replace(TINY, pattern="M*E*", experts_per_token=TINY.num_experts),
}
DOCUMENTS = (np.arange(1, 9), np.arange(9, 18))  # the texts have none of these ids
CONVERSATIONS = ((0, 0), (1, 0, 1))  # numbers of documents, then a text
TEXT = 6
LENGTH = 72  # of the row; the last tokens are padding
HEADER, TRAILER = 2, 3


def row() -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
  """Both conversations in one row, as ``forward`` and ``packet_scores`` take it, and the texts."""
  rng = np.random.default_rng(0)
  texts = [rng.integers(20, TINY.vocab_size, TEXT) for _ in CONVERSATIONS]
  names = ("token_ids", "segment_ids", "positions")
  found = {name: np.zeros((1, LENGTH), np.int32) for name in names}
  found["marks"] = np.full((1, LENGTH), -1, np.int32)
  at = 0
  for number, (documents, text) in enumerate(zip(CONVERSATIONS, texts, strict=True)):
    parts = [*(DOCUMENTS[i] for i in documents), text]
    ids = np.concatenate(parts)
    own = slice(at, at + len(ids))
    found["token_ids"][0, own], found["segment_ids"][0, own] = ids, number + 1
    found["positions"][0, own] = np.arange(len(ids))
    for part in parts[:-1]:
      found["marks"][0, at : at + len(part)] = np.arange(len(part))
      at += len(part)
    at += len(text)
  return found, texts


def test_rows_get_room_around_every_packet():
  found, _ = row()
  rows = {"inside": found.pop("marks"), **found}
  del rows["token_ids"]
  room = spread(**rows, header=HEADER, trailer=TRAILER, length=100)
  places, extra, runs = (np.asarray(v)[0] for v in (room.places, room.extra, room.runs))
  first = 2 * (8 + HEADER + TRAILER)
  np.testing.assert_array_equal(places[:8], HEADER + np.arange(8))
  np.testing.assert_array_equal(places[16 : 16 + TEXT], first + np.arange(TEXT))
  whole = [0, 1, *[-1] * 8, 2, 3, 4]
  np.testing.assert_array_equal(extra[:first], 2 * whole)
  numbers = [1] * 13 + [2] * 13 + [3] * TEXT + [4] * 14 + [5] * 13 + [6] * 14 + [7] * TEXT
  np.testing.assert_array_equal(runs[: len(numbers)], numbers)
  assert not runs[len(numbers) :].any() and not room.packet[0, len(numbers) :].any()
  second = first + TEXT
  np.testing.assert_array_equal(room.positions[0, second : second + 47], np.arange(47))
  np.testing.assert_array_equal(room.positions[0, :second], np.arange(second))
  assert room.fits[0] and not spread(**rows, header=2, trailer=3, length=96).fits[0]


@pytest.mark.parametrize("around", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_behind_packets_in_a_cache(name, around):
  config = CONFIGS[name]
  params = draw(config, seed=0)
  adapter = init_adapter(params, jax.random.key(1), header=HEADER, trailer=TRAILER)
  adapter = adapter if around else None
  decode = models.prepare_decode_params(params, config)
  maker = PacketMaker(decode, config, adapter)
  packets = [maker.make(ids) for ids in DOCUMENTS]
  found, texts = row()
  score = jax.jit(packet_scores(adapter, 8), static_argnums=1)
  scores = np.asarray(score(params, config, **found, temperature=0.7).log_probs)[0]
  after = jax.jit(continued, static_argnums=1)
  segments, marks = found["segment_ids"][0], found["marks"][0]
  for number, (documents, text) in enumerate(zip(CONVERSATIONS, texts, strict=True)):
    cache = compose(maker, [packets[i] for i in documents], 64)
    logits, _ = after(decode, config, cache, text[None])
    expected = jax.nn.log_softmax(logits[0] / 0.7)[np.arange(TEXT - 1), text[1:]]
    own = scores[(segments == number + 1) & (marks < 0)]
    np.testing.assert_allclose(own[1:], expected, atol=2e-5)
    assert own[0] == 0
  assert not scores[(segments == 0) | (marks >= 0)].any()
  rows = (found[n] for n in ("token_ids", "segment_ids", "positions"))
  plain = models.score_tokens(params, config, *rows, temperature=0.7).log_probs
  assert np.max(np.abs(plain - scores)[0][scores != 0]) > 1e-2


@pytest.mark.parametrize("config", [ATTENTION, HYBRID], ids=["attention", "hybrid"])
def test_the_gradient_goes_through_packets_and_agrees_with_finite_differences(config):
  """In each array the entry with the largest gradient, and ids that packets alone hold."""
  params = draw(config, seed=0)
  adapter = init_adapter(params, jax.random.key(1), header=HEADER, trailer=TRAILER)
  found, _ = row()
  score = packet_scores(adapter, 8)

  @jax.jit
  def loss(params):
    return jnp.sum(score(params, config, **found).log_probs)

  grads = jax.jit(jax.grad(loss))(params)
  leaves, tree = jax.tree.flatten(params)
  table = next(i for i, leaf in enumerate(leaves) if leaf is params.embedding)
  entries = [(table, (3, int(jnp.argmax(jnp.abs(grads.embedding[3])))))]
  for index, grad in enumerate(jax.tree.leaves(grads)):
    entries.append((index, np.unravel_index(np.argmax(np.abs(grad)), grad.shape)))
  seen = []
  for index, at in entries:
    sides = []
    for step in (4e-3, -4e-3):
      moved = leaves.copy()
      moved[index] = leaves[index].at[at].add(step)
      sides.append(float(loss(tree.unflatten(moved))))
    grad = float(jax.tree.leaves(grads)[index][at])
    seen.append(abs(grad))
    # Float32 rounding of the loss, about 1e-5, over the width of the difference.
    np.testing.assert_allclose((sides[0] - sides[1]) / 8e-3, grad, rtol=2e-2, atol=1e-2)
  assert seen[0] > 0.05


def test_a_row_without_room_for_its_packets_has_no_scores():
  params = draw(ATTENTION, seed=0)
  adapter = init_adapter(params, jax.random.key(1), header=16, trailer=16)
  found, _ = row()
  for least, scored in ((8, True), (1000, False)):
    scores = packet_scores(adapter, least)(params, ATTENTION, **found).log_probs
    assert bool(np.isfinite(scores).all()) == scored
    assert scored or np.isnan(scores).all()
