"""The Python objects that a run was extended with: recorded at its start, and imported or asked for
later.

``Extensions`` and an objective of one's own are Python objects, which ``config.json`` cannot hold.
``extensions.json`` in the run's directory names each (module and qualified name) with a hash of its
source. Whatever reads the run later uses the objects that the caller passes, imports the others by
name, and raises an error if one cannot be imported: without it the results would be those of
another world.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from agentjax.config import ConfigError
from agentjax.files import write_atomically
from agentjax.names import load
from agentjax.objectives.advantage_function import AdvantageFunction
from agentjax.objectives.custom_loss import LossFunction
from agentjax.training.build import Extensions

EXTENSIONS_FILE = "extensions.json"
_SINGLE = ("tasks", "make_environment", "program", "sampler")
OF_EPISODES = ("tools", "scorers", *_SINGLE)  # what playing and scoring need
OF_UPDATES = ("objective", "advantage")
ALL_PARTS = (*OF_EPISODES, *OF_UPDATES)

Description = dict[str, dict[str, str | None]]
"""By part ("make_environment", "tools.convert"): its ``name``, where it can be imported from (
``importable``, "module:attribute" or None), and the SHA-256 of its ``source`` or None."""


class Extended(NamedTuple):
  """The objects that a run is extended with."""

  extensions: Extensions
  objective: LossFunction | None = None
  advantage: AdvantageFunction | None = None


def describe(extended: Extended) -> Description:
  """The description of every part that is not the default."""
  return {part: _describe(value) for part, value in _values(extended).items()}


def read_description(directory: pathlib.Path) -> Description | None:
  """The description that the run of ``directory`` wrote; None if there is none.

  Raises:
    ConfigError: the file is damaged.
  """
  file = directory / EXTENSIONS_FILE
  if not file.exists():
    return None
  try:
    return json.loads(file.read_text())
  except (ValueError, RecursionError) as error:
    raise ConfigError(
      f"{file} is damaged ({error}); it says what the run was extended with. Put back a copy, or "
      "remove it and pass all extensions from Python."
    ) from error


def write_description(directory: pathlib.Path, description: Description) -> None:
  """Writes what ``read_description`` reads."""
  write_atomically(directory / EXTENSIONS_FILE, json.dumps(description, indent=2) + "\n")


def differing_parts(recorded: Description, present: Description) -> list[str]:
  """Words for every part of ``present`` that is not what was ``recorded``."""
  found = []
  for part, one in present.items():
    before = recorded.get(part)
    if before is None:
      found.append(f"{part}={one['name']}, which the run did not have when it began")
    elif _attribute(before) != _attribute(one):
      found.append(f"{part}={one['name']}, which was {before['name']} when the run began")
    elif before["source"] != one["source"]:
      found.append(f"{part}={one['name']}, whose source has changed since the run began")
  return found


def use_recorded(
  directory: pathlib.Path,
  given: Extended,
  *,
  call: str,
  needed: Collection[str] = OF_EPISODES,
) -> tuple[Extended, list[str]]:
  """``given``, completed with the recorded parts of the run of ``directory``.

  Args:
    directory: of the run; without an ``extensions.json`` only ``given`` is used.
    given: parts that the caller passes; the others are imported by their recorded names.
    call: Python call that takes extensions, for the message.
    needed: fields that are completed; others stay as they are in ``given``.

  Returns:
    The parts, and words for each that is not what the run began with.

  Raises:
    ConfigError: a part that is needed was not given and cannot be imported.
  """
  recorded = read_description(directory)
  if recorded is None:
    return given, []
  values, absent = _values(given), []
  for part, one in recorded.items():
    if part in values or part.split(".")[0] not in needed:
      continue
    try:
      values[part] = _import(one["importable"])
    except ConfigError as error:
      absent.append(f"{part}={one['name']} ({error})")
  if absent:
    raise ConfigError(
      f"the run of {directory} was extended with {'; '.join(absent)}. Without that it is another "
      f"world. Call {call} from Python with the same objects, or keep them in a module that can be "
      "imported (its folder on PYTHONPATH) when a run begins."
    )
  order = {part: i for i, part in enumerate(recorded)}
  parts = dict(sorted(values.items(), key=lambda item: order.get(item[0], len(order))))
  extended = _extended(parts)
  return extended, differing_parts(recorded, describe(extended))


def extensions_of_run(
  directory: pathlib.Path,
  extensions: Extensions | None,
  *,
  call: str,
  needed: Collection[str] = OF_EPISODES,
) -> Extensions:
  """As ``use_recorded``, for evaluations and similar; warns of parts that changed or were
  imported."""
  given = Extended(extensions or Extensions())
  extended, differing = use_recorded(directory, given, call=call, needed=needed)
  for words in differing:
    logging.warning("not the world that %s was trained in: %s", directory, words)
  imported = describe(extended).keys() - describe(given).keys()
  if imported:
    names = ", ".join(sorted(imported))
    logging.warning("%s was extended, and so is this: its %s are imported", directory, names)
  return extended.extensions


def _values(extended: Extended) -> dict[str, Any]:
  """Every part that is not the default, by its name."""
  extensions, default = extended.extensions, Extensions()
  values: dict[str, Any] = {f"tools.{tool.name}": tool for tool in extensions.tools}
  values |= {f"scorers.{name}": scorer for name, scorer in extensions.scorers.items()}
  for field in _SINGLE:
    value = getattr(extensions, field)
    if value is not getattr(default, field):
      values[field] = value
  values |= {part: v for part in OF_UPDATES if (v := getattr(extended, part)) is not None}
  return values


def _extended(values: Mapping[str, Any]) -> Extended:
  """Inverse of ``_values``."""
  fields = {k: v for k, v in values.items() if k in _SINGLE}
  tools = [value for part, value in values.items() if part.startswith("tools.")]
  scorers = {k.partition(".")[2]: v for k, v in values.items() if k.startswith("scorers.")}
  extensions = Extensions(tools=tools, scorers=scorers, **fields)
  return Extended(extensions, **{part: values.get(part) for part in OF_UPDATES})


def _describe(value: Any) -> dict[str, str | None]:
  defined = _definition(value)
  module, attribute = defined.__module__, defined.__qualname__
  return {
    "name": f"{module}:{attribute}",
    "importable": _importable_name(value, module, attribute),
    "source": _source_hash(value, defined),
  }


def _definition(value: Any) -> Any:
  """The function or class that ``value`` is, wraps, or is an instance of."""
  value = inspect.unwrap(value)
  while isinstance(value, functools.partial):
    value = inspect.unwrap(value.func)
  value = getattr(value, "__func__", value)  # of a bound method
  return value if hasattr(value, "__qualname__") else type(value)


def _importable_name(value: Any, module: str, attribute: str) -> str | None:
  """ "module:attribute" that gives this very object in another process, as far as can be seen."""
  if module != "__main__" and module in sys.modules:
    found = sys.modules[module]
    for name in attribute.split("."):
      found = getattr(found, name, None)  # type: ignore[assignment]
    if found is value:
      return f"{module}:{attribute}"
  for name, each in sorted(sys.modules.items()):
    if name == "__main__" or name.startswith("agentjax.") or not inspect.ismodule(each):
      continue
    for key, found in list(vars(each).items()):
      if found is value:
        return f"{name}:{key}"
  return None


def _source_hash(value: Any, defined: Any) -> str | None:
  """Of the source, and of the fields of data classes and arguments of partial functions."""
  source = ""  # that of agentjax comes with its version
  if not defined.__module__.startswith("agentjax."):
    try:
      source = inspect.getsource(defined)
    except (OSError, TypeError):  # no file: typed at a prompt, or compiled
      return None
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    source += _canonical(value)
  while isinstance(value, functools.partial):
    source += _canonical([value.args, value.keywords])
    value = value.func
  return hashlib.sha256(source.encode()).hexdigest()


def _canonical(value: Any) -> str:
  """JSON; other values become words without addresses in memory."""

  def plain(other: Any) -> Any:
    if dataclasses.is_dataclass(other) and not isinstance(other, type):
      return {f.name: getattr(other, f.name) for f in dataclasses.fields(other)}
    if isinstance(other, set | frozenset):
      return sorted(map(repr, other))
    if hasattr(other, "tolist"):
      return other.tolist()
    if isinstance(other, Mapping):
      return dict(other)
    if isinstance(other, Sequence):
      return list(other)
    return f"{type(other).__module__}.{type(other).__qualname__}"

  return json.dumps(value, sort_keys=True, default=plain)


def _attribute(one: Mapping[str, str | None]) -> str:
  """The qualified name without the module, since a module that runs as a script is called
  __main__."""
  return str(one["name"]).partition(":")[2]


def _import(name: str | None) -> Any:
  if name is None:
    raise ConfigError("no module has it under a name: a lambda, or made in a script or notebook")
  return load(name, EXTENSIONS_FILE, "what the run was extended with")
