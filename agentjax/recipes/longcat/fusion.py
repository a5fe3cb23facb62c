r"""Fusion of experts: task vectors ``tau_i = theta_i - theta_base`` become one (2509.18883).

1. Size: each tau_i of a tensor is scaled to the mean norm of all of them, so that none drowns the
   others.
2. Dropout: each entry is dropped with the chance p, and the others are divided by 1 - p (DARE,
   2311.03099).
3. Signs: of each entry the sign with the larger sum stays, and entries of the other sign are
   erased (TIES, 2306.01708; SCE, 2408.07990).
4. The result is base plus the mean of what stays, over the experts that have it.

The paper names these four steps and no rate; how size is measured is ours.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float

from agentjax.config import ConfigError


def fuse_tensor(
  base: Float[np.ndarray, "*shape"],
  experts: Sequence[Float[np.ndarray, "*shape"]],
  *,
  name: str = "",
  drop: float = 0.0,
  seed: int = 0,
) -> Float[np.ndarray, "*shape"]:
  """One tensor; float32. With one expert and ``drop`` 0 it is that expert's.

  Args:
    base: the start that all experts have in common.
    experts: after training.
    name: of the tensor; with seed and place it decides what is dropped.
    drop: p.
    seed: of what is dropped.
  """
  start = np.asarray(base, np.float32)
  changes = [np.asarray(expert, np.float32) - start for expert in experts]
  norms = [float(np.linalg.norm(change)) for change in changes]
  present = [norm for norm in norms if norm > 0]
  if not present:
    return start
  if len(present) > 1:
    size = sum(present) / len(present)
    changes = [
      c * np.float32(size / n) if n > 0 else c for c, n in zip(changes, norms, strict=True)
    ]
  if drop:
    changes = [
      np.where(_draw(name, seed, i).random(c.shape) < drop, 0, c / np.float32(1 - drop))
      for i, c in enumerate(changes)
    ]
  stacked = np.stack(changes)
  kept = np.where(np.sign(stacked) == np.sign(stacked.sum(0)), stacked, 0)
  count = np.maximum(np.count_nonzero(kept, axis=0), 1)
  return start + (kept.sum(0) / count).astype(np.float32)


def _draw(name: str, seed: int, place: int) -> np.random.Generator:
  digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
  return np.random.default_rng([seed, place, int.from_bytes(digest, "big")])


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
  beside = target.with_name(f".{target.name}.{os.getpid()}")
  try:
    shutil.copytree(folders[0], beside)
    for file in sorted(beside.glob("*.safetensors")):
      names = [name for name, place in places[0].items() if place.name == file.name]
      tensors = {name: _fused(name, places, drop, seed) for name in names}
      safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    beside.rename(target)
  finally:
    shutil.rmtree(beside, ignore_errors=True)
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
