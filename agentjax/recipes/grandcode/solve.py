r"""Test-time reinforcement learning on one problem: trains on it alone, then votes (GrandCode).

  python -m agentjax.recipes.grandcode.solve --config=configs/grandcode_problem.py \
      --problem=problem.txt --workdir=runs/problem --config.pretrained=FOLDER

The problem is a text with lines ``assert FUNCTION(ARGUMENTS) == RESULT``, the only answers that are
known. ``--config.rl.steps`` stages are played and trained on, one after the other. Of all solutions
that were drawn, ``solution.py`` in ``--workdir`` is the one on whose answers most of those that
pass the asserts agree; ``solution.json`` has the counts. The same command goes on where it was
stopped. Ends with 1 if no solution passes the asserts. 2604.02721.
"""

from __future__ import annotations

import sys

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.grandcode.solving import solve
from agentjax.training.flags import define_config_flag, require_paths
from agentjax.training.progress import print_line

_CONFIG = define_config_flag()
_PROBLEM = flags.DEFINE_string("problem", None, "Text file with the problem.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_PROBLEM, _WORKDIR)
  console = Console()
  chosen = solve(_CONFIG.value, _PROBLEM.value, _WORKDIR.value, console)
  if chosen.code is None:
    console.print("no solution passes the examples", highlight=False)
    sys.exit(1)
  print_line(
    console,
    f"{_WORKDIR.value}/solution.py: {chosen.votes} of {chosen.accepted} solutions that pass the "
    f"examples agree on {sum(chosen.tests.values())} tests",
  )


if __name__ == "__main__":
  main(run)
