"""Append-only files of records that can tell when they are damaged, and where. No jax.

    header   magic, 8 bytes | version, u32 | crc32 of those 12 bytes, u32
    record   length n, u32 | number, u32 | crc32 of the payload, u32 | crc32 of those 12 bytes, u32
             payload, n bytes of msgpack
    end mark a record of length 0 whose number is the count of records before it

All little-endian. A record's head has its own checksum, so a wrong length is seen as damage and not
as a short file; numbers show lost or doubled records; the end mark, written by ``close``, shows a
file cut between two records. A file without it was not closed: its writer died, is still at work,
or the copy is not whole.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np

_HEADER = struct.Struct("<8sII")
_HEAD = struct.Struct("<IIII")
_LARGEST = 2**32 - 1

_ARRAY, _SCALAR, _TUPLE, _INTEGER = 1, 2, 3, 4  # msgpack extension codes, part of the format
_STORED_KINDS = "biufcSU?"


class StoreError(ValueError):
  """A file that cannot be trusted from ``offset`` on, because of ``reason``."""

  def __init__(self, path: str | os.PathLike[str], offset: int, reason: str) -> None:
    self.path, self.offset, self.reason = Path(path), offset, reason
    super().__init__(f"{self.path}: byte {offset}: {reason}")


@dataclasses.dataclass(frozen=True)
class TornTail:
  """The file is whole up to ``offset``; what followed was never finished."""

  offset: int
  reason: str


class RecordReader:
  """Iterates over the records of a file, oldest first; each iteration starts anew.

  Args:
    path: the file.
    magic: 8 bytes that name the kind of file.
    version: the version of the records the caller understands.
    recover_tail: if the damage lies in the last record with nothing or zeros behind it, or the end
      mark is missing, yield what is whole and set ``torn`` instead of raising: so ends a file whose
      writer or machine died. Damage with records behind it always raises.

  Attributes:
    torn: after an iteration with ``recover_tail``, what was left out at the end, or None.

  Raises (while iterating):
    StoreError: missing or damaged file, another kind of file, another version.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    magic: bytes,
    version: int = 1,
    *,
    recover_tail: bool = False,
  ) -> None:
    self.path = Path(path)
    self.torn: TornTail | None = None
    self._magic, self._version = _checked_magic(magic), version
    self._recover_tail = recover_tail

  def __iter__(self) -> Iterator[dict[str, Any]]:
    for _, record in self.with_offsets():
      yield record

  def with_offsets(self) -> Iterator[tuple[int, dict[str, Any]]]:
    """As iterating, with the byte offset at which each record starts."""
    for offset, payload in self.payloads():
      yield offset, self._decoded(offset, payload)

  def payloads(self) -> Iterator[tuple[int, bytes]]:
    self.torn = None
    try:
      file = self.path.open("rb")
    except OSError as error:
      raise StoreError(self.path, 0, f"cannot be opened: {error.strerror}") from error
    with file:
      size = os.fstat(file.fileno()).st_size
      self._read_header(file.read(_HEADER.size))
      offset, number = min(_HEADER.size, size), 0
      while self.torn is None:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
          reason = "the end mark is missing" if not head else "a record's head is cut off"
          return self._tail(offset, f"{reason}; the file was never closed or is cut")
        length, written_number, payload_crc, head_crc = _HEAD.unpack(head)
        if zlib.crc32(head[:12]) != head_crc:
          if len((head + file.read()).rstrip(b"\0")) <= _HEAD.size:
            return self._tail(offset, "a record's head never reached the disk")
          raise StoreError(self.path, offset, "the head of a record is damaged (checksum)")
        if written_number != number:
          raise StoreError(
            self.path, offset, f"record {written_number} stands where {number} must follow"
          )
        if length == 0:
          if offset + _HEAD.size != size:
            raise StoreError(self.path, offset + _HEAD.size, "bytes follow the end mark")
          return
        payload = file.read(length)
        if len(payload) < length:
          return self._tail(offset, f"record {number} of {length} bytes is cut off")
        if zlib.crc32(payload) != payload_crc:
          reason = f"record {number} is damaged (checksum)"
          if not file.read().rstrip(b"\0"):
            return self._tail(offset, reason)
          raise StoreError(self.path, offset, reason)
        yield offset, payload
        offset, number = file.tell(), number + 1

  def _read_header(self, header: bytes) -> None:
    if len(header) < _HEADER.size:
      whole = _header(self._magic, self._version)
      if not whole.startswith(header):
        raise StoreError(self.path, 0, f"not a {_show_magic(self._magic)} file")
      self._tail(0, "the file header is cut off")
      return
    magic, version, crc = _HEADER.unpack(header)
    if magic != self._magic:
      raise StoreError(
        self.path,
        0,
        f"not a {_show_magic(self._magic)} file, it starts with {magic!r}",
      )
    if zlib.crc32(header[:12]) != crc:
      raise StoreError(self.path, 0, "the file header is damaged (checksum)")
    if version != self._version:
      raise StoreError(
        self.path,
        8,
        f"format version {version}; this program reads version {self._version}. Use the release "
        "that wrote the file.",
      )

  def _tail(self, offset: int, reason: str) -> None:
    if not self._recover_tail:
      raise StoreError(self.path, offset, f"{reason} (recover_tail reads what is whole before it)")
    self.torn = TornTail(offset, reason)

  def _decoded(self, offset: int, payload: bytes) -> dict[str, Any]:
    try:
      record = decode_record(payload)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
      raise StoreError(self.path, offset, f"the record is no msgpack of ours: {error}") from error
    return record


def salvage(
  path: str | os.PathLike[str], magic: bytes, version: int, faults: list[StoreError]
) -> Iterator[dict[str, Any]]:
  """Every whole record of a damaged file, oldest first.

  Args:
    path, magic, version: as in RecordReader.
    faults: what is wrong is appended to it.

  Raises (while iterating):
    StoreError: it cannot be opened, is empty, or is of another kind or version.
  """
  reader = RecordReader(path, magic, version)
  try:
    with reader.path.open("rb") as file:
      data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  except (OSError, ValueError) as error:
    raise StoreError(path, 0, f"cannot be read: {error}") from error
  with data:
    try:
      reader._read_header(data[: _HEADER.size])
    except StoreError as error:
      if struct.pack("<I", zlib.crc32(data[:12])) == data[12 : _HEADER.size]:
        raise  # a whole header, of something else
      faults.append(error)
    offset, expected = _HEADER.size, 0
    while offset < len(data):
      number, payload, end = _record_at(data, offset)
      if payload is None:
        faults.append(StoreError(path, offset, f"record {expected} is damaged or cut off"))
        while offset < len(data) and payload is None:
          offset += 1
          number, payload, end = _record_at(data, offset)
      elif number != expected:
        reason = f"record {number} stands where {expected} must follow"
        faults.append(StoreError(path, offset, reason))
      if payload:  # the end mark has none
        yield reader._decoded(offset, payload)
      offset, expected = end, number + 1


def _record_at(data: mmap.mmap, offset: int) -> tuple[int, bytes | None, int]:
  """Number, payload and end of the record that begins at ``offset``; no payload if none does."""
  head = data[offset : offset + _HEAD.size]
  if len(head) == _HEAD.size:
    length, number, payload_crc, head_crc = _HEAD.unpack(head)
    end = offset + _HEAD.size + length
    if zlib.crc32(head[:12]) == head_crc and end <= len(data):
      payload = data[offset + _HEAD.size : end]
      if zlib.crc32(payload) == payload_crc:
        return number, payload, end
  return 0, None, len(data)


class RecordWriter:
  """Appends records to a file, creating it if there is none.

  An existing file is read through first: one that is damaged is refused, a torn tail is dropped
  (``torn`` tells) and so is the end mark, and writing goes on after the last whole record. A write
  that fails (a full disk) leaves the file as it was before that record. Only one writer at a time.

  Args:
    path: the file; its folder is made.
    magic: 8 bytes that name the kind of file.
    version: version of the records.

  Attributes:
    count: records in the file.
    torn: what was dropped from an existing file, or None.

  Raises:
    StoreError: an existing file is damaged, of another kind or version.
  """

  def __init__(self, path: str | os.PathLike[str], magic: bytes, version: int = 1) -> None:
    self.path = Path(path)
    self.count = 0
    self.torn: TornTail | None = None
    self._offset = 0
    self._descriptor: int | None = None
    header = _header(_checked_magic(magic), version)
    if self.path.exists():
      reader = RecordReader(self.path, magic, version, recover_tail=True)
      self._offset = _HEADER.size
      for offset, payload in reader.payloads():
        self.count += 1
        self._offset = offset + _HEAD.size + len(payload)
      self.torn = reader.torn
      if self.torn is not None:
        self._offset = self.torn.offset
    else:
      self.path.parent.mkdir(parents=True, exist_ok=True)
    self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(self._descriptor, self._offset)
    if self._offset == 0:
      self._write(header)
      self.flush()
      _sync_folder(self.path.parent)

  def append(self, record: Mapping[str, Any]) -> int:
    """Writes one record; ``flush`` makes it last.

    Returns:
      The byte offset at which it starts.

    Raises:
      TypeError: a value that cannot be stored; nothing is written.
      OSError: the disk failed; the file is as before.
    """
    payload = encode_record(record)
    if len(payload) > _LARGEST:
      raise ValueError(f"a record of {len(payload)} bytes; allowed: up to {_LARGEST}.")
    offset = self._offset
    self._write(_head(len(payload), self.count, payload) + payload)
    self.count += 1
    return offset

  def flush(self) -> None:
    """Returns when all records appended so far are on the disk."""
    os.fsync(self._open())

  def close(self) -> None:
    """Writes the end mark and syncs. A second call does nothing."""
    if self._descriptor is None:
      return
    try:
      self._write(_head(0, self.count, b""))
      self.flush()
    finally:
      self.abandon()

  def abandon(self) -> None:
    """Closes the file without an end mark, as a crash would."""
    if self._descriptor is not None:
      os.close(self._descriptor)
      self._descriptor = None

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    if kind is None:
      self.close()
    else:
      self.abandon()

  def _open(self) -> int:
    if self._descriptor is None:
      raise ValueError(f"{self.path} is closed; open a new writer to append.")
    return self._descriptor

  def _write(self, data: bytes) -> None:
    descriptor = self._open()
    written = 0
    try:
      view = memoryview(data)
      while written < len(data):
        written += os.pwrite(descriptor, view[written:], self._offset + written)
    except BaseException:
      os.ftruncate(descriptor, self._offset)
      raise
    self._offset += written


def encode_record(record: Mapping[str, Any]) -> bytes:
  """msgpack of nested dicts, lists, tuples, str, bytes, numbers, None and numpy arrays, exactly.

  Raises:
    TypeError: any other type, or an array of objects.
  """
  return _pack(dict(record))


def decode_record(data: bytes) -> dict[str, Any]:
  """Inverse of ``encode_record``; arrays are writable copies with their dtype and shape."""
  record = _unpack(data)
  if not isinstance(record, dict):
    raise ValueError(f"a record must be a map, got {type(record).__name__}")
  return record


def _pack(value: Any) -> bytes:
  # Strict types: subclasses (enums, numpy floats) and tuples come to _extend instead of passing as
  # their base. Surrogates: a tool's output may hold them.
  return msgpack.packb(
    value, default=_extend, strict_types=True, use_bin_type=True, unicode_errors="surrogatepass"
  )


def _unpack(data: bytes) -> Any:
  return msgpack.unpackb(
    data,
    ext_hook=_restore,
    strict_map_key=False,
    raw=False,
    unicode_errors="surrogatepass",
  )


def _extend(value: Any) -> Any:
  if isinstance(value, np.ndarray):
    if value.dtype.kind not in _STORED_KINDS:
      raise TypeError(
        f"cannot store an array of dtype {value.dtype}; allowed kinds: {_STORED_KINDS}."
      )
    return msgpack.ExtType(
      _ARRAY, _pack([value.dtype.str, list(value.shape), value.tobytes(order="C")])
    )
  if isinstance(value, np.generic):
    if value.dtype.kind not in _STORED_KINDS:
      raise TypeError(f"cannot store a scalar of dtype {value.dtype}.")
    return msgpack.ExtType(_SCALAR, _pack([value.dtype.str, value.tobytes()]))
  if isinstance(value, tuple):
    return msgpack.ExtType(_TUPLE, _pack(list(value)))
  if isinstance(value, str):
    return str.__str__(value)
  if isinstance(value, int):  # beyond 64 bits
    size = value.bit_length() // 8 + 1
    return msgpack.ExtType(_INTEGER, value.to_bytes(size, "little", signed=True))
  if isinstance(value, Mapping):
    return dict(value)
  raise TypeError(
    f"cannot store {type(value).__name__} {value!r:.80}; allowed: dict, list, tuple, str, bytes, "
    "numbers, bool, None, numpy arrays."
  )


def _restore(code: int, data: bytes) -> Any:
  if code == _ARRAY:
    dtype, shape, buffer = _unpack(data)
    return np.frombuffer(buffer, np.dtype(dtype)).reshape(shape).copy()
  if code == _SCALAR:
    dtype, buffer = _unpack(data)
    return np.frombuffer(buffer, np.dtype(dtype))[0]
  if code == _TUPLE:
    return tuple(_unpack(data))
  if code == _INTEGER:
    return int.from_bytes(data, "little", signed=True)
  raise ValueError(f"unknown extension code {code}")


def _header(magic: bytes, version: int) -> bytes:
  start = struct.pack("<8sI", magic, version)
  return start + struct.pack("<I", zlib.crc32(start))


def _head(length: int, number: int, payload: bytes) -> bytes:
  start = struct.pack("<III", length, number, zlib.crc32(payload))
  return start + struct.pack("<I", zlib.crc32(start))


def _checked_magic(magic: bytes) -> bytes:
  if len(magic) != 8:
    raise ValueError(f"magic must be 8 bytes, got {magic!r} of {len(magic)}.")
  return magic


def _show_magic(magic: bytes) -> str:
  return magic.rstrip(b"\0").decode("latin-1")


def _sync_folder(folder: Path) -> None:
  """Makes a new file's name last, too."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
