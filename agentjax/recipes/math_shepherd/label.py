r"""Labels the steps of solutions by completions that are played from them (Math-Shepherd).

  python -m agentjax.recipes.math_shepherd.label --config=CONFIG --checkpoint=runs/policy \
      --solutions=solutions.jsonl --output=runs/steps

A row of the solutions has ``task``, the id of a task of the config's data, and ``steps``, a list of
lines. ``--trajectories=RUN`` takes the episodes of one turn of a run, a journal or a store instead;
each line is a step.

``--output`` then holds ``labels.jsonl``, a row a solution, and ``train.jsonl``, a conversation a
step, which configs/math_shepherd_steps.py trains a process reward model on. The same command goes
on where it was stopped. 2312.08935.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.math_shepherd.labels import LabelConfig, label_solutions
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_LABELS = define_settings_flag("labels", LabelConfig(), "How many completions, and what succeeds.")
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Policy that completes: a run, a checkpoint or a Hugging Face folder.",
  required=True,
)  # fmt: skip
_SOLUTIONS = flags.DEFINE_string("solutions", None, "Solutions in steps (.jsonl).")
_TRAJECTORIES = flags.DEFINE_string("trajectories", None, "Run, journal or store of solutions.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Completions at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT, _CHECKPOINT)
  console = Console()
  with ProgressDisplay(console, {}) as display:
    written = label_solutions(
      _CONFIG.value,
      _OUTPUT.value,
      checkpoint=_CHECKPOINT.value,
      solutions=_SOLUTIONS.value,
      trajectories=_TRAJECTORIES.value,
      labels=_LABELS.value,
      concurrency=_CONCURRENCY.value,
      report=report_to(display),
    )
  print_line(
    console,
    f"{_OUTPUT.value}: {written.solutions} solutions, {written.kept} of them from before; "
    f"{written.right} of {written.steps} labelled steps are right",
  )


if __name__ == "__main__":
  main(run)
