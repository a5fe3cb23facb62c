"""Plain values as JSON, the only data that pass between the code under test and its tests.

None, booleans, numbers, text and lists are written directly; every other kind is an object with one
key, its kind. Reading only makes exact built-in types, so no object of the other side, and none of
its methods, ever arrives.
"""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any

_LARGEST_JSON_INT = 1 << 53
_TYPES: dict[str, Any] = {
  t.__name__: t
  for t in (
    bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object
  )
}  # fmt: skip


class NotPlain(ValueError):
  """A value that cannot cross, or JSON that is no plain value."""


def encode(value: Any, refer: Callable[[Any], Any] | None = None) -> Any:
  """``value`` as JSON. An object of a subclass counts as its built-in base.

  Args:
    value: what to write.
    refer: object that is not plain -> JSON that stands for it, or None where nothing does.

  Raises:
    NotPlain: it holds an object that neither is plain nor referred to.
  """
  if value is None or value is True or value is False:
    return value
  if isinstance(value, int):
    number = int.__index__(value)
    return number if abs(number) < _LARGEST_JSON_INT else {"int": hex(number)}
  if isinstance(value, float):
    return float.__float__(value)
  if isinstance(value, str):
    return str.__str__(value)
  if isinstance(value, list):
    return [encode(v, refer) for v in list.__iter__(value)]
  if isinstance(value, dict):
    return {
      "dict": [[encode(k, refer), encode(v, refer)] for k, v in dict.items(value)],
    }
  for kind in ("tuple", "set", "frozenset"):
    if isinstance(value, _TYPES[kind]):
      return {kind: [encode(v, refer) for v in _TYPES[kind].__iter__(value)]}
  for kind in ("bytes", "bytearray"):
    if isinstance(value, _TYPES[kind]):
      return {kind: _TYPES[kind].hex(value)}
  if isinstance(value, complex):
    return {"complex": [value.real, value.imag]}
  if isinstance(value, range):
    return {"range": [encode(v) for v in (value.start, value.stop, value.step)]}
  if isinstance(value, decimal.Decimal):
    return {"decimal": decimal.Decimal.__str__(value)}
  if isinstance(value, fractions.Fraction):
    return {"fraction": [hex(value.numerator), hex(value.denominator)]}
  if isinstance(value, type) and value in _TYPES.values():
    return {"type": value.__name__}
  if refer is not None and (stand_in := refer(value)) is not None:
    return stand_in
  raise NotPlain(f"a {type(value).__name__} is not a plain value")


def decode(data: Any, refer: Callable[[str, Any], Any] | None = None) -> Any:
  """Inverse of ``encode``.

  Args:
    data: parsed JSON.
    refer: (kind, content) of an object of unknown kind -> what it stands for.

  Raises:
    NotPlain: ``encode`` does not write such data.
  """
  try:
    return _decode(data, refer)
  except (TypeError, ArithmeticError, RecursionError, AttributeError, LookupError) as error:
    raise NotPlain(f"not a plain value: {error}") from error
  except ValueError as error:
    raise NotPlain(str(error)) from error


def _decode(data: Any, refer: Callable[[str, Any], Any] | None) -> Any:
  if not isinstance(data, list | dict):
    return data
  if isinstance(data, list):
    return [_decode(v, refer) for v in data]
  ((kind, content),) = data.items()
  if kind == "int":
    return int(content, 16)
  if kind == "dict":
    return {_decode(k, refer): _decode(v, refer) for k, v in content}
  if kind in ("tuple", "set", "frozenset"):
    return _TYPES[kind](_decode(v, refer) for v in content)
  if kind in ("bytes", "bytearray"):
    return _TYPES[kind].fromhex(content)
  if kind == "complex":
    return complex(*content)
  if kind == "range":
    return range(*(_decode(v, None) for v in content))
  if kind == "decimal":
    return decimal.Decimal(content)
  if kind == "fraction":
    return fractions.Fraction(int(content[0], 16), int(content[1], 16))
  if kind == "type":
    return _TYPES[content]
  if refer is None:
    raise NotPlain(f"unknown kind {kind!r}")
  return refer(kind, content)
