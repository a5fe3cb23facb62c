r"""Merges conversations that share their beginning, so that less is computed (KAT-Coder).

  python -m agentjax.recipes.kat_coder.share --input=trajectories.jsonl --output=shared/train.jsonl
  python -m agentjax.train --config=configs/supervised.py --config.data.path=shared ...

What is merged, and how messages count, is described in ``agentjax.recipes.kat_coder.tree``.
"""

from __future__ import annotations

import json

from absl import flags, logging

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.data.jsonl import read_jsonl
from agentjax.files import write_atomically
from agentjax.recipes.kat_coder.tree import TreeConfig, merge, num_messages
from agentjax.training.flags import define_settings_flag

_INPUT = flags.DEFINE_string("input", None, "Conversations (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "File to write (.jsonl).", required=True)
_TREE = define_settings_flag("tree", TreeConfig(), "How messages count.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  _TREE.value.validate("tree")
  rows = [row for _, row in read_jsonl(_INPUT.value)]
  try:
    made = merge(rows, _TREE.value)
  except ValueError as error:
    raise ConfigError(f"--input={_INPUT.value!r}: {error}.") from error
  if not made:
    raise ConfigError(
      f"--input={_INPUT.value!r} has no message with a weight above 0; allowed: one at least."
    )
  write_atomically(_OUTPUT.value, "".join(json.dumps(row) + "\n" for row in made))
  logging.info(
    "%s: %d conversations of %d, %d messages of %d",
    _OUTPUT.value,
    len(made),
    len(rows),
    num_messages(made),
    num_messages(rows),
  )


if __name__ == "__main__":
  main(run, needs_config=False)
