r"""A teacher criticises answers and knows which is better; what a student learns (RationalRewards).

  python -m agentjax.recipes.rational_rewards.synthesise --pairs=pairs.jsonl --output=runs/parrot \
      --teacher.http.base_url=URL --teacher.http.model=NAME

A row of the pairs has the texts ``prompt``, ``chosen`` and ``rejected``, or is one of HH-RLHF;
``.gz`` is read too. The checker, by default the teacher, predicts the better answer from the
critiques and is not told; pairs in which it fails are dropped. configs/rational_rewards_student.py
trains on ``runs/parrot/student``. The same command goes on where it was stopped.

A model is a run, a checkpoint or a Hugging Face folder (``--teacher.path=FOLDER``, served by the
engine of ``--config``), or stands behind an endpoint. 2604.11626.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.adapters.judge_model import JudgeModelConfig
from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.rational_rewards.parrot import ParrotConfig, read_preferences
from agentjax.recipes.rational_rewards.student import write_student_data
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_TEACHER = define_settings_flag("teacher", JudgeModelConfig(), "Writes critiques.")
_CHECKER = define_settings_flag("checker", JudgeModelConfig(), "Predicts labels from them.")
_PARROT = define_settings_flag("parrot", ParrotConfig(), "Aspects and seed.")
_PAIRS = flags.DEFINE_string("pairs", None, "Preferences (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_FIRST = flags.DEFINE_integer("first", 0, "Pairs to pass over.", lower_bound=0)
_TASKS = flags.DEFINE_integer(
  "tasks", None, "Pairs to take, from there on; all if not given.", lower_bound=1
)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Pairs at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT, _PAIRS)
  checker = _CHECKER.value
  named = bool(checker.path or checker.http.base_url)
  console = Console()
  pairs = read_preferences(_PAIRS.value)[_FIRST.value :][: _TASKS.value]
  if not pairs:
    raise ConfigError(f"--first={_FIRST.value}; allowed: fewer than the pairs of --pairs.")
  with ProgressDisplay(console, {}) as display:
    written = write_student_data(
      _CONFIG.value,
      _OUTPUT.value,
      preferences=pairs,
      teacher=_TEACHER.value,
      checker=checker if named else _TEACHER.value,
      parrot=_PARROT.value,
      concurrency=_CONCURRENCY.value,
      report=report_to(display),
    )
  checked = written.pairs - written.given_up
  print_line(
    console,
    f"{_OUTPUT.value}: {written.kept} of {checked} pairs kept ({written.by_words} by the words, "
    f"{written.by_grades} by the grades), {written.given_up} given up; "
    f"{written.resumed[0]} pairs with critiques and {written.resumed[1]} with checks from before; "
    f"{written.conversations} conversations for the student",
  )


if __name__ == "__main__":
  main(run, needs_config=False)
