r"""A night: skills evolve from sessions of agents, and replays decide what is published.

  python -m agentjax.recipes.skillclaw.evolve --transcripts=sessions --library=skills \
      --output=nights/001 --skills.publish=propose \
      --models.writer=service --models.writer.endpoint.base_url=http://host:8000/v1 \
      --models.writer.endpoint.model=NAME

``--transcripts`` is a folder of conversations with calls (.jsonl, .json, .traj; ``--form`` openai,
sharegpt or adp). They are untrusted. ``propose`` publishes nothing: ``decisions.jsonl`` holds what
is proposed. To publish, name tasks of your own and who replays them with and without a proposal:

  python -m agentjax.recipes.skillclaw.evolve --config=configs/quickstart.py \
      --models.player=checkpoint --models.player.path=runs/quickstart \
      --trajectories=runs/quickstart ...

``--trajectories`` takes the episodes of a run, a journal or a store that this player has played,
beside or instead of transcripts. The same command goes on where it was stopped. Extra [web] for
models behind endpoints. 2604.08377.
"""

from __future__ import annotations

from typing import cast, get_args

from absl import flags
from rich.console import Console

from agentjax.adapters.agent_trajectories import TrajectoryForm
from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.skillclaw.loop import Material, evolve
from agentjax.recipes.skillclaw.night import SkillClawConfig
from agentjax.recipes.skillclaw.play import ModelsConfig, Stage
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_MODELS = define_settings_flag("models", ModelsConfig(), "Who plays, writes and judges.")
_SKILLS = define_settings_flag("skills", SkillClawConfig(), "The night.")
_TRANSCRIPTS = flags.DEFINE_string("transcripts", None, "Folder of conversations.")
_FORM = flags.DEFINE_enum("form", "openai", get_args(TrajectoryForm), "How their rows are made.")
_TRAJECTORIES = flags.DEFINE_string("trajectories", None, "Run, journal or store of episodes.")
_LIBRARY = flags.DEFINE_string("library", None, "Folder of the skills.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_NIGHT = flags.DEFINE_integer(
  "night", 0, "Number of the night; each has its own held-out cases.", lower_bound=0
)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_LIBRARY, _OUTPUT)
  console, models, config = Console(), _MODELS.value, _SKILLS.value
  config.validate("skills")
  models.validate("models")
  if config.publish == "validated" and (_CONFIG.value is None or models.player is None):
    raise ConfigError(
      "skills.publish='validated' replays tasks: give --config=FILE with tasks and "
      "--models.player=NAME, who plays them, or --skills.publish=propose, which publishes nothing."
    )
  stage = None if _CONFIG.value is None else Stage(_CONFIG.value, models, config)
  try:
    with ProgressDisplay(console, {}) as display:
      found, refused = evolve(
        stage,
        _LIBRARY.value,
        _OUTPUT.value,
        models,
        config,
        Material(_TRANSCRIPTS.value, cast(TrajectoryForm, _FORM.value), _TRAJECTORIES.value),
        night=_NIGHT.value,
        report=report_to(display),
      )
  finally:
    if stage is not None:
      stage.close()
  lines = [
    f"{_OUTPUT.value}: {found.sessions} sessions in {found.groups} groups",
    *(f"could not be read: {reason}" for reason in refused[:5]),
    *(
      f"{verdict}: {', '.join(names)}"
      for verdict, names in (
        ("withdrawn", found.withdrawn), ("published", found.published),
        ("proposed", found.proposed), ("skipped", found.skipped),
      )
      if names
    ),
    *(f"refused for {group}: {found.reasons[group]}" for group in found.refused),
  ]  # fmt: skip
  for line in lines:
    print_line(console, line)


if __name__ == "__main__":
  main(run, needs_config=False)
