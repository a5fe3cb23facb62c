r"""Days and nights: a player plays the tasks of a config with its skills, which evolve by night.

  python -m agentjax.recipes.skillclaw.days --config=configs/skillclaw_number_game.py \
      --models.player=agentjax.recipes.skillclaw.scripted:GuesserSeat \
      --models.writer=agentjax.recipes.skillclaw.scripted:LessonSeat \
      --skills.retrieval.show=bodies --library=runs/guesser/skills --output=runs/guesser

By day the player takes ``--tasks`` new training tasks of the config, ``--samples`` times each, with
the skills of the library. The night is one of ``agentjax.recipes.skillclaw.evolve`` over these
episodes, and over the files of conversations in ``TRANSCRIPTS/night_NNN``, if there are any.
Replays take held-out tasks of the config.

``--output`` then holds ``day_NNN.store``, the episodes of each day; ``night_NNN``, a folder each;
and ``days.jsonl``, how the days went. The same command goes on where it was stopped; ``--days`` may
be raised. 2604.08377.
"""

from __future__ import annotations

from typing import cast, get_args

from absl import flags
from rich.console import Console

from agentjax.adapters.agent_trajectories import TrajectoryForm
from agentjax.command import main
from agentjax.recipes.skillclaw.loop import live
from agentjax.recipes.skillclaw.night import SkillClawConfig
from agentjax.recipes.skillclaw.play import ModelsConfig, Stage
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_table, report_to

_CONFIG = define_config_flag()
_MODELS = define_settings_flag("models", ModelsConfig(), "Who plays, writes and judges.")
_SKILLS = define_settings_flag("skills", SkillClawConfig(), "The nights.")
_LIBRARY = flags.DEFINE_string("library", None, "Folder of the skills.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_DAYS = flags.DEFINE_integer("days", 6, "Days in all; the source has 6.", lower_bound=1)
_TASKS = flags.DEFINE_integer("tasks", 64, "Tasks of a day.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Episodes of a task.", lower_bound=1)
_TRANSCRIPTS = flags.DEFINE_string(
  "transcripts", None, "Folder with a folder night_NNN of conversations for each night."
)
_FORM = flags.DEFINE_enum("form", "openai", get_args(TrajectoryForm), "How their rows are made.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_LIBRARY, _OUTPUT)
  console = Console()
  _SKILLS.value.validate("skills")
  stage = Stage(_CONFIG.value, _MODELS.value, _SKILLS.value)
  try:
    with ProgressDisplay(console, {}) as display:
      days = live(
        stage,
        _LIBRARY.value,
        _OUTPUT.value,
        _SKILLS.value,
        days=_DAYS.value,
        tasks=_TASKS.value,
        samples=_SAMPLES.value,
        transcripts=_TRANSCRIPTS.value,
        form=cast(TrajectoryForm, _FORM.value),
        report=report_to(display),
      )
  finally:
    stage.close()
  print_table(
    console,
    _OUTPUT.value,
    ("day", "episodes", "success", "skills", "published", "withdrawn"),
    [
      (str(number), str(day.episodes), f"{100 * day.success:.1f}%",
       *(", ".join(names) for names in (day.skills, day.published, day.withdrawn)))
      for number, day in enumerate(days)
    ],
  )  # fmt: skip


if __name__ == "__main__":
  main(run)
