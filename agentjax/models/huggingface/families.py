"""Model families by ``model_type``: each is one file, with its config and its tensor names."""

from __future__ import annotations

from agentjax.config import ConfigError
from agentjax.models.huggingface.mapping import Family
from agentjax.names import check_name, entry_names, load, wrong

_HERE = "agentjax.adapters.model_families"
_GROUP = "agentjax.model_families"  # of entry points
_FAMILIES = {
  "llama": f"{_HERE}.llama:FAMILY",
  "iquestcoder": f"{_HERE}.llama:IQUESTCODER",
  "qwen2": f"{_HERE}.qwen2:FAMILY",
  "qwen3": f"{_HERE}.qwen3:FAMILY",
  "qwen3_moe": f"{_HERE}.qwen3_moe:FAMILY",
  "mamba2": f"{_HERE}.mamba2:FAMILY",
  "nemotron_h": f"{_HERE}.nemotron_h:FAMILY",
  "youtu": f"{_HERE}.youtu:FAMILY",
  "longcat_flash": f"{_HERE}.longcat_flash:FAMILY",
  "gemma4_text": f"{_HERE}.gemma4:TEXT_FAMILY",
  "gemma4": f"{_HERE}.gemma4:FAMILY",
}


def register_family(model_type: str, name: str) -> None:
  """Adds a family, or replaces one. An installed package may use an entry point instead.

  Args:
    model_type: of ``config.json``.
    name: ``module:attribute`` of its ``Family``.

  Raises:
    ConfigError: ``name`` has another form.
  """
  check_name(name, f"register_family({model_type!r})")
  _FAMILIES[model_type] = name


def model_types() -> tuple[str, ...]:
  """The readable families, in the order in which one is chosen for a config."""
  return tuple(entry_names(_FAMILIES, _GROUP))


def find_family(model_type: str) -> Family:
  """The family of a ``model_type``.

  Raises:
    ConfigError: there is none; the known ones are named.
  """
  known = entry_names(_FAMILIES, _GROUP)
  if model_type not in known:
    raise ConfigError(
      f"model_type={model_type!r} is not supported; supported: {', '.join(sorted(known))}."
    )
  allowed = "a models.huggingface.Family"
  found = load(known[model_type], "model_type", allowed)
  if not isinstance(found, Family):
    raise wrong(known[model_type], "model_type", found, allowed)
  return found
