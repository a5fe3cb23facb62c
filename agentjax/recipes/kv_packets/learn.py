"""An adapter learns from the lessons of a run's packets, for a policy on disk."""

from __future__ import annotations

import pathlib
import time

import jax
import numpy as np

from agentjax.models import prepare_decode_params
from agentjax.recipes.kv_packets.adapter import init_adapter, write_adapter
from agentjax.recipes.kv_packets.config import PacketsConfig
from agentjax.recipes.kv_packets.training import measured_divergence, train_adapter
from agentjax.training.model_pool import Policy


def learn_adapter(policy: Policy, packets: PacketsConfig, output: pathlib.Path) -> list[str]:
  """Trains an adapter, writes it, and returns lines about it.

  Raises:
    ConfigError: lessons without a source, or with too little text.
    DataError: a file that cannot be read.
  """
  lessons, model, encode = packets.lessons, policy.model, policy.chat.tokenizer.encode
  corpus = packets.documents() if lessons.questions else []
  sources, fresh = (lessons.sources(encode, corpus, seed=seed) for seed in (0, 1))
  params, key = prepare_decode_params(policy.params, model), jax.random.key(lessons.seed)
  drawn = init_adapter(policy.params, key, header=lessons.header, trailer=lessons.trailer)
  begin = time.monotonic()
  adapter, losses = train_adapter(drawn, params, model, sources, lessons.training)
  write_adapter(output, adapter)
  lines = [
    f"{len(losses)} steps in {time.monotonic() - begin:.0f} s, loss {np.mean(losses[:10]):.3f} -> "
    f"{np.mean(losses[-10:]):.3f} nats an answer; adapter in {output}",
    "divergence on fresh contexts, nats an answer, by source:",
  ]
  for name, one in (("no adapter", None), ("drawn", drawn), ("trained", adapter)):
    each = [measured_divergence(one, params, model, s, lessons.training.batch) for s in fresh]
    lines.append(f"  {name:10s} " + "  ".join(f"{found:.3f}" for found in each))
  return lines
