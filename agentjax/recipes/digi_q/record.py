r"""Makes transitions of stored episodes, and questions for the backbone (Digi-Q).

  python -m agentjax.recipes.digi_q.record --config=runs/logged/config.json \
      --checkpoint=runs/logged --trajectories=runs/logged --output=runs/transitions

``--trajectories`` is a run, a journal or a store; ``--checkpoint`` names the policy that played,
and the world of ``--config`` has the tasks. ``--output`` then holds ``transitions.jsonl``, a row a
turn, and ``representation/train.jsonl``, for each turn the question whether its action changes what
is seen next, on which configs/digi_q_supervised.py trains the backbone. 2502.15760.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.digi_q.recording import record
from agentjax.recipes.digi_q.settings import RecordConfig
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import print_line

_CONFIG = define_config_flag()
_RECORD = define_settings_flag(
  "record", RecordConfig(), "What of an episode is compared and shown."
)
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Policy that played: a run, a checkpoint or a Hugging Face folder.",
  required=True,
)  # fmt: skip
_TRAJECTORIES = flags.DEFINE_string(
  "trajectories", None, "Run, journal or store of episodes.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_CHECKPOINT, _TRAJECTORIES, _OUTPUT)
  found = record(
    _CONFIG.value,
    _OUTPUT.value,
    checkpoint=_CHECKPOINT.value,
    trajectories=_TRAJECTORIES.value,
    config=_RECORD.value,
  )
  refused = "; ".join(f"{count} refused: {reason}" for reason, count in found.refused.items())
  print_line(
    Console(),
    f"{_OUTPUT.value}: {found.transitions} transitions of {found.episodes} episodes, "
    f"{found.unwritable} of them without a history in messages; {found.changed} of "
    f"{found.questions} actions change what is seen" + (f"; {refused}" if refused else ""),
  )


if __name__ == "__main__":
  main(run)
