"""Deciding blocks, against the rules written out over a dense transformer without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.models import init_cache, prepare_decode_params
from agentjax.recipes.dmax.config import DecodingConfig
from agentjax.recipes.dmax.decoding import BlockDecoder, BlockPlan
from tests.recipes.dmax.dense import (
  BLOCK,
  MASK,
  MODEL,
  SETTINGS,
  STOP,
  block_log_probs,
  policy,
)

SHARP = 12.0  # so that some tokens are sure and others are not
PROMPTS = ([5, 6, 1, 2, 9, 4], [7, 7], [1, 2, 3, 4], [0, 5, 8, 2, 6, 6, 1])


def _soft(table, ids, trust, shown):
  """What stands for the tokens of a block: a mixture of token and mask, of a mixed length."""
  own, mask = table[ids], table[MASK]
  share = np.where(shown, trust, 0.0)[:, None]
  mixed = share * own + (1 - share) * mask
  length = np.linalg.norm(own, axis=1, keepdims=True)
  wanted = share * length + (1 - share) * np.linalg.norm(mask)
  return mixed * wanted / np.linalg.norm(mixed, axis=1, keepdims=True)


def _decide_block(params, text, settings, left):
  """Tokens behind ``text`` up to the end of its block, and the number of passes; greedy."""
  number, known = len(text) // BLOCK, len(text) % BLOCK
  table = np.asarray(params.embedding, np.float64)
  ids = np.array([*text[number * BLOCK :], *[MASK] * (BLOCK - known)])
  trust = np.where(np.arange(BLOCK) < known, 1.0, 0.0)
  decided = np.zeros(BLOCK, bool)
  end = min(BLOCK, known + left)
  passes = 0

  def last():
    stops = [i for i in range(known, end) if decided[i] and ids[i] == STOP]
    return stops[0] + 1 if stops else end

  while True:
    shown = decided | (np.arange(BLOCK) < known)
    rows = _soft(table, ids, trust, shown) if settings.soft else table[np.where(shown, ids, MASK)]
    log_p = block_log_probs(params, np.array(text), ids, number, rows)
    log_p = log_p[:, : SETTINGS.vocab_limit]
    log_p -= np.logaddexp.reduce(log_p, axis=1, keepdims=True)
    best, sure = log_p.argmax(axis=1), np.exp(log_p.max(axis=1))
    passes += 1
    masked = [i for i in range(known, last()) if not decided[i]]
    if settings.mode == "soft":
      new = []
      for i in masked:
        if new and not (settings.parallel and sure[i] >= settings.threshold):
          break
        new.append(i)
        if not (settings.parallel and sure[i] >= settings.threshold):
          break
    else:
      new = [i for i in masked if settings.parallel and sure[i] >= settings.threshold]
      new = new or [max(masked, key=lambda i: sure[i])]
    again = np.flatnonzero(decided).tolist() if settings.soft else []
    changed = bool(new) or any(best[i] != ids[i] for i in again)
    for i in (*new, *again):
      ids[i], trust[i] = best[i], sure[i]
    decided[new] = True
    needed = range(known, last())
    if not all(decided[i] for i in needed):
      continue
    settled = all(trust[i] >= settings.settled for i in needed)
    if not settings.soft or settled or not changed or passes >= 2 * BLOCK:
      return ids[known : last()].tolist(), passes


def _reference(params, prompt, settings, most):
  text, passes, commits = list(prompt), 0, 0
  while True:
    left = most - (len(text) - len(prompt))
    new, more = _decide_block(params, text, settings, left)
    text, passes = text + new, passes + more
    drawn = text[len(prompt) :]
    if drawn[-1] == STOP or len(drawn) >= most:
      return drawn, passes, commits
    commits += 1


def _plan(slots, tails, left, temperature=0.0, keys=None):
  plan = BlockPlan(
    np.zeros((slots, BLOCK), np.int32),
    np.zeros(slots, np.int32),
    np.zeros(slots, bool),
    np.zeros(slots, np.int32),
    np.zeros((slots, 2), np.uint32) if keys is None else keys,
    np.full(slots, temperature, np.float32),
    np.full((slots, 2), -1, np.int32),
  )
  plan.stop_ids[:, 0] = STOP
  for slot, tail in tails.items():
    plan.ids[slot, : len(tail)], plan.known[slot], plan.active[slot] = tail, len(tail), True
    plan.left[slot] = left[slot]
  return plan


def _decode(params, prompts, settings, most, slots=4, temperature=0.0):
  """Tokens and passes of every prompt, which take the slots in order."""
  decoder = BlockDecoder(MODEL, settings, BLOCK, MASK, SETTINGS.vocab_limit)
  narrow = prepare_decode_params(params, MODEL)
  cache = init_cache(MODEL, slots, 24)
  ids, counts = np.zeros((slots, 8), np.int32), np.zeros(slots, np.int32)
  for slot, prompt in enumerate(prompts):
    whole = len(prompt) // BLOCK * BLOCK
    ids[slot, :whole], counts[slot] = prompt[:whole], whole
  cache = decoder.prefill(narrow, cache, ids, counts, np.ones(slots, bool))
  held = [int(c) for c in counts[: len(prompts)]]
  texts, passes = [list(p) for p in prompts], [0] * len(prompts)
  going = set(range(len(prompts)))
  keys = np.arange(2 * slots, dtype=np.uint32).reshape(slots, 2)
  while going:
    left = {s: most - len(texts[s]) + len(prompts[s]) for s in going}
    plan = _plan(slots, {s: texts[s][held[s] :] for s in going}, left, temperature, keys)
    cache, found = decoder.decode(narrow, cache, plan)
    found = jax.device_get(found)
    for s in sorted(going):
      known, count = plan.known[s], found.counts[s]
      texts[s] += found.ids[s, known : known + count].tolist()
      passes[s] += int(found.forwards[s])
      held[s] += BLOCK
      if found.stopped[s] or count == left[s]:
        going.remove(s)
  return [(t[len(p) :], n) for t, p, n in zip(texts, prompts, passes, strict=True)]


@pytest.mark.parametrize("mode", ["soft", "threshold"])
@pytest.mark.parametrize("threshold", [0.4, 0.8, 1.0])
def test_blocks_are_decided_as_the_rules_say(mode, threshold):
  sharp = SHARP if threshold < 1 else 3.0  # so that float32 tells which token is the surest
  params, settings = policy(1, sharp), DecodingConfig(mode=mode, threshold=threshold)
  found = _decode(params, PROMPTS, settings, most=9)
  for prompt, (drawn, passes) in zip(PROMPTS, found, strict=True):
    wanted, count, _ = _reference(params, prompt, settings, most=9)
    assert drawn == wanted
    assert passes == count
    if threshold == 1:  # the surest first: some may stand behind a stop that comes later
      assert passes == len(drawn) if mode == "soft" else passes >= len(drawn)


def _greedy(params, prompt, most):
  """One token after the other, each the most likely one behind masks alone."""
  text = list(prompt)
  while True:
    number, known = len(text) // BLOCK, len(text) % BLOCK
    noisy = np.array([*text[number * BLOCK :], *[MASK] * (BLOCK - known)])
    row = block_log_probs(params, np.array(text), noisy, number)[known]
    text.append(int(row[: SETTINGS.vocab_limit].argmax()))
    if text[-1] == STOP or len(text) - len(prompt) == most:
      return text[len(prompt) :]


def test_a_threshold_of_one_is_greedy_decoding_exactly():
  params = policy(1, SHARP)
  for prompt, (drawn, passes) in zip(
    PROMPTS, _decode(params, PROMPTS, DecodingConfig(threshold=1.0), most=9), strict=True
  ):
    assert drawn == _greedy(params, prompt, most=9)
    assert passes == len(drawn)


def test_sure_tokens_are_decided_together():
  """A policy that is sure of everything decides a block a pass."""
  params = policy(1, 1e4)
  for mode in ("soft", "threshold"):
    found = _decode(params, PROMPTS, DecodingConfig(mode=mode, threshold=0.9), most=9)
    blocks = [
      -(-(len(p) + len(drawn)) // BLOCK) - len(p) // BLOCK
      for p, (drawn, _) in zip(PROMPTS, found, strict=True)
    ]
    assert sum(len(drawn) for drawn, _ in found) > 1.5 * sum(blocks)
    assert [passes for _, passes in found] == blocks


def test_neighbours_and_slots_change_no_token():
  params, settings = policy(1, SHARP), DecodingConfig(threshold=0.4)
  together = _decode(params, PROMPTS, settings, most=9)
  for i, prompt in enumerate(PROMPTS):
    assert _decode(params, [prompt], settings, most=9)[0] == together[i]


def test_draws_have_the_shares_that_the_policy_gives_them():
  """The first token of a call at a temperature, one token a pass, over many keys."""
  params, slots, temperature = policy(1, 2.0), 1024, 0.7
  prompt = PROMPTS[0]
  decoder = BlockDecoder(MODEL, DecodingConfig(threshold=1.0), BLOCK, MASK, SETTINGS.vocab_limit)
  narrow, cache = prepare_decode_params(params, MODEL), init_cache(MODEL, slots, 8)
  ids = np.tile(np.array(prompt[:4], np.int32), (slots, 1))
  cache = decoder.prefill(narrow, cache, ids, np.full(slots, 4), np.ones(slots, bool))
  keys = np.random.default_rng(0).integers(0, 2**32, (slots, 2)).astype(np.uint32)
  tails = dict.fromkeys(range(slots), prompt[4:])
  plan = _plan(slots, tails, dict.fromkeys(range(slots), 1), temperature, keys)
  _, found = decoder.decode(narrow, cache, plan)
  shares = np.bincount(np.asarray(found.ids)[:, 2], minlength=MODEL.vocab_size) / slots
  noisy = np.array([*prompt[4:], MASK, MASK])
  row = block_log_probs(params, np.array(prompt), noisy, 1)[2, : SETTINGS.vocab_limit]
  wanted = np.exp(row / temperature) / np.exp(row / temperature).sum()
  error = np.sqrt(wanted * (1 - wanted) / slots)
  np.testing.assert_array_less(np.abs(shares[: SETTINGS.vocab_limit] - wanted), 4.5 * error + 1e-9)
  assert not shares[SETTINGS.vocab_limit :].any()
  log_probs = np.asarray(found.log_probs)[:, 2]
  np.testing.assert_allclose(np.exp(log_probs), wanted[np.asarray(found.ids)[:, 2]], rtol=1e-3)


def test_a_block_that_is_not_finite_ends_and_says_so():
  params = policy(1).replace(final_norm=jnp.full((MODEL.d_model,), jnp.nan))
  decoder = BlockDecoder(MODEL, DecodingConfig(), BLOCK, MASK, SETTINGS.vocab_limit)
  plan = _plan(2, {0: [5]}, {0: 3})
  _, found = decoder.decode(prepare_decode_params(params, MODEL), init_cache(MODEL, 2, 8), plan)
  np.testing.assert_array_equal(found.finite, [False, True])
