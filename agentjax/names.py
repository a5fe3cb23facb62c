"""What a setting names by ``module:attribute``: the one way from such a name to the object."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from typing import Any, Self, TypeVar

from agentjax.config import Config, ConfigError, check

C = TypeVar("C", bound="Choice")


def is_own(name: str) -> bool:
  """Whether a setting names something of the user's own, and not a built-in thing."""
  return ":" in name


def check_name(name: str, path: str, built_in: tuple[str, ...] = ()) -> None:
  """Raises ConfigError unless ``name`` is built in or has the form ``module:attribute``.

  Nothing is imported: a config is valid wherever it is read.

  Args:
    name: the setting.
    path: its dotted name, for the message.
    built_in: what else may be named.
  """
  parts = name.split(":")
  named = len(parts) == 2 and all(p.isidentifier() for part in parts for p in part.split("."))
  known = "".join(f"{word}, " for word in built_in)
  check(name in built_in or named, path, name, f"{known}'module:attribute'")


def load(name: str, path: str, allowed: str) -> Any:
  """The object that ``module:attribute`` names.

  The module is one that ``import`` finds, or that lies in the working directory.

  Args:
    name: a name that ``check_name`` passes.
    path: dotted name of the setting, for the message.
    allowed: what the object has to be, for the message.

  Raises:
    ConfigError: no such module, an error while importing it, or nothing of that name in it.
  """
  module_name, _, attribute = name.partition(":")
  where = f"{path}={name!r}"
  folder = os.getcwd()
  if folder not in sys.path and "" not in sys.path:
    sys.path.append(folder)  # last: it hides nothing that is installed
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
      raise ConfigError(f"{where}: importing {module_name} failed: {error}.") from error
    raise ConfigError(
      f"{where}: there is no module {error.name!r} on the import path (working directory "
      f"{folder}); allowed: 'module:attribute' that names {allowed}. Add the module's folder to "
      "PYTHONPATH."
    ) from error
  except Exception as error:
    kind = type(error).__name__
    raise ConfigError(f"{where}: importing {module_name} raised {kind}: {error}.") from error
  found: Any = module
  try:
    for part in attribute.split("."):
      found = getattr(found, part)
  except AttributeError as error:
    known = sorted(k for k, v in vars(module).items() if k[0] != "_" and not inspect.ismodule(v))
    raise ConfigError(
      f"{where}: {module_name} has no {attribute!r}, but {', '.join(known) or 'nothing'}; allowed: "
      f"{allowed}."
    ) from error
  return found


def check_callable(function: Any, shown: str, allowed: str, arguments: int = 1) -> None:
  """Raises ConfigError where ``function`` cannot be called with so many arguments.

  Args:
    function: what was found.
    shown: what the message calls it.
    allowed: what it has to be, for the message.
    arguments: their number.
  """
  if not callable(function):
    raise ConfigError(f"{shown} is {type(function).__name__}; allowed: {allowed}.")
  try:
    signature = inspect.signature(function)
  except ValueError:  # some built-in functions have none
    return
  try:
    signature.bind(*[None] * arguments)
  except TypeError as error:
    raise ConfigError(f"{shown} takes {signature}; allowed: {allowed}.") from error


def wrong(name: str, path: str, found: Any, allowed: str) -> ConfigError:
  """The error for an object that is not what the setting takes."""
  kind = found.__name__ if isinstance(found, type) else type(found).__name__
  return ConfigError(f"{path}={name!r} is {kind}; allowed: {allowed}.")


@dataclasses.dataclass(unsafe_hash=True)
class Choice(Config):
  """Settings of a thing that a run chooses. The class of the settings is the choice.

  A room declares what may be chosen as a subclass, and a field of that type. A value of the field
  is an instance of any class below it, wherever that class is defined. In JSON, ``use`` names the
  class as ``module:attribute``, and the other keys are its fields. On the command line
  ``--config.FIELD=module:attribute`` chooses it, and later flags set its fields.
  """

  def to_dict(self) -> dict[str, Any]:
    cls = type(self)
    return {"use": f"{cls.__module__}:{cls.__qualname__}"} | super().to_dict()

  @classmethod
  def from_dict(cls, values: dict[str, Any], path: str = "config") -> Self:
    name = values.get("use") if isinstance(values, dict) else None
    if not isinstance(name, str):
      raise ConfigError(f"{path}.use={name!r}; allowed: 'module:attribute' of {_below(cls)}.")
    chosen = find_choice(name, f"{path}.use", cls)
    return super(Choice, chosen).from_dict({k: v for k, v in values.items() if k != "use"}, path)


def find_choice(name: str, path: str, base: type[C]) -> type[C]:
  """The class below ``base`` that ``module:attribute`` names.

  Args:
    name: the setting.
    path: its dotted name, for messages.
    base: what the class must be a subclass of.

  Raises:
    ConfigError: no such name, or something else.
  """
  check_name(name, path)
  found = load(name, path, _below(base))
  if not (isinstance(found, type) and issubclass(found, base)):
    raise wrong(name, path, found, _below(base))
  return found


def _below(base: type) -> str:
  return f"a class below {base.__module__}:{base.__qualname__}"
