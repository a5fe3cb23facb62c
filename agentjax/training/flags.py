"""The ``--config`` flag: a Python file or a saved JSON, with every field overridable and checked.

``--config=configs/quickstart.py --config.rl.optimizer.learning_rate=1e-4`` loads the file's
``get_config()``, sets the field, then validates and freezes the tree. Fields are set in the order
of the command line: ``--config.rl.objective=dapo`` chooses, and later flags set fields of what was
chosen. ``--config=RUN/config.json`` runs a resolved config again.
"""

from __future__ import annotations

import difflib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from absl import flags

from agentjax.config import Config, ConfigError, Table, type_hints
from agentjax.names import Choice, known_names
from agentjax.training.experiment import Experiment, load_experiment

C = TypeVar("C", bound=Config)
_NOTHING = ("none", "null")

flags.disclaim_key_flags()  # what is defined here belongs to the module that asks for it


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
  help_text = (
    "Python file with get_config() or a run's config.json; fields are set by --config.FIELD=VALUE."
  )
  flag = _TreeFlag(name, load_experiment, help_text, flag_values, argv)
  return flags.DEFINE_flag(flag, flag_values)


def define_settings_flag(
  name: str, settings: C, help_text: str, *, flag_values: flags.FlagValues = flags.FLAGS
) -> flags.FlagHolder[C]:
  """Defines ``--name.field`` flags over settings that come from no file."""
  flag = _TreeFlag(name, None, help_text, flag_values, None, settings)
  return flags.DEFINE_flag(flag, flag_values)


def define_distributed_flags() -> Callable[[], None]:
  """Defines ``--distributed`` and ``--lost_after``; call the result before anything uses jax."""
  distributed = flags.DEFINE_bool(
    "distributed",
    False,
    "One of several processes that work together, started with the same command on every host of a "
    "pod. Directories are then on a file system that all of them share.",
  )
  lost_after = flags.DEFINE_integer(
    "lost_after",
    30,
    "Seconds without a sign of life after which another process counts as lost.",
    lower_bound=2,
  )

  def join() -> None:
    if distributed.value:
      import jax

      jax.distributed.initialize(heartbeat_timeout_seconds=lost_after.value)

  return join


def require_paths(*chosen: flags.FlagHolder[Any]) -> None:
  """Raises ConfigError for the first of the flags that is empty; each names a path."""
  for flag in chosen:
    if not flag.value:
      raise ConfigError(f"--{flag.name}={flag.value!r}; allowed: a path.")


class _TreeFlag(flags.Flag, Generic[C]):
  """A flag whose value is a tree of settings, and that defines the flags of its fields."""

  def __init__(
    self,
    name: str,
    load: Callable[[str], C] | None,
    help_text: str,
    flag_values: flags.FlagValues,
    argv: list[str] | None,
    default: C | None = None,
  ):
    self._load, self._flag_values, self._argv = load, flag_values, argv
    super().__init__(flags.ArgumentParser(), None, name, default, help_text)
    if default is not None:
      self._override(default)

  def _parse(self, argument: Any) -> Any:
    if isinstance(argument, Config):
      return argument
    if self._load is None:
      raise flags.IllegalFlagValueError(f"--{self.name} is set by its fields, --{self.name}.FIELD")
    loaded = self._load(argument)
    self._override(loaded)
    return loaded

  def _override(self, settings: Config) -> None:
    argv = sys.argv if self._argv is None else self._argv
    argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
    for argument, parts, text in _field_flags(argv, self.name):
      switch = set_field(settings, parts, text, self.name, argument)
      word = ".".join([self.name, *parts])
      if word not in self._flag_values:
        parser = flags.BooleanParser() if switch else flags.ArgumentParser()
        taken = flags.Flag(parser, None, word, None, f"sets {word}", boolean=switch)
        flags.DEFINE_flag(taken, self._flag_values)


def set_field(
  settings: Config, parts: list[str], text: str, name: str = "config", argument: str = ""
) -> bool:
  """Sets one field from text.

  Args:
    settings: the tree; not frozen.
    parts: names on the way to the field. A part that is None is made, if all its fields have
      defaults. A ``Choice`` is not made, except in a table where its name is also the name of a
      choice.
    text: the value. A ``Choice`` and an objective are named; "none" is None where that is allowed.
    name: of the tree, for messages.
    argument: the flag as written, for messages.

  Returns:
    whether the field is a bool.

  Raises:
    ConfigError: no such field, a part that must be chosen first, or a value that the field cannot
      have.
  """
  node: Any = settings
  where, held = name, None  # held: what the values of a table are
  for part in parts[:-1]:
    hint = held or _hint(node, part, where)
    node, where = _enter(node, part, hint, f"{where}.{part}", argument), f"{where}.{part}"
    held = table_type(hint)
  hint, where = held or _hint(node, parts[-1], where), f"{where}.{parts[-1]}"
  value = _parse(hint, text, where)
  if isinstance(node, Table):
    node[parts[-1]] = value
  else:
    setattr(node, parts[-1], value)
  return hint is bool


def _enter(node: Any, part: str, hint: Any, where: str, argument: str) -> Any:
  """The value of the field ``part`` of ``node``; made if it is None, or missing in a table."""
  value = node.get(part) if isinstance(node, Table) else getattr(node, part)
  if isinstance(value, Config | Table):
    return value
  cls = config_type(hint)
  if value is not None or cls is None:
    raise ConfigError(f"{where} is a single value and has no fields, which {argument} asks for.")
  named = isinstance(node, Table) and issubclass(cls, Choice) and part in known_names(cls)
  if issubclass(cls, Choice) and not named:
    held = f"; known here: {', '.join(node) or 'nothing'}" if isinstance(node, Table) else ""
    raise ConfigError(
      f"{where} is None, and {argument} is a setting of what is chosen there; set "
      f"--{where}=NAME before it: {cls.allowed()}{held}."
    )
  try:
    made = cls.from_name(part, where) if named else cls()
  except TypeError as error:
    raise ConfigError(f"{where} is None, and {argument} alone cannot make it: {error}.") from None
  if isinstance(node, Table):
    node[part] = made
  else:
    setattr(node, part, made)
  return made


def _hint(node: Config, part: str, where: str) -> Any:
  hints = type_hints(type(node))
  if part not in hints:
    shown = f"{where} ({node.chosen})" if isinstance(node, Choice) else where
    raise _no_field(shown, part, hints)
  return hints[part]


def check_overrides(argv: list[str], name: str = "config") -> None:
  """Raises ConfigError for a ``--config.FIELD`` that does not exist, with the nearest names."""
  for _, parts, _ in _field_flags(argv, name):
    cls: type = Experiment
    where = name
    for i, part in enumerate(parts):
      hints = type_hints(cls)
      if part not in hints:
        raise _no_field(where, part, hints)
      where = f"{where}.{part}"
      nested = config_type(hints[part])
      if table_type(hints[part]) is not None or (nested and issubclass(nested, Choice)):
        break  # set_field knows which fields the chosen thing has
      if nested is None and i + 1 < len(parts):
        raise ConfigError(f"{where} is a single value and has no field {parts[i + 1]!r}.")
      cls = nested or cls


def _no_field(where: str, part: str, hints: Mapping[str, Any]) -> ConfigError:
  near = difflib.get_close_matches(part, hints, n=3)
  return ConfigError(
    f"{where} has no field {part!r}"
    + (f"; did you mean {', '.join(near)}?" if near else ".")
    + f" Allowed: {', '.join(sorted(hints))}."
  )


def _field_flags(argv: list[str], name: str) -> Iterator[tuple[str, list[str], str]]:
  """Every ``--config.FIELD`` of a command line: as written, the way to its field, its value."""
  for i, argument in enumerate(argv[1:], 1):
    bare = argument.lstrip("-")
    negated = bare.startswith(f"no{name}.")
    bare = bare.removeprefix("no") if negated else bare
    if not argument.startswith("-") or not bare.startswith(f"{name}."):
      continue
    word, equals, text = bare.partition("=")
    if not equals:
      following = argv[i + 1] if i + 1 < len(argv) else "-"
      text = "false" if negated else "true" if following.startswith("-") else following
    yield argument, word.split(".")[1:], text


def _parse(hint: Any, text: str, path: str) -> Any:
  """A flag's text as any of the alternatives of a type hint."""
  for option in _alternatives(hint):
    try:
      return _parse_as(option, text, path)
    except ConfigError:
      raise
    except ValueError:
      continue
  raise ConfigError(f"{path}={text!r}; allowed: {describe_hint(hint)}.")


def _parse_as(option: Any, text: str, path: str) -> Any:
  words: dict[str, Any] | None = None
  if option is type(None):
    words, text = dict.fromkeys(_NOTHING), text.lower()
  elif option is bool:
    words, text = {"true": True, "1": True, "false": False, "0": False}, text.lower()
  elif typing.get_origin(option) is typing.Literal:
    words = {str(value): value for value in typing.get_args(option)}
  if words is not None:
    if text not in words:
      raise ValueError(text)
    return words[text]
  if typing.get_origin(option) is tuple:
    parts = [p.strip() for p in text.strip("()[] ").split(",") if p.strip()]
    return tuple(_parse(typing.get_args(option)[0], part, path) for part in parts)
  if isinstance(option, type) and issubclass(option, Config):
    if text.lower() in _NOTHING:
      raise ValueError(text)
    return option.from_name(text, path)
  return option(text)


def describe_hint(hint: Any) -> str:
  """A type hint in words, for messages: ``int or none``, ``one of 'a', 'b'``."""
  names = []
  for option in _alternatives(hint):
    if option is type(None):
      names.append("none")
    elif typing.get_origin(option) is typing.Literal:
      names.append("one of " + ", ".join(map(repr, typing.get_args(option))))
    elif isinstance(option, type) and issubclass(option, Choice):
      names.append(f"one of {option.allowed()}")
    elif typing.get_origin(option) is Table:
      names.append(f"by name, {describe_hint(typing.get_args(option)[0])}")
    elif typing.get_origin(option) is tuple:
      names.append(f"comma-separated {describe_hint(typing.get_args(option)[0])}")
    else:
      names.append(getattr(option, "__name__", str(option)))
  return " or ".join(names)


def _alternatives(hint: Any) -> tuple[Any, ...]:
  """The members of a union, None first: "none" is read as None if that is allowed, not as a
  word."""
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  options = typing.get_args(hint) if union else (hint,)
  return tuple(sorted(options, key=lambda option: option is not type(None)))


def config_type(hint: Any) -> type[Config] | None:
  """The Config among the alternatives of a type hint."""
  for option in _alternatives(hint):
    if isinstance(option, type) and issubclass(option, Config):
      return option
  return None


def table_type(hint: Any) -> Any:
  """The type hint of what a table of this type hint holds; None where it is no table."""
  for option in _alternatives(hint):
    if typing.get_origin(option) is Table:
      return typing.get_args(option)[0]
  return None
