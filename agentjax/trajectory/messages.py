"""Messages as JSON, images by the hash of their content. No jax."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

from agentjax.trajectory.record import Flag, Image, Message, Part, ToolCall

ROLES = ("system", "user", "assistant", "tool")

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
# Frames of a JPEG begin with one of these; 0xC4, 0xC8 and 0xCC are tables.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def describe_image(content: bytes) -> Image:
  """The description of an image file in a message: hash, media type, width and height.

  Raises:
    ValueError: it is neither PNG nor JPEG, or cut off before its size.
  """
  size = None
  if content.startswith(_PNG) and content[12:16] == b"IHDR" and len(content) >= 24:
    media_type, size = "image/png", struct.unpack(">II", content[16:24])
  elif content.startswith(_JPEG):
    media_type, size = "image/jpeg", _jpeg_size(content)
  if size is None or not all(size):
    raise ValueError(
      f"an image of {len(content)} bytes that begins with {content[:8].hex()!r}; allowed: PNG and "
      "JPEG, whole up to their width and height."
    )
  return Image(hashlib.sha256(content).hexdigest(), media_type, *size)


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
  """Width and height, from the header of the first frame."""
  at = 2
  while at + 9 <= len(content) and content[at] == 0xFF:
    marker = content[at + 1]
    if marker == 0xFF:  # padding before a marker
      at += 1
    elif marker in _JPEG_FRAMES:
      height, width = struct.unpack(">HH", content[at + 5 : at + 9])
      return width, height
    else:
      at += 2 + int.from_bytes(content[at + 2 : at + 4], "big")
  return None


def message_to_json(message: Message) -> dict[str, Any]:
  """A message as plain JSON values; ``content`` is a list of parts where it holds images."""
  values: dict[str, Any] = {"role": message.role, "content": message.content}
  if message.parts:
    values["content"] = [_part_to_json(part) for part in message.parts]
  if message.tool_calls:
    values["tool_calls"] = [
      {"name": call.name, "arguments": dict(call.arguments)}
      | ({} if call.error is None else {"error": call.error})
      for call in message.tool_calls
    ]
  if message.weight != 1:
    values["weight"] = message.weight
  if message.flags:
    values["flags"] = sorted(message.flags)
  return values


def message_from_json(values: Mapping[str, Any]) -> Message:
  """Inverse of ``message_to_json``.

  Raises:
    KeyError, TypeError: a field is missing or of another type.
    ValueError: an unknown role or kind of part.
  """
  role, content = values["role"], values["content"]
  if role not in ROLES:
    raise ValueError(f"role {role!r}; allowed: {', '.join(ROLES)}")
  calls = tuple(
    ToolCall(call["name"], call["arguments"], call.get("error"))
    for call in values.get("tool_calls", ())
  )
  if isinstance(content, str):
    message = Message(role, content, calls)
  else:
    message = Message.of(role, *(_part_from_json(part) for part in content))
  return with_marks(message, values)


def with_marks(message: Message, values: Mapping[str, Any]) -> Message:
  """The message with the ``weight`` and the ``flags`` that its JSON may have; null is none.

  Raises:
    ValueError: a weight below 0, or of a message that no policy writes, or an unknown flag.
  """
  weight, flags = values.get("weight"), values.get("flags") or ()
  if weight is not None and message.role != "assistant":
    raise ValueError(f"weight {weight!r} of a {message.role} message; allowed: of an assistant's")
  weight = 1.0 if weight is None else weight
  if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
    raise ValueError(f"weight {weight!r}; allowed: a number >= 0")
  if not isinstance(flags, list | tuple) or not set(flags) <= set(Flag):
    raise ValueError(f"flags {flags!r}; allowed: a list of {', '.join(Flag)}")
  return dataclasses.replace(message, weight=float(weight), flags=frozenset(map(Flag, flags)))


def _part_to_json(part: Part) -> dict[str, Any]:
  if isinstance(part, str):
    return {"type": "text", "text": part}
  return {
    "type": "image",
    "sha256": part.sha256,
    "media_type": part.media_type,
    "width": part.width,
    "height": part.height,
  }


def _part_from_json(values: Mapping[str, Any]) -> Part:
  if values["type"] == "text":
    return str(values["text"])
  if values["type"] == "image":
    return Image(values["sha256"], values["media_type"], values["width"], values["height"])
  raise ValueError(f"a part of type {values['type']!r}; allowed: text, image")
