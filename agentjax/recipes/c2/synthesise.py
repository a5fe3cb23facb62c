r"""Makes rubrics that help a judge and rubrics that mislead it (C2, 2604.13618).

  python -m agentjax.recipes.c2.synthesise --config=configs/c2_generator.py --pairs=pairs.jsonl \
      --generator.path=FOLDER --judge.path=FOLDER --output=runs/c2

A row of the pairs has a ``prompt``, a text or messages, and the texts ``chosen`` and ``rejected``.
The folder is what configs/c2_generator.py and configs/c2_verifier.py read.

A model is a run, a checkpoint or a Hugging Face folder, or stands behind an endpoint
(``--judge.http.base_url=URL --judge.http.model=NAME``). The same command goes on where it was
stopped.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.c2.rubrics import C2Config
from agentjax.recipes.c2.synthesis import (
  generator_config,
  judge_config,
  read_pairs,
  synthesise_rubrics,
)
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_GENERATOR = define_settings_flag("generator", generator_config(), "Writes rubrics.")
_JUDGE = define_settings_flag("judge", judge_config(), "Is helped or misled by them.")
_C2 = define_settings_flag("c2", C2Config(), "How many, and seeds.")
_PAIRS = flags.DEFINE_string("pairs", None, "Preferences (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_TASKS = flags.DEFINE_integer(
  "tasks", None, "Pairs to take, from the first on; all if not given.", lower_bound=1
)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Pairs at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT, _PAIRS)
  console, output = Console(), _OUTPUT.value
  _C2.value.validate("c2")
  pairs = read_pairs(_PAIRS.value, order_seed=_C2.value.order_seed)[: _TASKS.value]
  with ProgressDisplay(console, {}) as display:
    written = synthesise_rubrics(
      _CONFIG.value,
      output,
      pairs=pairs,
      generator=_GENERATOR.value,
      judge=_JUDGE.value,
      c2=_C2.value,
      concurrency=_CONCURRENCY.value,
      report=report_to(display),
    )
  data = written.data
  print_line(
    console,
    f"{output}: {written.rubrics} rubrics of {written.pairs} pairs "
    f"({written.resumed[0]} pairs with rubrics and {written.resumed[1]} with margins from before); "
    f"{data.preferences} preferences for the generator, {data.tasks} tasks for the verifier; "
    f"{written.given_up} pairs given up, {data.too_long} too long for config.rl.row_length, "
    f"{data.too_long_to_verify} for the verifier",
  )
  steps = -(-3 * data.preferences // _CONFIG.value.rl.tasks_per_step)
  print_line(
    console,
    f"train on them with --config.data.path={output}/generator "
    f"--config.rl.rollouts={output}/episodes --config.rl.steps={steps} (three passes), and with "
    f"--config.data.path={output}/verifier",
  )


if __name__ == "__main__":
  main(run, needs_config=False)
