r"""Makes training data with models that are there already. ``--method`` says how.

``--method=tessy``: a teacher and a student write traces together, for supervised learning (TESSY,
2604.14164).

  python -m agentjax.synthesise --method=tessy --spans=labels.jsonl --predictor=words.npy

trains the boundary predictor: a row has a ``text``, and ``spans`` [[start, end], ...] or verbatim
``phrases`` that are style. ``--teacher_spans`` and ``--teacher_predictor`` make one of its own for
the teacher's texts. Then

  python -m agentjax.synthesise --method=tessy --config=configs/tessy_word_problems.py \
      --predictor=words.npy --student.path=runs/warm --teacher.path=runs/teacher --output=traces

writes a trace for each of the first ``--tasks`` training tasks of the config's data. Training on
the folder:

  python -m agentjax.train --config=CONFIG --config.data.source=jsonl --config.data.path=traces \
      --config.data.jsonl.messages_field=messages --config.data.jsonl.test_file= ...

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

import sys

from absl import flags
from ml_collections import config_flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.data.synthesis_folder import Report
from agentjax.data.tessy import TessyConfig, WordClassifier, read_spans
from agentjax.rewards.c2 import C2Config
from agentjax.training.c2_synthesis import (
  JudgeModelConfig,
  generator_config,
  judge_config,
  read_pairs,
  synthesise_rubrics,
)
from agentjax.training.flags import define_config_flag, register_types
from agentjax.training.progress import ProgressDisplay
from agentjax.training.synthesis import WriterConfig, synthesise_traces

_CONFIG = define_config_flag()
for _type in (WriterConfig, TessyConfig, JudgeModelConfig, C2Config):
  register_types(_type)
_METHOD = flags.DEFINE_enum("method", None, ["tessy", "c2"], "What is made.", required=True)
_STUDENT = config_flags.DEFINE_config_dataclass("student", WriterConfig(), "tessy: writes style.")
_TEACHER = config_flags.DEFINE_config_dataclass(
  "teacher", WriterConfig(), "tessy: writes what is hard."
)
_TESSY = config_flags.DEFINE_config_dataclass("tessy", TessyConfig(), "tessy: chunks and limits.")
_PREDICTOR = flags.DEFINE_string("predictor", None, "tessy: boundary predictor (.npy).")
_TEACHER_PREDICTOR = flags.DEFINE_string(
  "teacher_predictor", None, "tessy: that of the teacher's texts; --predictor if not given."
)
_SPANS = flags.DEFINE_string("spans", None, "tessy: labelled texts to train --predictor on first.")
_TEACHER_SPANS = flags.DEFINE_string(
  "teacher_spans", None, "tessy: labelled texts to train --teacher_predictor on first."
)
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

_OF_METHOD = {
  "tessy": ("student", "teacher", "tessy", "predictor", "teacher_predictor", "spans",
            "teacher_spans"),
  "c2": ("generator", "judge", "c2", "pairs"),
}  # fmt: skip

_HELD_OUT = 10  # one labelled text in so many measures the predictor


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  method = _METHOD.value
  _check_flags(method, sys.argv[1:])
  console = Console()
  _tessy(console) if method == "tessy" else _rubrics(console)


def _check_flags(method: str, arguments: list[str]) -> None:
  """Raises ConfigError for what the other method takes."""
  given = {a.lstrip("-").split("=")[0].split(".")[0] for a in arguments if a.startswith("-")}
  for other, names in _OF_METHOD.items():
    if other != method and (strange := given & set(names)):
      raise ConfigError(f"--{min(strange)} is a flag of --method={other}, not of {method}.")


def _needed(flag: flags.FlagHolder[str | None]) -> str:
  if not flag.value:
    raise ConfigError(f"--method={_METHOD.value} needs --{flag.name}.")
  return flag.value


def _tessy(console: Console) -> None:
  if _TEACHER_SPANS.value and not _TEACHER_PREDICTOR.value:
    raise ConfigError("--teacher_spans needs --teacher_predictor=FILE to write to.")
  student = _predictor(_needed(_PREDICTOR), _SPANS.value, console)
  teacher = student
  if _TEACHER_PREDICTOR.value:
    teacher = _predictor(_TEACHER_PREDICTOR.value, _TEACHER_SPANS.value, console)
  if _OUTPUT.value is None:
    return
  with ProgressDisplay(console, {}) as display:
    written = synthesise_traces(
      _CONFIG.value,
      _OUTPUT.value,
      writers={"student": _STUDENT.value, "teacher": _TEACHER.value},
      predictors={"student": student, "teacher": teacher},
      tessy=_TESSY.value,
      tasks=_TASKS.value,
      concurrency=_CONCURRENCY.value,
      report=_shown(display),
    )
  _say(
    console,
    f"{_OUTPUT.value}: {written.traces} traces and {written.given_up} tasks given up, "
    f"{written.kept} of them from before; the teacher wrote {100 * written.teacher_share:.0f}%",
  )


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
      report=_shown(display),
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


def _shown(display: ProgressDisplay) -> Report:
  """Shows each kind of row as a stage of its own."""

  def report(what: str, done: int, total: int) -> None:
    if what != display.stage_name:
      display.stage(what, total, done)
    display.update(done, {})

  return report


def _predictor(path: str, spans: str | None, console: Console) -> WordClassifier:
  """The predictor of a file, trained and written first where labelled texts are given."""
  if spans is None:
    try:
      return WordClassifier.load(path)
    except (OSError, ValueError) as error:
      raise ConfigError(
        f"{path} is no boundary predictor ({error}); train one with --spans."
      ) from error
  texts, found = read_spans(spans)
  try:
    if len(texts) >= _HELD_OUT:
      rest = [i for i in range(len(texts)) if i % _HELD_OUT]
      trial = WordClassifier.train([texts[i] for i in rest], [found[i] for i in rest])
      share = trial.accuracy(texts[::_HELD_OUT], found[::_HELD_OUT])
      _say(console, f"{spans}: {100 * share:.1f}% of the words of held-out texts are told right")
    predictor = WordClassifier.train(texts, found)
  except ValueError as error:
    raise ConfigError(f"{spans}: {error}") from error
  predictor.save(path)
  _say(console, f"{path}: trained on {len(texts)} texts")
  return predictor


def _say(console: Console, text: str) -> None:
  console.print(text, highlight=False, soft_wrap=True)


if __name__ == "__main__":
  main(run, needs_config=False)
