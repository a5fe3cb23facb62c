r"""A teacher and a student write traces together, for supervised learning (TESSY, 2604.14164).

  python -m agentjax.recipes.tessy.synthesise --config=configs/tessy_word_problems.py \
      --predictor=runs/boundary --student.path=runs/warm --teacher.path=runs/teacher --output=traces

writes a trace for each of the first ``--tasks`` training tasks of the config's data. The boundary
predictor is a run of configs/tessy_boundary.py; ``--teacher_predictor`` is one of its own for the
teacher's texts, as in the paper. A small classifier of words is trained here within seconds:

  python -m agentjax.recipes.tessy.synthesise --spans=labels.jsonl --predictor=words.npy

A row of the labels has a ``text``, and ``spans`` [[start, end], ...] or verbatim ``phrases`` that
are style (``agentjax.recipes.tessy.label`` makes them). ``--teacher_spans`` trains that of
``--teacher_predictor``. Training on the folder of traces:

  python -m agentjax.train --config=CONFIG --config.data.source=jsonl --config.data.path=traces \
      --config.data.source.messages_field=messages --config.data.source.test_file= ...

A model is a run, a checkpoint or a Hugging Face folder, or stands behind an endpoint
(``--teacher.http.base_url=URL --teacher.http.model=NAME``). The same command goes on where it was
stopped.
"""

from __future__ import annotations

import functools

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.tessy.boundaries import open_predictor
from agentjax.recipes.tessy.flow import TessyConfig
from agentjax.recipes.tessy.traces import WriterConfig, synthesise_traces
from agentjax.training.flags import define_config_flag, define_settings_flag
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_STUDENT = define_settings_flag("student", WriterConfig(), "Writes style.")
_TEACHER = define_settings_flag("teacher", WriterConfig(), "Writes what is hard.")
_TESSY = define_settings_flag("tessy", TessyConfig(), "Chunks and limits.")
_PREDICTOR = flags.DEFINE_string(
  "predictor", None, "Boundary predictor: a run that trained one, or a file of words (.npy)."
)
_TEACHER_PREDICTOR = flags.DEFINE_string(
  "teacher_predictor", None, "That of the teacher's texts; --predictor if not given."
)
_SPANS = flags.DEFINE_string("spans", None, "Labelled texts to train --predictor on first.")
_TEACHER_SPANS = flags.DEFINE_string(
  "teacher_spans", None, "Labelled texts to train --teacher_predictor on first."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the traces; without one none is made.")
_TASKS = flags.DEFINE_integer(
  "tasks", None, "Training tasks to take, from the first on; all if not given.", lower_bound=1
)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Tasks at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  console = Console()
  if _TEACHER_SPANS.value and not _TEACHER_PREDICTOR.value:
    raise ConfigError("--teacher_spans needs --teacher_predictor=FILE to write to.")
  if not _PREDICTOR.value:
    raise ConfigError("--predictor=FILE is needed; --spans=FILE trains one and writes it there.")
  say = functools.partial(print_line, console)
  student = open_predictor(_PREDICTOR.value, _SPANS.value, say)
  teacher = student
  if _TEACHER_PREDICTOR.value:
    teacher = open_predictor(_TEACHER_PREDICTOR.value, _TEACHER_SPANS.value, say)
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
      report=report_to(display),
    )
  say(
    f"{_OUTPUT.value}: {written.traces} traces and {written.given_up} tasks given up, "
    f"{written.kept} of them from before; the teacher wrote {100 * written.teacher_share:.0f}%",
  )


if __name__ == "__main__":
  main(run, needs_config=False)
