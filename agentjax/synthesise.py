r"""Makes training data with models that are there already. ``--method`` says how.

``--method=c2``: rubrics that help a judge and rubrics that mislead it, for a generator and a
verifier of rubrics (C2, 2604.13618).

  python -m agentjax.synthesise --method=c2 --config=configs/c2_generator.py --pairs=pairs.jsonl \
      --generator.path=FOLDER --judge.path=FOLDER --output=runs/c2

A row of the pairs has a ``prompt``, a text or messages, and the texts ``chosen`` and ``rejected``.
The folder is what configs/c2_generator.py and configs/c2_verifier.py read.

A model is a run, a checkpoint or a Hugging Face folder, or stands behind an endpoint
(``--teacher.http.base_url=URL --teacher.http.model=NAME``). The same command goes on where it was
stopped.
"""

from __future__ import annotations

from absl import flags
from ml_collections import config_flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.rewards.c2 import C2Config
from agentjax.training.c2_synthesis import (
  JudgeModelConfig,
  generator_config,
  judge_config,
  read_pairs,
  synthesise_rubrics,
)
from agentjax.training.flags import define_config_flag, register_types
from agentjax.training.progress import ProgressDisplay, report_to

_CONFIG = define_config_flag()
for _type in (JudgeModelConfig, C2Config):
  register_types(_type)
_METHOD = flags.DEFINE_enum("method", None, ["c2"], "What is made.", required=True)
_GENERATOR = config_flags.DEFINE_config_dataclass(
  "generator", generator_config(), "c2: writes rubrics."
)
_JUDGE = config_flags.DEFINE_config_dataclass(
  "judge", judge_config(), "c2: is helped or misled by them."
)
_C2 = config_flags.DEFINE_config_dataclass("c2", C2Config(), "c2: how many, and seeds.")
_PAIRS = flags.DEFINE_string("pairs", None, "c2: preferences (.jsonl).")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made; without one nothing is.")
_TASKS = flags.DEFINE_integer(
  "tasks", None, "Training tasks, or pairs, the first so many; all if not given.", lower_bound=1
)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Tasks, or pairs, at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  _rubrics(Console())


def _needed(flag: flags.FlagHolder[str | None]) -> str:
  if not flag.value:
    raise ConfigError(f"--method={_METHOD.value} needs --{flag.name}.")
  return flag.value


def _rubrics(console: Console) -> None:
  output, preferences = _needed(_OUTPUT), _needed(_PAIRS)
  _C2.value.validate("c2")
  pairs = read_pairs(preferences, order_seed=_C2.value.order_seed)[: _TASKS.value]
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
  _say(
    console,
    f"{output}: {written.rubrics} rubrics of {written.pairs} pairs "
    f"({written.resumed[0]} pairs with rubrics and {written.resumed[1]} with margins from before); "
    f"{data.preferences} preferences for the generator, {data.tasks} tasks for the verifier; "
    f"{written.given_up} pairs given up, {data.too_long} too long for config.rl.row_length, "
    f"{data.too_long_to_verify} for the verifier",
  )
  steps = -(-3 * data.preferences // _CONFIG.value.rl.tasks_per_step)
  _say(
    console,
    f"train on them with --config.data.path={output}/generator "
    f"--config.rl.rollouts={output}/episodes --config.rl.steps={steps} (three passes), and with "
    f"--config.data.path={output}/verifier",
  )


def _say(console: Console, text: str) -> None:
  console.print(text, highlight=False, soft_wrap=True)


if __name__ == "__main__":
  main(run, needs_config=False)
