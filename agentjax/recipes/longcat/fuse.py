r"""Fuses models that were trained from one start into one (LongCat-Flash-Thinking, 2509.18883).

  python -m agentjax.convert --input=runs/story --output=story      # likewise the others
  python -m agentjax.recipes.longcat.fuse --base=warm --experts=story,program --output=fused \
      --drop=0.2
  python -m agentjax.train ... --config.pretrained=fused

All are Hugging Face folders of one model. ``config.json`` and tokenizer are those of the base.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
import safetensors
import safetensors.numpy
from absl import flags, logging

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.longcat.fusion import fuse_tensor

_BASE = flags.DEFINE_string("base", None, "Folder that all were trained from.", required=True)
_EXPERTS = flags.DEFINE_list("experts", None, "Folders of the experts.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "New folder.", required=True)
_DROP = flags.DEFINE_float(
  "drop", 0.0, "Share of the differences that is dropped.", lower_bound=0, upper_bound=0.99
)
_SEED = flags.DEFINE_integer("seed", 0, "Of what is dropped.", lower_bound=0)


def fuse_folders(
  base: str | os.PathLike[str],
  experts: Sequence[str | os.PathLike[str]],
  output: str | os.PathLike[str],
  *,
  drop: float = 0.0,
  seed: int = 0,
) -> int:
  """Writes the folder; returns the number of tensors.

  Args:
    base, experts, output: folders.
    drop, seed: as ``fuse_tensor`` has them.

  Raises:
    ConfigError: a folder without tensors, an output that is there, or experts with other tensors.
  """
  target = pathlib.Path(output)
  if target.exists():
    raise ConfigError(f"--output={str(output)!r} is there; allowed: a new folder.")
  folders = [pathlib.Path(folder) for folder in (base, *experts)]
  places = [_places(folder) for folder in folders]
  for folder, own in zip(folders[1:], places[1:], strict=True):
    if differing := sorted(own.keys() ^ places[0].keys()):
      raise ConfigError(
        f"{folder} and {folders[0]} differ in tensors such as {differing[0]!r}; allowed: folders "
        "of one model."
      )
  beside = target.with_name(f"{target.name}.tmp")
  shutil.rmtree(beside, ignore_errors=True)
  shutil.copytree(folders[0], beside)
  for file in sorted(beside.glob("*.safetensors")):
    names = [name for name, place in places[0].items() if place.name == file.name]
    tensors = {name: _fused(name, places, drop, seed) for name in names}
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
  beside.rename(target)
  return len(places[0])


def _fused(
  name: str, places: Sequence[dict[str, pathlib.Path]], drop: float, seed: int
) -> np.ndarray:
  base, *others = (_read(own[name], name) for own in places)
  if any(other.shape != base.shape for other in others):
    shapes = [base.shape, *(other.shape for other in others)]
    raise ConfigError(f"tensor {name!r} has the shapes {shapes}; allowed: folders of one model.")
  if not np.issubdtype(base.dtype, np.floating) and base.dtype.name != "bfloat16":
    return base
  return fuse_tensor(base, others, name=name, drop=drop, seed=seed).astype(base.dtype)


def _places(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """The file of every tensor."""
  found: dict[str, pathlib.Path] = {}
  for file in sorted(folder.glob("*.safetensors")):
    with safetensors.safe_open(file, framework="numpy") as opened:
      found |= dict.fromkeys(opened.keys(), file)
  if not found:
    raise ConfigError(f"{folder} has no tensors; allowed: a folder with *.safetensors files.")
  return found


def _read(file: pathlib.Path, name: str) -> np.ndarray:
  with safetensors.safe_open(file, framework="numpy") as opened:
    return opened.get_tensor(name)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  number = fuse_folders(
    _BASE.value, _EXPERTS.value, _OUTPUT.value, drop=_DROP.value, seed=_SEED.value
  )
  logging.info("%s: %d tensors of %d experts", _OUTPUT.value, number, len(_EXPERTS.value))


if __name__ == "__main__":
  main(run, needs_config=False)
