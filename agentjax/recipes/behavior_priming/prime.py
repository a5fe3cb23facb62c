r"""Chooses trajectories for a warm start by their behaviours (Behavior Priming).

  python -m agentjax.recipes.behavior_priming.prime --input=trajectories.jsonl \
      --output=primed/train.jsonl --judge.base_url=http://localhost:8000/v1 --judge.model=judge
  python -m agentjax.train --config=configs/supervised.py --config.data.path=primed ...

A row has ``messages`` in OpenAI's form. Rows with ``behaviours`` need no judge.
"""

from __future__ import annotations

import asyncio
import json

from absl import flags, logging

from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.data.jsonl import read_jsonl
from agentjax.files import write_atomically
from agentjax.recipes.behavior_priming.selection import select
from agentjax.training.flags import define_settings_flag

_INPUT = flags.DEFINE_string("input", None, "Conversations (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "File to write (.jsonl).", required=True)
_JUDGE = define_settings_flag("judge", HttpJudgeConfig(), "Names the behaviours of other rows.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  rows = [row for _, row in read_jsonl(_INPUT.value)]
  judge = None
  if not all("behaviours" in row for row in rows):
    _JUDGE.value.validate("judge")
    judge = HttpJudge(_JUDGE.value)
  try:
    kept = asyncio.run(select(rows, judge))
  except ValueError as error:
    raise ConfigError(f"--input={_INPUT.value!r}: {error}.") from error
  write_atomically(_OUTPUT.value, "".join(json.dumps(row) + "\n" for row in kept))
  logging.info("%s: %d of %d conversations", _OUTPUT.value, len(kept), len(rows))


if __name__ == "__main__":
  main(run, needs_config=False)
