"""From a name in a setting to the object that it names.

A name is a built-in one, an entry point of an installed package, or ``module:attribute``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar, Self

from agentjax.config import Config, ConfigError, check


def is_own(name: str) -> bool:
  """Whether a setting has the form ``module:attribute``."""
  parts = name.split(":")
  return len(parts) == 2 and all(p.isidentifier() for part in parts for p in part.split("."))


def check_name(name: str, path: str, built_in: tuple[str, ...] = ()) -> None:
  """Raises ConfigError unless ``name`` is built in or has the form ``module:attribute``.

  Nothing is imported.

  Args:
    name: the setting.
    path: its dotted name, for the message.
    built_in: what else may be named.
  """
  known = "".join(f"{word}, " for word in built_in)
  check(name in built_in or is_own(name), path, name, f"{known}'module:attribute'")


def load(name: str, path: str, allowed: str) -> Any:
  """The object that ``module:attribute`` names.

  The module is on the import path or in the working directory.

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
  except (Exception, SystemExit) as error:
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


def load_config_module(file: pathlib.Path) -> ModuleType:
  """The module of a config file, which is run; whatever it raises is raised."""
  spec = importlib.util.spec_from_file_location(f"agentjax_config_{file.stem}", file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@contextlib.contextmanager
def naming(name: str, path: str) -> Iterator[None]:
  """Runs what the setting ``path`` names; where its own code raises, the error says so.

  Raises:
    ConfigError: from whatever a ``module:attribute`` raised.
  """
  try:
    yield
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:
    if not is_own(name):
      raise
    raise ConfigError(f"{path}={name!r} raised {type(error).__name__}: {error}.") from error


def check_callable(function: Any, shown: str, allowed: str, arguments: int = 1) -> None:
  """Raises ConfigError where ``function`` cannot be called with that many arguments.

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

  For each kind of thing there is a subclass, the base, and fields of that type. A value of such a
  field is an instance of any class below the base, in any module. It has a name: a built-in one
  (``built_in``), an entry point (``group``), or ``module:attribute``. In JSON it is written as the
  name, or as a mapping whose ``use`` is the name and whose other keys are its settings. On the
  command line ``--config.FIELD=NAME`` chooses it, and later flags set its fields.

  A base may also accept things without settings, such as a function: see ``adopt``.
  """

  group: ClassVar[str] = ""  # of entry points
  adopts: ClassVar[str] = ""  # what else than a class of settings may be named, for messages

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    """Names that need no module: name -> ``module:attribute`` of the settings' class."""
    return {}

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    """Settings for ``found``, which is not a class of settings.

    Args:
      name: ``module:attribute`` that names it.
      found: the object.
      path: dotted name of the setting.

    Raises:
      ConfigError: such a thing cannot be chosen.
    """
    raise wrong(name, path, found, cls.allowed())

  @classmethod
  def allowed(cls) -> str:
    """What can be chosen, in words."""
    words = [repr(name) for name in known_names(cls)]
    own = f" or {cls.adopts}" if cls.adopts else ""
    return ", ".join([*words, f"'module:attribute' of a {cls.__name__}{own}"])

  @classmethod
  def from_name(cls, name: str, path: str) -> Self:
    """What ``name`` chooses, with its defaults.

    Raises:
      ConfigError: nothing of that name, or something that cannot be chosen here.
    """
    known = known_names(cls)
    target = known.get(name, name)
    if not is_own(target):
      raise ConfigError(f"{path}={name!r}; allowed: {cls.allowed()}.")
    check_name(target, path)
    found = load(target, path, cls.allowed())
    if isinstance(found, type) and issubclass(found, Choice):
      if not issubclass(found, cls):
        raise wrong(name, path, found, cls.allowed())
      return found()
    return cls.adopt(name, found, path)

  @property
  def chosen(self) -> str:
    """The name that chooses this class; the shortest."""
    cls = type(self)
    own = f"{cls.__module__}:{cls.__qualname__}"
    for base in cls.__mro__:
      if issubclass(base, Choice):
        for name, target in known_names(base).items():
          if target == own or _find_loaded(target) is cls:
            return name
    return own

  def to_dict(self) -> dict[str, Any]:
    return {"use": self.chosen} | super().to_dict()

  def to_short_dict(self, default: Config | None = None) -> Any:
    """The name and what differs from the defaults; no name if the default is of this class."""
    settings = super().to_short_dict(default)
    if type(default) is type(self):
      return settings
    return {"use": self.chosen} | settings if settings else self.chosen

  @classmethod
  def reads(cls, value: Any) -> bool:
    return isinstance(value, dict | str)

  @classmethod
  def from_dict(
    cls, values: dict[str, Any] | str, path: str = "config", default: Config | None = None
  ) -> Self:
    settings = {"use": values} if isinstance(values, str) else values
    if isinstance(default, cls) and isinstance(settings, dict) and "use" not in settings:
      return super(Choice, type(default)).from_dict(settings, path, default)
    name = settings.get("use") if isinstance(settings, dict) else None
    if not isinstance(name, str):
      raise ConfigError(f"{path}.use={name!r}; allowed: {cls.allowed()}.")
    made = cls.from_name(name, f"{path}.use")
    rest = {key: value for key, value in settings.items() if key != "use"}
    before = default if type(default) is type(made) else made
    return super(Choice, type(made)).from_dict(rest, path, before)


@dataclasses.dataclass(unsafe_hash=True)
class Adopted(Choice):
  """Settings of a thing that has none; a base of choices has a subclass of this and itself.

  Attributes:
    name: ``module:attribute`` that names it.
    found: the thing. It is its own ``build``, where settings have one.
  """

  name: str = ""
  found: Any = dataclasses.field(default=None, compare=False, repr=False)

  def build(self, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    return self.found

  @property
  def chosen(self) -> str:
    return self.name

  def to_dict(self) -> dict[str, Any]:
    return {"use": self.name}

  def to_short_dict(self, default: Config | None = None) -> Any:
    return self.name


def known_names(base: type[Choice]) -> dict[str, str]:
  """Names without a module that choose a class below ``base``; built-in ones come first."""
  return entry_names(base.built_in(), base.group)


def entry_names(built_in: Mapping[str, str], group: str) -> dict[str, str]:
  """Names to ``module:attribute``: built-in ones, then those of entry points of ``group``."""
  known = dict(built_in)
  if group:
    for point in importlib.metadata.entry_points(group=group):
      known.setdefault(point.name, point.value)
  return known


def _find_loaded(target: str) -> Any:
  """The object of ``module:attribute`` if its module is imported already; else None."""
  module, _, attribute = target.partition(":")
  return getattr(sys.modules.get(module), attribute, None)
