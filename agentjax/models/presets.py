"""Published architectures as values: ``model_preset("nemotron3_super_120b_a12b")``.

Each is a file of ``published/``, read like a checkpoint's ``config.json``, for planning, testing
and training from scratch. Weights are float32 and compute in bfloat16 as published; change a field
with ``dataclasses.replace``.

A file has ``config.json``, the keys that its family reads, and ``fields`` of ModelConfig that a
family's ``config.json`` cannot have.
"""

from __future__ import annotations

import json
import pathlib

from agentjax.config import ConfigError, check
from agentjax.models.config import ModelConfig
from agentjax.names import entry_names, is_own, load, wrong

_FOLDER = pathlib.Path(__file__).with_name("published")


def model_preset(name: str) -> ModelConfig:
  """A fresh config of a published architecture, to be changed and frozen by the caller.

  Raises:
    ConfigError: an unknown name; the message lists the known ones.
  """
  from agentjax.models.huggingface.checkpoint import config_of  # it imports the model

  if name not in model_presets():
    raise ConfigError(f"model preset {name!r}; allowed: {', '.join(model_presets())}.")
  file = _FOLDER / f"{name}.json"
  values = json.loads(file.read_text())
  fields = {"param_dtype": "float32", **values.get("fields", {})}
  if "config.json" in values:
    fields = config_of(values["config.json"], file)[1].to_dict() | fields
  return ModelConfig.from_dict(fields, f"{file.name}.fields")


def named_model(name: str, path: str) -> ModelConfig:
  """A published architecture, or the ModelConfig that an entry point or a module names.

  Args:
    name: of a preset, of an entry point of the group ``agentjax.models``, or ``module:attribute``.
    path: dotted name of the setting, for messages.

  Raises:
    ConfigError: nothing of that name, or something else than a ModelConfig.
  """
  points = entry_names({}, "agentjax.models")
  known = ", ".join([*model_presets(), *points])
  allowed = f"'default', {known}, 'module:attribute' of a ModelConfig"
  if name in model_presets():
    return model_preset(name)
  target = points.get(name, name)
  check(is_own(target), path, name, allowed)
  found = load(target, path, "a ModelConfig")
  if not isinstance(found, ModelConfig):
    raise wrong(name, path, found, allowed)
  return ModelConfig.from_dict(found.to_dict(), path)


def model_presets() -> tuple[str, ...]:
  """Their names."""
  return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))
