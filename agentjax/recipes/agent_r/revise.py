r"""Makes conversations in which an error is seen and corrected (Agent-R).

  python -m agentjax.recipes.agent_r.revise --input=trajectories.jsonl \
      --output=revised/train.jsonl --splice.above=0.5 --splice.gap=0.2
  python -m agentjax.train --config=configs/supervised.py --config.data.path=revised ...

Rows are described in ``agentjax.recipes.agent_r.splicing``. Iterate with a rising ``above``.
"""

from __future__ import annotations

import json

from absl import flags, logging

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.data.jsonl import read_jsonl
from agentjax.files import write_atomically
from agentjax.recipes.agent_r.splicing import SpliceConfig, splice
from agentjax.training.flags import define_settings_flag

_INPUT = flags.DEFINE_string("input", None, "Trajectories (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "File to write (.jsonl).", required=True)
_SPLICE = define_settings_flag("splice", SpliceConfig(), "Which pairs, and how.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  _SPLICE.value.validate("splice")
  rows = [row for _, row in read_jsonl(_INPUT.value)]
  try:
    made = splice(rows, _SPLICE.value)
  except ValueError as error:
    raise ConfigError(f"--input={_INPUT.value!r}: {error}.") from error
  if not made:
    raise ConfigError(
      f"--input={_INPUT.value!r} has no trajectory with a reward above "
      f"--splice.above={_SPLICE.value.above}; allowed: a lower bound, or better trajectories."
    )
  write_atomically(_OUTPUT.value, "".join(json.dumps(row) + "\n" for row in made))
  logging.info("%s: %d conversations of %d trajectories", _OUTPUT.value, len(made), len(rows))


if __name__ == "__main__":
  main(run, needs_config=False)
