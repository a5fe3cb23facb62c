r"""Draws candidate actions, and keeps the best of each state if it is good enough (Digi-Q).

  python -m agentjax.recipes.digi_q.extract --config=runs/logged/config.json \
      --transitions=runs/transitions --critic=runs/critic --backbone=runs/backbone \
      --policy=runs/logged --output=runs/best

``--output`` then holds ``candidates.jsonl`` and ``train.jsonl``, a conversation a state, on which
configs/digi_q_supervised.py trains the policy. The same command goes on where it was stopped; with
another ``--extraction.used`` or ``--extraction.threshold`` it chooses among the same candidates.
2502.15760.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.digi_q.extracting import extract
from agentjax.recipes.digi_q.settings import ExtractionConfig
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_EXTRACTION = define_settings_flag(
  "extraction", ExtractionConfig(), "How many candidates, and which are imitated."
)
_TRANSITIONS = flags.DEFINE_string(
  "transitions", None, "Output of agentjax.recipes.digi_q.record.", required=True
)
_CRITIC = flags.DEFINE_string(
  "critic", None, "Output of agentjax.recipes.digi_q.learn.", required=True
)
_BACKBONE = flags.DEFINE_string("backbone", None, "Backbone of the critic.", required=True)
_POLICY = flags.DEFINE_string(
  "policy", None, "Policy that draws: a run, a checkpoint or a Hugging Face folder.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "States at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_TRANSITIONS, _CRITIC, _BACKBONE, _POLICY, _OUTPUT)
  console = Console()
  with ProgressDisplay(console, {}) as display:
    found = extract(
      _CONFIG.value,
      _OUTPUT.value,
      transitions=_TRANSITIONS.value,
      critic=_CRITIC.value,
      backbone=_BACKBONE.value,
      policy=_POLICY.value,
      config=_EXTRACTION.value,
      concurrency=_CONCURRENCY.value,
      report=report_to(display),
    )
  print_line(
    console,
    f"{_OUTPUT.value}: {found.imitated} of {found.states} states have an action worth imitating; "
    f"the best have a mean advantage of {found.mean_advantage:.3f} ({found.kept} states were there "
    "before)",
  )


if __name__ == "__main__":
  main(run)
