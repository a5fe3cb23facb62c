"""Safetensors files: headers, reads of single byte ranges, writes tensor by tensor.

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
import safetensors

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
    """Reads a view in blocks; reads only the bytes of the view.

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
  """Tensors of a file, and what is wrong with it.

  The library refuses headers whose byte ranges overlap, leave gaps, do not fit dtype and shape or
  are not those of the file. So the tensors follow one another, in the order of the ranges.
  """
  try:
    with file.open("rb") as handle:
      start = 8 + int.from_bytes(handle.read(8), "little")
    with safetensors.safe_open(file, framework="numpy") as opened:
      slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
      held = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
  except (OSError, safetensors.SafetensorError) as error:
    return {}, [f"{file.name} is no whole safetensors file: {error}"]
  found: dict[str, TensorEntry] = {}
  for name, (dtype, shape) in held.items():
    if dtype not in _BYTES:
      return {}, [f"{file.name}: {name}: unknown dtype {dtype!r}"]
    found[name] = TensorEntry(file, dtype, tuple(shape), start)
    start += found[name].size
  return found, []


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
