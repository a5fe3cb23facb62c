r"""Trains an adapter for a policy on the lessons of a run's packets (``LessonsConfig``).

  python -m agentjax.recipes.kv_packets.train --config=configs/kv_packet_reading.py \
      --checkpoint=runs/reading --output=runs/reading/adapter

``--config`` names packets and lessons (``config.likelihood``); the policy is that of
``--checkpoint``, or of ``--config.pretrained``. At the end the divergence of answers behind packets
from those behind the text is measured on contexts that were not trained on.
"""

from __future__ import annotations

import pathlib

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.training.flags import define_config_flag
from agentjax.training.progress import print_line

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
  from agentjax.recipes.kv_packets.config import PacketsConfig
  from agentjax.recipes.kv_packets.learn import learn_adapter
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
  output = pathlib.Path(_OUTPUT.value)
  for line in learn_adapter(load_policy_with_chat(path, experiment), packets, output):
    print_line(Console(), line)


if __name__ == "__main__":
  main(run)
