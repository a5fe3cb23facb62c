r"""How often a judge of single answers grades the better of two higher (RationalRewards).

  python -m agentjax.recipes.rational_rewards.compare --pairs=pairs.jsonl --first=300 \
      --config=configs/rational_rewards_student.py --config.pretrained=FOLDER \
      --judge.path=runs/student

Pairs are read as by ``...rational_rewards.synthesise``. Take others than the judge was trained on
(``--first``). The judge is a run, a checkpoint or a Hugging Face folder, or stands behind an
endpoint (``--judge.http.base_url=URL --judge.http.model=NAME``). 2604.11626.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.adapters.judge_model import JudgeModelConfig
from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.rational_rewards.parrot import ParrotConfig, read_preferences
from agentjax.recipes.rational_rewards.student import measure_judge
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_JUDGE = define_settings_flag("judge", JudgeModelConfig(), "Such as the student.")
_PARROT = define_settings_flag("parrot", ParrotConfig(), "Aspects and seed.")
_PAIRS = flags.DEFINE_string("pairs", None, "Preferences (.jsonl).", required=True)
_FIRST = flags.DEFINE_integer("first", 0, "Pairs to pass over.", lower_bound=0)
_TASKS = flags.DEFINE_integer(
  "tasks", None, "Pairs to take, from there on; all if not given.", lower_bound=1
)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Pairs at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_PAIRS)
  console = Console()
  pairs = read_preferences(_PAIRS.value)[_FIRST.value :][: _TASKS.value]
  if not pairs:
    raise ConfigError(f"--first={_FIRST.value}; allowed: fewer than the pairs of --pairs.")
  with ProgressDisplay(console, {}) as display:
    estimate, left_out = measure_judge(
      _CONFIG.value,
      preferences=pairs,
      judge=_JUDGE.value,
      parrot=_PARROT.value,
      concurrency=_CONCURRENCY.value,
      report=report_to(display),
    )
  print_line(
    console,
    f"{estimate} of {estimate.count} pairs in the right order; {left_out} left out: too long for "
    "the judge, or refused by its endpoint",
  )


if __name__ == "__main__":
  main(run, needs_config=False)
