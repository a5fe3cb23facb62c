"""Trains an experiment, resumes it, or replays one of its steps.

  python -m agentjax.train --config=configs/quickstart.py --workdir=runs/quickstart
  python -m agentjax.train --config=configs/quickstart.py --workdir=runs/b --config.seed=1
  python -m agentjax.train --config=runs/b/config.json --workdir=runs/b --replay_step=12

The same command on the same directory resumes; rl.steps, evaluation, checkpoint, mesh and a few
more settings may change on the way (docs/runs.md). Exit status: 0 finished or replayed identically,
1 replayed with another result, 2 settings that cannot be used, 3 interrupted, 4 another of several
processes failed or is gone: the same command on every host goes on.
"""

from __future__ import annotations

import sys

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.training.flags import define_config_flag, define_distributed_flags

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Directory of the run; created when missing.", required=True
)
_REPLAY_STEP = flags.DEFINE_integer(
  "replay_step",
  None,
  "Execute this recorded step again from checkpoint and journal, and compare.",
  lower_bound=1,
)
_ALLOW_CHANGES = flags.DEFINE_bool(
  "allow_changes",
  False,
  "Resume where what the run was extended with (extensions.json) has changed since it began.",
)
_join_others = define_distributed_flags()


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  _join_others()
  from agentjax.training.run import Run

  console = Console()
  session = Run(_CONFIG.value, _WORKDIR.value, console=console, allow_changes=_ALLOW_CHANGES.value)
  if _REPLAY_STEP.value is not None:
    replayed = session.replay(_REPLAY_STEP.value)
    verdict = "identical" if replayed.identical else "DIFFERENT"
    console.print(
      f"step {replayed.step}: recorded {replayed.recorded}, "
      f"replayed {replayed.replayed}: {verdict}",
      highlight=False,
    )
    sys.exit(0 if replayed.identical else 1)
  if not session.train().finished:
    sys.exit(3)


if __name__ == "__main__":
  main(run)
