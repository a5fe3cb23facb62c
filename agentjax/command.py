"""Shared by all commands: flags, help, one-line errors, exit statuses, compiled programs.

A command ends with 0, or with a status that its docstring names. It ends with 2 if flags, data,
files or settings are wrong: it prints one line on stderr and writes the trace to ``errors.log`` in
the folder for caches (``$XDG_CACHE_HOME/agentjax``, ``~/.cache/agentjax``). Any other exception is
a fault of the program, which ends with the trace and 1.

Compiled programs are kept in the same folder, so that the next start need not compile them again.
``JAX_COMPILATION_CACHE_DIR`` names another place; an empty value switches it off.
"""

from __future__ import annotations

import datetime
import io
import os
import pathlib
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable
from logging import LogRecord
from types import ModuleType
from typing import Any

from absl import app, flags, logging

from agentjax.config import ConfigError
from agentjax.text.printable import printable
from agentjax.training.flags import check_overrides

UNUSABLE = 2  # exit status: flags, data, files or settings that cannot be used
COMMON_FIELDS = (
  "name",
  "seed",
  "pretrained",
  "start_from",
  "data.source",
  "data.path",
  "world",
  "tools.names",
  "supervised.steps",
  "supervised.optimizer.learning_rate",
  "rl.steps",
  "rl.tasks_per_step",
  "rl.optimizer.learning_rate",
  "rollout.group_size",
  "rollout.max_turns",
  "engine.slots",
  "engine.max_length",
  "evaluation.every",
  "checkpoint.every",
  "lora.rank",
  "mesh.data",
  "mesh.fsdp",
)
_LOG_BYTES = 1 << 20  # errors.log starts anew beyond this size


def main(run: Callable[[list[str]], Any], *, needs_config: bool = True) -> None:
  """Parses the command line and calls ``run``; see this module's docstring.

  Args:
    run: the command.
    needs_config: whether a command that has ``--config`` refuses to start without it.
  """
  if any(word in ("--help", "-h", "--helpshort", "-help") for word in sys.argv[1:]):
    print(help_text(sys.modules["__main__"]))
    sys.exit(0)

  def parse(argv: list[str]) -> list[str]:
    try:
      check_overrides(argv)
      words = flags.FLAGS(argv)
      if len(words) > 1:
        raise ConfigError(
          f"stray word {words[1]!r}; a command takes flags alone, --NAME=VALUE, and none behind --."
        )
      if needs_config and "config" in flags.FLAGS and not flags.FLAGS["config"].present:
        raise ConfigError(
          "--config is missing; give a file, such as --config=configs/quickstart.py or a run's "
          "config.json."
        )
    except (flags.Error, ConfigError) as error:
      _refuse(str(error))
    return words

  def guarded(argv: list[str]) -> Any:
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # libraries tell every file they write
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors="backslashreplace")  # of a locale that cannot write all letters
    logging.get_absl_handler().setFormatter(_PrintableFormatter())
    _keep_compiled_programs()
    try:
      return run(argv)
    except BrokenPipeError:  # whoever read the output has gone
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      sys.exit(UNUSABLE)
    except Exception as error:
      if not _is_unusable_input(error):
        raise
      _refuse(_one_line(error), trace=traceback.format_exc())

  app.run(guarded, flags_parser=parse)


class _PrintableFormatter(logging.PythonFormatter):
  """What is logged may have the words of a model in it; a terminal must not obey them."""

  def format(self, record: LogRecord) -> str:
    return printable(super().format(record))


def help_text(module: ModuleType) -> str:
  """A command's docstring, its flags, and the fields of a config that most runs set."""
  from agentjax.fields import describe_field, list_fields

  lines = [(module.__doc__ or "").strip(), "", "flags:"]
  own = flags.FLAGS.get_key_flags_for_module(module)
  config = [flags.FLAGS["config"]] if "config" in flags.FLAGS else []
  for flag in dict.fromkeys([*config, *own]):
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}="
    default = "" if flag.default is None or flag.name == "config" else f" (default: {flag.default})"
    lines.append(f"  {name}")
    lines += textwrap.wrap(
      f"{flag.help}{default}", 92, initial_indent="      ", subsequent_indent="      "
    )
  if config:
    by_name = {field.name: field for field in list_fields()}
    lines += ["", "fields of --config that most runs set (agentjax fields PREFIX lists others):"]
    for name in COMMON_FIELDS:
      lines.append(textwrap.indent(describe_field(by_name[name]), "  "))
  return "\n".join(lines)


def cache_folder() -> pathlib.Path:
  """The folder for caches."""
  home = os.environ.get("XDG_CACHE_HOME")
  return (pathlib.Path(home) if home else pathlib.Path.home() / ".cache") / "agentjax"


def _keep_compiled_programs() -> None:
  if "JAX_COMPILATION_CACHE_DIR" in os.environ:
    return
  import jax

  jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _is_unusable_input(error: Exception) -> bool:
  """Whether an exception is about flags, data, files or settings, and not a fault of the code.

  Such are errors of this package, including a ValueError that its own code raised, and errors of
  the system that name a file.
  """
  if isinstance(error, OSError) or _is_ours(type(error).__module__):
    return True
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  return isinstance(error, ValueError) and _is_ours(frame.f_globals.get("__name__", ""))


def _is_ours(module: str) -> bool:
  return module.partition(".")[0] in ("agentjax", "pallas_kernels")


def _one_line(error: Exception) -> str:
  if isinstance(error, OSError) and error.strerror:
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
  return " ".join(str(error).split()) or type(error).__name__


def _refuse(message: str, *, trace: str | None = None) -> None:
  """Ends the program with one line, and the trace in the log."""
  where = _log(trace) if trace is not None else None
  print(f"error: {printable(message)}" + (f" (trace: {where})" if where else ""), file=sys.stderr)
  sys.exit(UNUSABLE)


def _log(trace: str) -> pathlib.Path | None:
  """The file that the trace was added to; None where none can be written."""
  path = cache_folder() / "errors.log"
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    grown = path.exists() and path.stat().st_size > _LOG_BYTES
    with path.open("w" if grown else "a", encoding="utf-8") as file:
      now = datetime.datetime.now().isoformat(timespec="seconds")
      file.write(f"{now} {shlex.join(sys.argv)}\n{trace}\n")
  except OSError:
    return None
  return path
