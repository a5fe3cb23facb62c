"""Finding what a setting names by ``package.module:attribute``."""

from __future__ import annotations

import importlib
from typing import Any

from agentjax.config import ConfigError


def find_object(name: str, path: str) -> Any:
  """The attribute of a module; ``path`` is the dotted name of the setting, for the message.

  Raises:
    ConfigError: no such module, or nothing of that name in it.
  """
  module, _, attribute = name.partition(":")
  try:
    return getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError) as error:
    raise ConfigError(f"{path}: {name!r} cannot be imported ({error}).") from error
