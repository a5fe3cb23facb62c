"""Shows a library of skills, and changes it by hand.

  python -m agentjax.recipes.skillclaw.skills --library=runs/skills
  python -m agentjax.recipes.skillclaw.skills --library=runs/skills --add=FOLDER
  python -m agentjax.recipes.skillclaw.skills --library=runs/skills --withdraw=NAME
  python -m agentjax.recipes.skillclaw.skills --library=runs/skills --restore=NAME@2

``--add`` publishes FOLDER/SKILL.md, or every FOLDER/NAME/SKILL.md, without a replay. A skill that
must not be stored is refused with the reason.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.skillclaw.library import Library, add, by_hand, read_folder
from agentjax.training.flags import require_paths
from agentjax.training.progress import print_table

_LIBRARY = flags.DEFINE_string("library", None, "Folder of the skills.", required=True)
_ADD = flags.DEFINE_string("add", None, "Folder of skills to publish.")
_WITHDRAW = flags.DEFINE_string("withdraw", None, "Name of a skill to take out of use.")
_RESTORE = flags.DEFINE_string("restore", None, "NAME@VERSION to publish again.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_LIBRARY)
  library = Library(_LIBRARY.value)
  if _ADD.value or _WITHDRAW.value or _RESTORE.value:
    with library.writing():
      if _ADD.value:
        add(library, read_folder(_ADD.value))
      if _WITHDRAW.value:
        library.withdraw(_WITHDRAW.value, source=by_hand(), evidence={})
      if _RESTORE.value:
        name, _, version = _RESTORE.value.rpartition("@")
        if not name or not version.isdigit():
          raise ConfigError(f"--restore={_RESTORE.value!r}; allowed: NAME@VERSION.")
        add(library, [library.skill(name, int(version))])
  rows = [
    (
      name,
      record.status,
      str(record.latest.version),
      f"{record.positive} of {record.shown}",
      record.latest.source,
      library.skill(name).description,
    )
    for name, record in sorted(library.records.items())
  ]
  header = ("skill", "status", "version", "served", "changed by", "description")
  print_table(Console(), _LIBRARY.value, header, rows)


if __name__ == "__main__":
  main(run, needs_config=False)
