"""Samples of prompts from the slots of one lane, without asyncio and scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentjax.engine import Sample, SampleRequest, SamplingConfig, SlotEngine, address_key
from agentjax.engine.grammar import Grammar
from agentjax.engine.request import Generation
from agentjax.engine.slots import token_array
from agentjax.engine.store import Snapshot
from tests.engine.conftest import text


def generate(
  engine: SlotEngine,
  prompts: Sequence[Sequence[int]],
  *,
  seed: int,
  max_tokens: int,
  samples: int = 1,
  sampling: SamplingConfig | None = None,
  stop_ids: tuple[int, ...] = (),
  stop_strings: tuple[str, ...] = (),
  grammar: Grammar | None = None,
) -> list[list[Sample]]:
  """Samples every prompt ``samples`` times.

  Contexts enter slots as they come free, and each prompt is run once for all its samples. What
  slots held before is overwritten. Sample j of prompt i has the key ``address_key(seed, i, j)``.

  Returns:
    ``result[i][j]``, sample j of prompt i.
  """
  config = engine.config
  request = SampleRequest(
    (0, 0),
    max_tokens,
    sampling or SamplingConfig(),
    tuple(stop_ids),
    tuple(stop_strings),
    grammar=grammar,
  )
  results: dict[tuple[int, int], Sample] = {}
  waiting = [(i, j) for i in range(len(prompts)) for j in range(samples)][::-1]
  running: dict[int, tuple[tuple[int, int], Generation]] = {}
  prefixes: dict[int, Snapshot] = {}

  def room(slot: int) -> int:
    return config.max_length - int(engine.lengths[slot])

  while waiting or running:
    free = [s for s in range(engine.slots) if s not in running][: len(waiting)]
    entering = [(slot, waiting.pop()) for slot in free]
    first = {i: slot for slot, (i, _) in reversed(entering) if i not in prefixes}
    engine.place(None, list(first.values()))
    ids = {i: token_array(prompts[i], engine.model_config.vocab_size) for i in first}
    engine.extend([(slot, ids[i]) for i, slot in first.items()])
    prefixes.update({i: engine.read(slot) for i, slot in first.items()})
    for i in {i for _, (i, _) in entering}:
      engine.place(prefixes[i], [slot for slot, (k, _) in entering if k == i])
    for slot, (i, j) in entering:
      keyed = dataclasses.replace(request, key_data=address_key(seed, i, j))
      generation = Generation(keyed, max_stop_ids=config.max_stop_ids, decode=text)
      running[slot] = ((i, j), generation)
    still_needed = {i for i, _ in waiting}
    prefixes = {i: prefix for i, prefix in prefixes.items() if i in still_needed}
    plan = engine.idle_plan()
    for slot, (_, generation) in running.items():
      generation.write(plan, slot, room(slot))
    version, chunk = engine.weights.versions[0], engine.decode(plan)
    for slot, (address, generation) in list(running.items()):
      if generation.read(chunk, slot, room(slot), version, version):
        results[address] = generation.result()
        del running[slot]
  return [[results[i, j] for j in range(samples)] for i in range(len(prompts))]
