"""Lists the fields of a config: name, type, default, meaning.

  python -m agentjax fields rl.optimizer
  python -m agentjax fields learning_rate
  python -m agentjax fields agentjax.recipes.agentspec:AgentSpecConfig

The word is the beginning of fields' names, or a part of one. Without a word all fields are listed.
Each is set by ``--config.FIELD=VALUE``. ``module:attribute`` lists the settings of a thing that can
be chosen, which are set below the field that chooses it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

from agentjax.config import Config, ConfigError, field_ranges, type_hints
from agentjax.names import Choice, is_own
from agentjax.training.experiment import Experiment
from agentjax.training.flags import config_type, describe_hint

_ATTRIBUTE = re.compile(r"^  (\w[\w, ]*):[ \n]")


@dataclasses.dataclass(frozen=True)
class FieldInfo:
  """One value that ``--config.NAME=VALUE`` sets."""

  name: str
  allowed: str
  default: str
  meaning: str


def list_fields(cls: type[Config] = Experiment, path: str = "") -> Iterator[FieldInfo]:
  """The single values of a tree of settings, in order; also those of parts that may be None."""
  hints, ranges, meanings = type_hints(cls), field_ranges(cls), _meanings(cls)
  for field in dataclasses.fields(cls):
    name, hint = f"{path}{field.name}", hints[field.name]
    inner = config_type(hint)
    if inner is not None and not issubclass(inner, Choice):
      yield from list_fields(inner, f"{name}.")
      continue
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
      default = field.default_factory()
    shown = "required" if default is dataclasses.MISSING else repr(default)
    allowed = ", ".join([describe_hint(hint), *map(str, ranges[field.name])])
    yield FieldInfo(name, allowed, shown, meanings.get(field.name, ""))


def find_fields(word: str) -> list[FieldInfo]:
  """Fields whose name begins with ``word``; if there are none, those that contain it.

  Raises:
    ConfigError: ``word`` has the form ``module:attribute`` and names no ``Choice``.
  """
  if is_own(word):
    return list(list_fields(type(Choice.from_name(word, "word"))))
  fields = list(list_fields())
  word = word.removeprefix("--").removeprefix("config.").rstrip(".")
  begins = [f for f in fields if f.name == word or f.name.startswith(f"{word}.") or not word]
  return begins or [f for f in fields if word in f.name]


def describe_field(field: FieldInfo) -> str:
  """Lines for a terminal."""
  head = f"--config.{field.name}=  ({field.allowed}; default {field.default})"
  return "\n".join([head, *textwrap.wrap(field.meaning, 92, initial_indent="    ",
                                         subsequent_indent="    ")])  # fmt: skip


def main(arguments: Sequence[str]) -> int:
  """Prints the fields; the exit status is 2 where no field has the word."""
  if any(a in ("-h", "--help") for a in arguments):
    print(__doc__)
    return 0
  if len(arguments) > 1:
    print(f"error: stray word {arguments[1]!r}; fields takes one word.", file=sys.stderr)
    return 2
  try:
    found = find_fields(arguments[0] if arguments else "")
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  if not found:
    print(f"error: no field has {arguments[0]!r} in its name.", file=sys.stderr)
    return 2
  print("\n".join(map(describe_field, found)))
  return 0


def _meanings(cls: type[Config]) -> dict[str, str]:
  """What the "Attributes:" of a class's docstring say, by the name of the field."""
  found: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    if not (isinstance(base, type) and issubclass(base, Config)):
      continue
    _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
    names: list[str] = []
    for line in section.splitlines():
      if match := _ATTRIBUTE.match(f"{line} "):
        names = [name.strip() for name in match[1].split(",")]
        line = line[match.end() - 1 :]
        found |= dict.fromkeys(names, "")
      elif line and not line.startswith("  "):
        break
      for name in names:
        found[name] = f"{found[name]} {line.strip()}".strip()
  return found
