r"""Trains action and state values on frozen features (Digi-Q).

  python -m agentjax.recipes.digi_q.learn --config=runs/logged/config.json \
      --transitions=runs/transitions --backbone=runs/backbone --output=runs/critic

The backbone is read once. ``--output`` then holds ``features.npy``, the state of the heads and
``metrics.jsonl``. The same command goes on where it was stopped. 2502.15760.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.digi_q.learning import learn_critic
from agentjax.recipes.digi_q.settings import CriticConfig
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_CRITIC = define_settings_flag("critic", CriticConfig(), "The heads, and how they learn.")
_TRANSITIONS = flags.DEFINE_string(
  "transitions", None, "Output of agentjax.recipes.digi_q.record.", required=True
)
_BACKBONE = flags.DEFINE_string(
  "backbone", None, "Model that reads texts: a run, a checkpoint or a Hugging Face folder.",
  required=True,
)  # fmt: skip
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_TRANSITIONS, _BACKBONE, _OUTPUT)
  console = Console()
  with ProgressDisplay(console, {}) as display:
    found = learn_critic(
      _CONFIG.value,
      _OUTPUT.value,
      transitions=_TRANSITIONS.value,
      backbone=_BACKBONE.value,
      config=_CRITIC.value,
      report=report_to(display),
    )
  print_line(
    console,
    f"{_OUTPUT.value}: features of block {found.layer}; loss {found.losses[0]:.4f} -> "
    f"{found.losses[1]:.4f}",
  )


if __name__ == "__main__":
  main(run)
