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
from agentjax.names import Choice, find_choice
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
        raise _no_field(where, part, hints)
      where = f"{where}.{part}"
      nested = config_type(hints[part])
      if nested is not None and issubclass(nested, Choice):
        break  # make_parents knows which fields the chosen thing has
      if nested is None and i + 1 < len(parts):
        raise ConfigError(f"{where} is a single value and has no field {parts[i + 1]!r}.")
      cls = nested or cls


def _no_field(where: str, part: str, hints: dict[str, Any]) -> ConfigError:
  near = difflib.get_close_matches(part, hints, n=3)
  return ConfigError(
    f"{where} has no field {part!r}"
    + (f"; did you mean {', '.join(near)}?" if near else ".")
    + f" Allowed: {', '.join(sorted(hints))}."
  )


def make_parents(experiment: Experiment, argv: list[str], name: str = "config") -> None:
  """Makes a part that is None, as ``lora``, where a flag sets a field inside it; the rest defaults.

  A part that is a ``Choice`` is made where a flag names its class.

  Raises:
    ConfigError: the part has fields without a default, so that no single flag can make it; a choice
      that no flag and no config has made, or that has no such field.
  """
  for argument, parts in _field_flags(argv, name):
    node: Any = experiment
    where = name
    for i, part in enumerate(parts):
      hints = typing.get_type_hints(type(node))
      if isinstance(node, Choice):
        register_types(type(node))
        if part not in hints:
          raise _no_field(f"{where} ({type(node).__name__})", part, hints)
      cls = config_type(hints.get(part))
      if cls is None:
        break  # a single value, or check_overrides says so
      where = f"{where}.{part}"
      if i + 1 == len(parts):
        _, _, text = argument.partition("=")
        if issubclass(cls, Choice) and text.lower() not in ("", "none", "null"):
          setattr(node, part, find_choice(text, where, cls)())
        break
      if getattr(node, part) is None:
        if issubclass(cls, Choice):
          raise ConfigError(
            f"{where} is None, and {argument} is a setting of what is chosen there; set "
            f"--{where}=module:attribute before it."
          )
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
    elif _is_choice(option):
      names.append(f"module:attribute of a {option.__name__}")
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
  if _is_choice(option):
    return find_choice(text, "the flag", option)()
  if option is bool:
    if text.lower() in ("true", "1"):
      return True
    if text.lower() in ("false", "0"):
      return False
    raise ValueError(text)
  return option(text)


def _is_choice(option: Any) -> bool:
  return isinstance(option, type) and issubclass(option, Choice)


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
    if nested is not None and not issubclass(nested, Choice):
      field.type = hint
      register_types(nested)
    elif hint is bool:
      field.type = bool
    elif not hasattr(field.type, "agentjax_hint"):
      marker = type(describe_hint(hint), (), {"agentjax_hint": hint})
      config_flags.register_flag_parser_for_type(marker, _HintParser(hint))
      field.type = marker
