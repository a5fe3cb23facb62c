"""Trains the stages of a graph one after the other, each from what earlier ones have left.

  python -m agentjax.stages --stages=configs/stages/nemotron3.py --workdir=runs/nemotron3
  python -m agentjax.stages --stages=configs/stages/nemotron3.py --workdir=runs/nemotron3 \
      --until=rlvr --set=rlvr.rl.steps=10

The file defines ``get_stages()`` (``agentjax.training.stage_graph``). The same command goes on
where it was stopped; finished stages are not done again. Exit status: 0 finished, 2 settings that
cannot be used, 3 interrupted, 4 another of several processes failed or is gone.
"""

from __future__ import annotations

import collections
import sys

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.training.flags import define_distributed_flags

_STAGES = flags.DEFINE_string("stages", None, "Python file with get_stages().", required=True)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Directory of all stages; created when missing.", required=True
)
_UNTIL = flags.DEFINE_list("until", [], "Only these stages, and those that they need.")
_SET = flags.DEFINE_multi_string(
  "set", [], "STAGE.FIELD=VALUE sets a field of a stage's experiment; may be given several times."
)
_join_others = define_distributed_flags()


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  settings: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
  for text in _SET.value:
    path, equals, value = text.partition("=")
    stage, _, field = path.partition(".")
    if not equals or not field:
      raise ConfigError(f"--set={text!r}; allowed: STAGE.FIELD=VALUE.")
    settings[stage].append((field, value))
  _join_others()
  from agentjax.training.stage_graph import StageGraph, load_stages, needed_for

  stages = load_stages(_STAGES.value)
  if _UNTIL.value:
    stages = needed_for(stages, _UNTIL.value)
  if not StageGraph(stages, _WORKDIR.value, settings, Console()).run():
    sys.exit(3)


if __name__ == "__main__":
  main(run, needs_config=False)
