"""Safetensors files: strict headers, reads of single byte ranges, writes tensor by tensor.

A file is the length of its header (8 bytes, little-endian), the header as JSON, and the data. The
header names dtype, shape and byte range of every tensor; the ranges cover the data without gap.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from agentjax.models.huggingface.layout import Box, Layout

DTYPES: dict[str, np.dtype] = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BYTES = {
  **{name: dtype.itemsize for name, dtype in DTYPES.items()},
  **dict.fromkeys(("F64", "I64", "U64"), 8),
  **dict.fromkeys(("I32", "U32"), 4),
  **dict.fromkeys(("I16", "U16"), 2),
  **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}  # fmt: skip
_MAX_HEADER = 100_000_000
# Small enough that a block and its transpose stay in a core's cache, large enough to read well.
BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """A tensor in a file.

  Attributes:
    file: that holds it.
    dtype: as the header spells it, "BF16".
    shape: stored shape.
    start: of its first byte, counted from the start of the file.
  """

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  start: int

  @property
  def size(self) -> int:
    """Bytes it takes."""
    return math.prod(self.shape) * _BYTES[self.dtype]

  def blocks(self, descriptor: int, layout: Layout) -> Iterator[tuple[Box, np.ndarray]]:
    """Reads a view in blocks, and of the file only the bytes that the view has.

    Args:
      descriptor: of the open file.
      layout: the view.

    Yields:
      Boxes of the view and what they hold.

    Raises:
      OSError: the file is shorter than its header said.
    """
    dtype = DTYPES[self.dtype]
    order = layout.stored_order()
    for box in layout.boxes(BLOCK_BYTES // dtype.itemsize):
      data = np.empty([box[d].stop - box[d].start for d in order], dtype)
      rest = data.reshape(-1).view(np.uint8).data
      for first, length in layout[box].runs():
        size = length * dtype.itemsize
        _read_into(descriptor, rest[:size], self.start + first * dtype.itemsize, self.file)
        rest = rest[size:]
      yield box, data.transpose(np.argsort(order))


def _read_into(descriptor: int, target: memoryview, offset: int, file: pathlib.Path) -> None:
  while target:
    count = os.preadv(descriptor, [target], offset)
    if not count:
      raise OSError(f"{file} ends at byte {offset}, in the middle of a tensor; it was truncated.")
    target, offset = target[count:], offset + count


def read_header(file: pathlib.Path) -> tuple[dict[str, TensorEntry], list[str]]:
  """Tensors of a file, and what is wrong with it."""
  try:
    size = file.stat().st_size
    with file.open("rb") as handle:
      length = int.from_bytes(handle.read(8), "little")
      if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
        return {}, [
          f"{file.name}: {size} bytes with a header of {length}; truncated or no safetensors file"
        ]
      header = json.loads(handle.read(length), object_pairs_hook=_unique)
  except (OSError, ValueError) as error:
    return {}, [f"{file.name}: {error}"]
  if not isinstance(header, dict):
    return {}, [f"{file.name}: its header is {type(header).__name__}, not a mapping"]
  found: dict[str, TensorEntry] = {}
  problems: list[str] = []
  ranges: list[tuple[int, int, str]] = []
  for name, entry in header.items():
    if name == "__metadata__":
      continue
    wrong = _check_entry(entry, size - 8 - length)
    if wrong is not None:
      problems.append(f"{file.name}: {name}: {wrong}")
      continue
    begin, end = entry["data_offsets"]
    ranges.append((begin, end, name))
    found[name] = TensorEntry(file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin)
  ranges.sort()
  problems += [f"{file.name}: {text}" for text in _overlaps(ranges)]
  if not problems:
    problems += [f"{file.name}: {text}" for text in _gaps(ranges, size - 8 - length)]
  return found, problems


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    raise ValueError("its header names a tensor twice")
  return values


def _check_entry(entry: Any, size: int) -> str | None:
  """What is wrong with one entry of a header whose file has ``size`` bytes of data."""
  if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
    return f"its entry is {entry!r}, not dtype, shape and data_offsets"
  dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
  if dtype not in _BYTES:
    return f"unknown dtype {dtype!r}"
  whole = all(
    isinstance(v, list) and all(type(n) is int and n >= 0 for n in v) for v in (shape, offsets)
  )
  if not whole or len(offsets) != 2 or offsets[0] > offsets[1]:
    return f"shape {shape!r} or data_offsets {offsets!r} is no list of sizes"
  if offsets[1] > size:
    return f"its data ends at byte {offsets[1]} of {size}; the file is truncated"
  if offsets[1] - offsets[0] != math.prod(shape) * _BYTES[dtype]:
    return f"{offsets[1] - offsets[0]} bytes do not hold {dtype} {shape}"
  return None


def _overlaps(ranges: list[tuple[int, int, str]]) -> Iterator[str]:
  at, before = 0, ""
  for begin, end, name in ranges:
    if begin < at:
      yield f"{name} overlaps {before}"
    if end > at:
      at, before = end, name


def _gaps(ranges: list[tuple[int, int, str]], size: int) -> Iterator[str]:
  at, before = 0, "the header"
  for begin, end, name in [*ranges, (size, size, "the end")]:
    if begin > at:
      yield f"the {begin - at} bytes between {before} and {name} belong to no tensor"
    at, before = end, name


def write_file(
  file: pathlib.Path,
  entries: Sequence[tuple[str, str, tuple[int, ...]]],
  data: Iterable[np.ndarray],
) -> None:
  """Writes one file and syncs it, holding one tensor at a time.

  Args:
    file: to write.
    entries: name, dtype ("BF16") and shape of every tensor, in order.
    data: the tensors in the same order, C-contiguous.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  at = 0
  for name, dtype, shape in entries:
    end = at + math.prod(shape) * _BYTES[dtype]
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
    at = end
  encoded = json.dumps(header, separators=(",", ":")).encode()
  encoded += b" " * (-len(encoded) % 8)
  with file.open("wb") as handle:
    handle.write(len(encoded).to_bytes(8, "little") + encoded)
    for array in data:
      handle.write(array.reshape(-1).view(np.uint8).data)
      del array  # before the next one is made
    handle.flush()
    os.fsync(handle.fileno())
