r"""Trains four driving policies, measures them in closed loop, and draws what was seen (RAD-2).

  python -m agentjax.recipes.rad2.train --output=runs/rad2
  python -m agentjax.recipes.rad2.train --output=runs/short --rad2.seeds=1 --rad2.training.rounds=32

A generator learns from demonstrations (imitation). From it three policies are trained in closed
loop: its own on edited trajectories (generator), a discriminator that chooses among its plans
(discriminator), and both. All are measured on the same test scenarios, for each of
``--rad2.seeds``.

``--output`` then holds ``report.json``, ``policies.png`` (crashes and progress with intervals) and
``replay.gif``, and in ``seed_N`` the states, the metrics of each round and the numbers of every
test scenario. The same command goes on where it was stopped. 2604.15308.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.rad2.measuring import EXPERT, POLICIES
from agentjax.recipes.rad2.runs import run as run_all
from agentjax.recipes.rad2.settings import Rad2Config
from agentjax.training.flags import define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_table, report_to

_RAD2 = define_settings_flag("rad2", Rad2Config(), "Traffic, networks and training.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT)
  console = Console()
  with ProgressDisplay(console, {}) as display:
    result = run_all(_RAD2.value, _OUTPUT.value, report_to(display))
  rows = []
  for name in (*POLICIES, EXPERT):
    row = result["policies"][name]
    crashed, progress = row["crashed"], row["progress"]
    rows.append((
      name,
      f"{100 * crashed['mean']:.1f}% [{100 * crashed['low']:.1f}, {100 * crashed['high']:.1f}]",
      f"{progress['mean']:.3f} [{progress['low']:.3f}, {progress['high']:.3f}]",
      f"{100 * row['safe_1s']['mean']:.1f}%",
      f"{100 * row['progress_1']['mean']:.1f}%",
    ))  # fmt: skip
  columns = ("policy", "crashed", "progress", "safe for 1 s", "progress >= 1")
  print_table(console, _OUTPUT.value, columns, rows)


if __name__ == "__main__":
  main(run, needs_config=False)
