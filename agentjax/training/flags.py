"""The ``--config`` flag: a Python file or a saved JSON, with every field overridable and checked.

``--config=configs/quickstart.py --config.rl.optimizer.learning_rate=1e-4`` loads the file's
``get_config()``, sets the field, then validates and freezes the tree. ``--config=RUN/config.json``
runs a resolved config again.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from absl import flags
from ml_collections import config_flags

from agentjax.config import Config, ConfigError
from agentjax.training.experiment import Experiment, load_experiment


def define_config_flag(
  name: str = "config",
  *,
  flag_values: flags.FlagValues = flags.FLAGS,
  argv: list[str] | None = None,
) -> flags.FlagHolder[Experiment]:
  """Defines ``--config`` and, from the command line, ``--config.field`` flags.

  Args:
    name: of the flag.
    flag_values: where it is defined.
    argv: command line the field flags are found in; None is that of the process.
  """
  register_types(Experiment)
  given = sys.argv if argv is None else argv

  def parse(path: Any) -> Experiment:
    experiment = path if isinstance(path, Experiment) else load_experiment(path)
    make_parents(experiment, given, name)
    return experiment

  return config_flags.DEFINE_config_dataclass(
    name,
    Experiment(),
    "Python file with get_config() or a run's config.json; fields are set by --config.FIELD=VALUE.",
    flag_values=flag_values,
    sys_argv=argv,
    parse_fn=parse,
  )


def check_overrides(argv: list[str], name: str = "config") -> None:
  """Raises ConfigError for a ``--config.FIELD`` that does not exist, with the nearest names."""
  for _, parts in _field_flags(argv, name):
    cls: type = Experiment
    where = name
    for i, part in enumerate(parts):
      hints = typing.get_type_hints(cls)
      if part not in hints:
        near = difflib.get_close_matches(part, hints, n=3)
        raise ConfigError(
          f"{where} has no field {part!r}"
          + (f"; did you mean {', '.join(near)}?" if near else ".")
          + f" Allowed: {', '.join(sorted(hints))}."
        )
      where = f"{where}.{part}"
      nested = config_type(hints[part])
      if nested is None and i + 1 < len(parts):
        raise ConfigError(f"{where} is a single value and has no field {parts[i + 1]!r}.")
      cls = nested or cls


def make_parents(experiment: Experiment, argv: list[str], name: str = "config") -> None:
  """Makes a part that is None, as ``lora``, where a flag sets a field inside it; the rest defaults.

  Raises:
    ConfigError: the part has fields without a default, so that no single flag can make it.
  """
  for argument, parts in _field_flags(argv, name):
    node: Any = experiment
    where = name
    for part in parts[:-1]:
      cls = config_type(typing.get_type_hints(type(node)).get(part))
      if cls is None:
        break  # check_overrides says so
      where = f"{where}.{part}"
      if getattr(node, part) is None:
        try:
          setattr(node, part, cls())
        except TypeError as error:
          raise ConfigError(
            f"{where} is None, and {argument} alone cannot make it: {error}."
          ) from None
      node = getattr(node, part)


def _field_flags(argv: list[str], name: str) -> Iterator[tuple[str, list[str]]]:
  """Every ``--config.FIELD`` of a command line, and the names on the way to its field."""
  for argument in argv[1:]:
    stripped = argument.lstrip("-")
    stripped = stripped.removeprefix("no") if stripped.startswith(f"no{name}.") else stripped
    if argument.startswith("-") and stripped.startswith(f"{name}."):
      yield argument, stripped.split("=", 1)[0].split(".")[1:]


class _HintParser(flags.ArgumentParser):
  """Parses a flag's text as any of the alternatives of a type hint."""

  def __init__(self, hint: Any):
    self.hint = hint

  def parse(self, argument: Any) -> Any:
    if not isinstance(argument, str):
      return argument
    for option in _alternatives(self.hint):
      try:
        return _parse_text(argument, option)
      except ValueError:
        continue
    raise ValueError(f"got {argument!r}; allowed: {describe_hint(self.hint)}")

  def flag_type(self) -> str:
    return describe_hint(self.hint)


def describe_hint(hint: Any) -> str:
  """A type hint in words, for messages: ``int or none``, ``one of 'a', 'b'``."""
  names = []
  for option in _alternatives(hint):
    if option is type(None):
      names.append("none")
    elif typing.get_origin(option) is typing.Literal:
      names.append("one of " + ", ".join(map(repr, typing.get_args(option))))
    elif typing.get_origin(option) is tuple:
      names.append(f"comma-separated {describe_hint(typing.get_args(option)[0])}")
    else:
      names.append(getattr(option, "__name__", str(option)))
  return " or ".join(names)


def _alternatives(hint: Any) -> tuple[Any, ...]:
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  return typing.get_args(hint) if union else (hint,)


def _parse_text(text: str, option: Any) -> Any:
  if option is type(None):
    if text.lower() in ("none", "null"):
      return None
    raise ValueError(text)
  if typing.get_origin(option) is typing.Literal:
    for value in typing.get_args(option):
      if text == str(value):
        return value
    raise ValueError(text)
  if typing.get_origin(option) is tuple:
    inner = typing.get_args(option)[0]
    parts = [p.strip() for p in text.strip("()[] ").split(",") if p.strip()]
    return tuple(_HintParser(inner).parse(p) for p in parts)
  if option is bool:
    if text.lower() in ("true", "1"):
      return True
    if text.lower() in ("false", "0"):
      return False
    raise ValueError(text)
  return option(text)


def config_type(hint: Any) -> type[Config] | None:
  """The Config among the alternatives of a type hint."""
  for option in _alternatives(hint):
    if isinstance(option, type) and issubclass(option, Config):
      return option
  return None


def register_types(cls: type[Config]) -> None:
  """Gives config_flags a parser for the type of every field of ``cls``, so that flags may set it.

  config_flags reads ``Field.type``, which is a string under postponed annotations and knows no
  Literal and no "none"; a marker class per hint, with a registered parser, replaces it.
  """
  hints = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    hint = hints[field.name]
    nested = config_type(hint)
    if nested is not None:
      field.type = hint
      register_types(nested)
    elif hint is bool:
      field.type = bool
    elif not hasattr(field.type, "agentjax_hint"):
      marker = type(describe_hint(hint), (), {"agentjax_hint": hint})
      config_flags.register_flag_parser_for_type(marker, _HintParser(hint))
      field.type = marker
