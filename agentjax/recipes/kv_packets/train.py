r"""Trains an adapter for a policy on the lessons of a run's packets (``LessonsConfig``).

  python -m agentjax.recipes.kv_packets.train --config=configs/kv_packet_reading.py \
      --checkpoint=runs/reading --output=runs/reading/adapter

``--config`` names packets and lessons (``config.likelihood``); the policy is that of
``--checkpoint``, or of ``--config.pretrained``. At the end the divergence of answers behind packets
from those behind the text is measured on contexts that were not trained on.
"""

from __future__ import annotations

import pathlib
import time

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.training.flags import define_config_flag

_CONFIG = define_config_flag()
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint",
  None,
  "Directory of a run, for its newest policy, or RUN/checkpoints/STEP. Without it the policy is "
  "that of --config.pretrained.",
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the adapter.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  import jax
  import numpy as np

  from agentjax.models import prepare_decode_params
  from agentjax.recipes.kv_packets.adapter import init_adapter, write_adapter
  from agentjax.recipes.kv_packets.config import PacketsConfig
  from agentjax.recipes.kv_packets.training import measured_divergence, train_adapter
  from agentjax.training.model_pool import load_policy_with_chat

  experiment = _CONFIG.value
  packets, path = experiment.likelihood, _CHECKPOINT.value or experiment.pretrained
  if not isinstance(packets, PacketsConfig):
    raise ConfigError(
      f"config.likelihood={packets.chosen!r}; allowed: agentjax.recipes.kv_packets:PacketsConfig, "
      "whose lessons are trained on."
    )
  if path is None:
    raise ConfigError("there is no policy: give --checkpoint=RUN or --config.pretrained=DIR.")
  policy, lessons = load_policy_with_chat(path, experiment), packets.lessons
  encode, corpus = policy.chat.tokenizer.encode, packets.documents()
  sources = lessons.sources(encode, corpus, seed=0)
  fresh = lessons.sources(encode, corpus, seed=1)
  params = prepare_decode_params(policy.params, policy.model)
  drawn = init_adapter(
    policy.params,
    jax.random.key(lessons.seed),
    header=lessons.header,
    trailer=lessons.trailer,
  )
  begin, console = time.monotonic(), Console()
  adapter, losses = train_adapter(drawn, params, policy.model, sources, lessons.training)
  write_adapter(pathlib.Path(_OUTPUT.value), adapter)
  console.print(
    f"{len(losses)} steps in {time.monotonic() - begin:.0f} s, loss {np.mean(losses[:10]):.3f} -> "
    f"{np.mean(losses[-10:]):.3f} nats an answer; adapter in {_OUTPUT.value}",
    soft_wrap=True,
  )
  for name, one in (("none", None), ("drawn", drawn), ("trained", adapter)):
    each = [measured_divergence(one, params, policy.model, source, lessons.training.batch)
            for source in fresh]  # fmt: skip
    console.print(f"  fresh contexts, adapter {name}: " + ", ".join(f"{d:.3f}" for d in each))


if __name__ == "__main__":
  main(run)
