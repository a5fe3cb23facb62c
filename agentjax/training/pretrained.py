"""Starting a run from a Hugging Face folder: which settings come from its files and which from the
config."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from typing import Any

from agentjax.config import check
from agentjax.models import ModelConfig
from agentjax.models.huggingface import RUNTIME_FIELDS, read_config

_DESCRIBING = (".json", ".jinja", ".safetensors")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def runtime_overrides(model: ModelConfig) -> dict[str, Any]:
  """The fields of a pretrained model that a run may choose: ``RUNTIME_FIELDS`` and prediction
  heads."""
  return {name: getattr(model, name) for name in (*sorted(RUNTIME_FIELDS), "mtp")}


def pretrained_model(
  directory: str | os.PathLike[str], model: ModelConfig, path: str = "config.model"
) -> ModelConfig:
  """The folder's model, run as ``config.model`` says.

  Raises:
    ConfigError: ``config.json`` asks for something that ModelConfig lacks, or ``config.model`` sets
      something else than the folder does.
    CheckpointError: it is not there or no JSON.
  """
  chosen = {name: getattr(model, name) for name in RUNTIME_FIELDS}
  theirs, default = read_config(directory, overrides=chosen), ModelConfig()
  if theirs.mtp is not None and model.mtp is not None:
    # One layer that is applied repeatedly serves any depth.
    ours = dataclasses.replace(theirs.mtp, detach=model.mtp.detach)
    if theirs.mtp.shared or theirs.mtp.depths == 1:
      ours = dataclasses.replace(ours, depths=model.mtp.depths, shared=model.mtp.shared)
    theirs = dataclasses.replace(theirs, mtp=ours)
  for field in dataclasses.fields(ModelConfig):
    value, decided = getattr(model, field.name), getattr(theirs, field.name)
    check(
      value in (decided, getattr(default, field.name)),
      f"{path}.{field.name}",
      value,
      f"{decided!r}, as config.pretrained's config.json decides, or the default; of the model a "
      f"run chooses only {', '.join(sorted(RUNTIME_FIELDS))}, mtp.detach and mtp.depths of a "
      "shared layer",
    )
  return theirs.freeze()


def folder_fingerprint(directory: str | os.PathLike[str]) -> str:
  """SHA-256 hex of a folder's settings, vocabulary and template, and of a sample of its weights.

  It covers the size of each weights file and 16 pieces of 64 KiB, evenly spaced. Training changes
  every piece, and even large folders are read quickly. The folder's path and the files' times do
  not count.
  """
  digest = hashlib.sha256()
  for file in sorted(pathlib.Path(directory).iterdir()):
    if file.suffix not in _DESCRIBING or not file.is_file():
      continue
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    with file.open("rb") as handle:
      if file.suffix != ".safetensors":
        digest.update(handle.read())
        continue
      last = max(0, size - _SAMPLE_BYTES)
      for start in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
        handle.seek(start)
        digest.update(handle.read(_SAMPLE_BYTES))
  return digest.hexdigest()
