"""What a request may ask for; stop strings in text that comes bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from agentjax.engine.request import SampleRequest, StopStrings
from agentjax.text.tokenizer import ByteTokenizer


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_are_found_as_in_the_whole_text_without_decoding_it_again(seed):
  tokenizer, rng = ByteTokenizer(), np.random.default_rng(seed)
  text = "".join(rng.choice(list("aé漢😀b "), 400))
  strings = tuple("".join(rng.choice(list("aé漢😀b "), n)) for n in (4, 5, 9))
  ids = np.array(tokenizer.encode(text), np.int32)
  ids[rng.integers(0, len(ids), 3)] = rng.integers(0, 264, 3)  # some bytes that are no text
  decoded = 0

  def decode(part: list[int]) -> str:
    nonlocal decoded
    decoded += len(part)
    return tokenizer.decode(part)

  search, cuts = StopStrings(strings, decode), np.cumsum(rng.integers(1, 17, len(ids)))
  found, start = None, 0
  for end in cuts:
    found = search.find(ids[start:end])
    if found is not None or end >= len(ids):
      break
    start = end
  whole = (tokenizer.decode(ids[:end].tolist()) for end in range(1, len(ids) + 1))
  wanted = next((i + 1 for i, t in enumerate(whole) if any(s in t for s in strings)), None)
  assert (None if found is None else start + found) == wanted
  assert decoded < 200 * len(ids[:end]) ** 0.5 + 30 * len(ids[:end])


@pytest.mark.parametrize("key", [(0, 2**32), (-1, 0), (0.5, 0), (1, 2, 3)], ids=str)
def test_a_key_is_two_numbers_of_32_bits(key):
  with pytest.raises(ValueError, match="key_data"):
    SampleRequest(key, 1)
