r"""Scores solutions by a process reward model, and marks the best of each task (Math-Shepherd).

  python -m agentjax.recipes.math_shepherd.score --config=CONFIG --checkpoint=runs/math_shepherd \
      --solutions=solutions.jsonl --output=scores.jsonl

Config and solutions are those of ``agentjax.recipes.math_shepherd.label``; the checkpoint is that
of configs/math_shepherd_steps.py. A row of the output has the probability that each step is right
(``scores``), their ``--aggregate`` (``score``), and ``best``. 2312.08935.
"""

from __future__ import annotations

from typing import cast, get_args

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.math_shepherd.scores import score_solutions
from agentjax.recipes.math_shepherd.steps import Aggregate
from agentjax.training.flags import define_config_flag, require_paths
from agentjax.training.progress import print_line

_CONFIG = define_config_flag()
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Process reward model: a run, a checkpoint or a Hugging Face folder.",
  required=True,
)  # fmt: skip
_SOLUTIONS = flags.DEFINE_string("solutions", None, "Solutions in steps (.jsonl).", required=True)
_AGGREGATE = flags.DEFINE_enum(
  "aggregate", "min", get_args(Aggregate), "The score of a solution from its steps'."
)
_OUTPUT = flags.DEFINE_string("output", None, "File to write (.jsonl).", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT, _SOLUTIONS, _CHECKPOINT)
  solutions, tasks = score_solutions(
    _CONFIG.value,
    _OUTPUT.value,
    checkpoint=_CHECKPOINT.value,
    solutions=_SOLUTIONS.value,
    aggregate=cast(Aggregate, _AGGREGATE.value),
  )
  print_line(Console(), f"{_OUTPUT.value}: scores of {solutions} solutions of {tasks} tasks")


if __name__ == "__main__":
  main(run)
