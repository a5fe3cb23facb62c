"""Typed configuration: mutable while flags are applied, then validated and frozen.

Every room declares its own settings as a ``Config`` dataclass; ``agentjax.training.Experiment`` is
the tree of them all. A tree is plain data: it becomes JSON and comes back equal.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Generic, Self, TypeVar

FilePath = Annotated[str, "path"]
"""A file or folder of this machine. What a run saves of it is absolute, so that it can be run again
from another folder; "" and addresses such as gs://... stay as they are."""


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers that a field may hold, in its annotation: ``share: Annotated[float, Range(0, 1)]``.

  Attributes:
    low, high: bounds.
    above, below: whether the bound itself is not allowed.
  """

  low: float = -math.inf
  high: float = math.inf
  above: bool = False
  below: bool = False

  def __contains__(self, value: float) -> bool:
    """Never NaN."""
    enough = value > self.low if self.above else value >= self.low
    return enough and (value < self.high if self.below else value <= self.high)

  def __str__(self) -> str:
    most = f"below {self.high:g}" if self.below else f"up to {self.high:g}"
    if self.low == -math.inf:
      return most
    if self.high == math.inf:
      return f"{'>' if self.above else '>='} {self.low:g}"
    if not self.above and not self.below:
      return f"{self.low:g} to {self.high:g}"
    return f"{'over' if self.above else 'from'} {self.low:g}, {most}"


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
AtLeastTwo = Annotated[int, Range(2)]
PositiveFloat = Annotated[float, Range(0, above=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]

V = TypeVar("V")


class ConfigError(ValueError):
  """A setting that cannot be used; the message names the field, the value and what is allowed."""


class Table(dict[str, V], Generic[V]):
  """Settings by names that the user gives; a plain dict that a ``Config`` is given becomes one.

  A name is an identifier, so that ``--config.TABLE.NAME.FIELD`` can set a field below it.
  """

  _frozen = False

  def __setitem__(self, name: str, value: V) -> None:
    if self._frozen:
      raise ConfigError(f"{name!r} cannot be set: this table of settings is frozen.")
    super().__setitem__(name, value)

  def __hash__(self) -> int:  # type: ignore[override]
    return hash(tuple(sorted(self.items(), key=lambda item: item[0])))

  def freeze(self) -> None:
    """Locks the table; its values are frozen by the ``Config`` that holds it."""
    self._frozen = True


@dataclasses.dataclass(unsafe_hash=True)
class Config:
  """Base of all settings. Subclasses are dataclasses of scalars, tuples and other ``Config``s."""

  def __setattr__(self, name: str, value: Any) -> None:
    if self.__dict__.get("_frozen", False):
      raise ConfigError(
        f"{type(self).__name__}.{name} is frozen; build a changed copy with dataclasses.replace "
        "or set it before freeze()."
      )
    if not name.startswith("_") and name not in _field_names(type(self)):
      raise ConfigError(
        f"{type(self).__name__} has no field {name!r}; its fields are "
        f"{', '.join(_field_names(type(self)))}."
      )
    super().__setattr__(name, Table(value) if type(value) is dict else value)

  def validate(self, path: str = "config") -> None:
    """Raises ConfigError where a value or a combination is impossible.

    Subclasses check what their annotations cannot say and call ``super().validate(path)``, which
    checks types and ranges of all fields and descends into nested configs. ``path`` is the dotted
    name for messages.
    """
    hints = type_hints(type(self))
    ranges = field_ranges(type(self))
    for field in dataclasses.fields(self):
      value, where = getattr(self, field.name), f"{path}.{field.name}"
      if not _matches(value, hints[field.name]):
        raise ConfigError(
          f"{where}={value!r} has type {type(value).__name__}; allowed: {_show(hints[field.name])}."
        )
      for allowed in ranges[field.name]:
        if value is not None and value not in allowed:
          none = " or none" if _matches(None, hints[field.name]) else ""
          check(False, where, value, f"{allowed}{none}")
      check(_within_reach(value), where, value, "finite numbers, whole ones of 64 bits")
      for inner, name in _configs_in(value, where):
        inner.validate(name)

  def requirements(self, path: str) -> Callable[[bool, str, str], None]:
    """The function ``require(condition, field, allowed)``, for ``validate``.

    It raises ConfigError about a field unless the condition holds. ``field`` is the field's name,
    or a dotted name where it belongs to a part of these settings; ``path`` is as in ``validate``.
    """

    def require(condition: bool, field: str, allowed: str) -> None:
      check(condition, f"{path}.{field}", operator.attrgetter(field)(self), allowed)

    return require

  def make_paths_absolute(self) -> None:
    """Every relative ``FilePath`` becomes absolute, from the working directory; not once frozen."""
    if self.__dict__.get("_frozen", False):
      return
    hints = type_hints(type(self), include_extras=True)
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      for inner, _ in _configs_in(value, ""):
        inner.make_paths_absolute()
      changed = _absolute(value, hints[field.name])
      if changed != value:
        setattr(self, field.name, changed)

  def freeze(self) -> Self:
    """Locks this tree against further change and returns it."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      for inner, _ in _configs_in(value, ""):
        inner.freeze()
      if isinstance(value, Table):
        value.freeze()
    object.__setattr__(self, "_frozen", True)
    return self

  def to_dict(self) -> dict[str, Any]:
    """Plain nested dict of all settings; tuples become lists (JSON has no tuples)."""
    return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

  def to_short_dict(self, default: Config | None = None) -> Any:
    """As ``to_dict``, with only what differs from the defaults, for people and for files.

    ``from_dict`` rebuilds an equal config from it.

    Args:
      default: what fields are compared with; None takes the defaults of the class.
    """
    return {
      f.name: _changed(value, before)
      for f in dataclasses.fields(self)
      if (value := getattr(self, f.name)) != (before := _default_of(f, default))
    }

  @classmethod
  def from_name(cls, name: str, path: str) -> Self:
    """These settings as a flag's text names them: "default" has all the defaults.

    Raises:
      ConfigError: another name.
    """
    check(name == "default", path, name, f"'default', or its fields, --{path}.FIELD=VALUE")
    return cls()

  @classmethod
  def reads(cls, value: Any) -> bool:
    """Whether ``from_dict`` takes values of this type."""
    return isinstance(value, dict)

  @classmethod
  def from_dict(
    cls, values: dict[str, Any], path: str = "config", default: Config | None = None
  ) -> Self:
    """Inverse of ``to_dict`` and ``to_short_dict``.

    Args:
      values: settings by field.
      path: dotted name, for messages.
      default: what has the fields that ``values`` leaves out; None takes the class's defaults.

    Raises:
      ConfigError: an unknown field or a wrong type; the message names it.
    """
    if not isinstance(values, dict):
      raise ConfigError(f"{path} must be a mapping of fields, got {type(values).__name__}.")
    hints = type_hints(cls)
    unknown = sorted(set(values) - set(_field_names(cls)))
    if unknown:
      raise ConfigError(
        f"{path} has no field {', '.join(unknown)}; allowed: {', '.join(_field_names(cls))}."
      )
    made = {}
    for field in dataclasses.fields(cls):
      before = _default_of(field, default)
      if field.name in values:
        made[field.name] = _build(
          values[field.name], hints[field.name], f"{path}.{field.name}", before
        )
      elif default is not None:
        made[field.name] = before
    return cls(**made)


_REQUIRED = object()


def _default_of(field: dataclasses.Field[Any], default: Config | None) -> Any:
  """The value of a field where none is given; ``_REQUIRED`` where there is none."""
  if default is not None:
    return getattr(default, field.name)
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return _REQUIRED if field.default is dataclasses.MISSING else field.default


def _changed(value: Any, default: Any) -> Any:
  """``value`` as plain data, without what it shares with ``default``."""
  if isinstance(value, Config):
    return value.to_short_dict(default if type(default) is type(value) else None)
  if isinstance(value, Mapping):
    before = default if isinstance(default, Mapping) else {}
    return {name: _changed(inner, before.get(name)) for name, inner in value.items()}
  if isinstance(value, tuple):
    return [_changed(inner, None) for inner in value]
  return value


def _absolute(value: Any, hint: Any) -> Any:
  """``value`` with its relative paths made absolute, where ``hint`` says that it is a path."""
  if isinstance(value, tuple):
    inner = [typing.get_args(o)[0] for o in _options(hint) if typing.get_origin(o) is tuple]
    return tuple(_absolute(v, inner[0]) for v in value) if inner else value
  if FilePath in _options(hint) and isinstance(value, str) and value and "://" not in value:
    return os.path.abspath(value)
  return value


def _configs_in(value: Any, path: str) -> Iterator[tuple[Config, str]]:
  """A field's value where it is a Config, or those it holds, each with its dotted name."""
  if isinstance(value, Config):
    yield value, path
  elif isinstance(value, Table):
    for name, inner in value.items():
      yield from _configs_in(inner, f"{path}.{name}")
  elif isinstance(value, tuple):
    for i, inner in enumerate(value):
      yield from _configs_in(inner, f"{path}[{i}]")


def _within_reach(value: Any) -> bool:
  """Whether the numbers of a field can be counted and compared with."""
  if isinstance(value, tuple):
    return all(map(_within_reach, value))
  if isinstance(value, float):
    return math.isfinite(value)
  return not isinstance(value, int) or -(2**63) <= value < 2**63


def check(condition: bool, path: str, value: Any, allowed: str) -> None:
  """Raises ``ConfigError("path=value; allowed: ...")`` unless ``condition`` holds."""
  if not condition:
    raise ConfigError(f"{path}={value!r}; allowed: {allowed}.")


def differing_fields(present: Any, wanted: Any, path: str) -> Iterator[str]:
  """Describes every leaf in which two plain nested dicts differ."""
  if isinstance(present, dict) and isinstance(wanted, dict):
    for key in sorted(set(present) | set(wanted)):
      yield from differing_fields(present.get(key), wanted.get(key), f"{path}.{key}")
  elif present != wanted:
    yield f"{path} is {wanted!r} here and {present!r} there"


# Read once a class; mypy takes no class for hashable whose instances define a hash.
type_hints: Callable[..., Mapping[str, Any]] = functools.cache(typing.get_type_hints)


def _field_ranges(cls: type) -> Mapping[str, tuple[Range, ...]]:
  """The ranges that annotations name, by field."""
  hints = type_hints(cls, include_extras=True)
  return {
    name: tuple(
      extra
      for option in _options(hint)
      for extra in getattr(option, "__metadata__", ())
      if isinstance(extra, Range)
    )
    for name, hint in hints.items()
  }


field_ranges: Callable[..., Mapping[str, tuple[Range, ...]]] = functools.cache(_field_ranges)


def _field_names(cls: type) -> tuple[str, ...]:
  return tuple(f.name for f in dataclasses.fields(cls))


def _plain(value: Any) -> Any:
  if isinstance(value, Config):
    return value.to_dict()
  if isinstance(value, Mapping):
    return {name: _plain(inner) for name, inner in value.items()}
  if isinstance(value, tuple | list):
    return [_plain(v) for v in value]
  return value


def _options(hint: Any) -> tuple[Any, ...]:
  """The alternatives of a union, or the hint itself."""
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return typing.get_args(hint)
  return (hint,)


def _build(value: Any, hint: Any, path: str, default: Any = None) -> Any:
  """A field's value from plain data.

  Args:
    value: what was read.
    hint: type of the field.
    path: its dotted name.
    default: has the settings that ``value`` leaves out, where it is of the same class.
  """
  for option in _options(hint):
    if isinstance(option, type) and issubclass(option, Config) and option.reads(value):
      return option.from_dict(value, path, default if isinstance(default, option) else None)
    if typing.get_origin(option) is Table and isinstance(value, dict):
      (inner,) = typing.get_args(option)
      before = default if isinstance(default, Table) else {}
      return Table({k: _build(v, inner, f"{path}.{k}", before.get(k)) for k, v in value.items()})
    if typing.get_origin(option) is tuple and isinstance(value, list):
      inner = typing.get_args(option)[0]
      return tuple(_build(v, inner, f"{path}[{i}]") for i, v in enumerate(value))
  if _matches(value, hint):
    return value
  raise ConfigError(f"{path}={value!r} has type {type(value).__name__}; allowed: {_show(hint)}.")


def _matches(value: Any, hint: Any) -> bool:
  for option in _options(hint):
    origin = typing.get_origin(option)
    if origin is typing.Literal:
      if value in typing.get_args(option):
        return True
    elif origin is tuple:
      inner = typing.get_args(option)[0]
      if isinstance(value, tuple) and all(_matches(v, inner) for v in value):
        return True
    elif origin is Table:
      (inner,) = typing.get_args(option)
      if isinstance(value, Table) and all(
        name.isidentifier() and not hasattr(dict, name) and _matches(v, inner)
        for name, v in value.items()
      ):
        return True
    elif option is Any:
      return True
    elif option is float:
      if isinstance(value, int | float) and not isinstance(value, bool):
        return True
    elif option is int:
      if isinstance(value, int) and not isinstance(value, bool):
        return True
    elif isinstance(value, origin or option):
      return True
  return False


def _show(hint: Any) -> str:
  if typing.get_origin(hint) is typing.Literal:
    return ", ".join(repr(a) for a in typing.get_args(hint))
  return " or ".join(_show_option(o) for o in _options(hint))


def _show_option(option: Any) -> str:
  if typing.get_origin(option) is Table:
    return f"{_show(typing.get_args(option)[0])} by names that are words"
  return getattr(option, "__name__", str(option))
