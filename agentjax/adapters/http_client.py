"""One HTTP request and its answer, over aiohttp, with its errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class NoAnswerError(RuntimeError):
  """No whole answer came."""


class NoTokenError(RuntimeError):
  """The environment variable that should hold a token is not set; the message names it."""


def load_aiohttp(user: str) -> ModuleType:
  """The library. Raises ImportError that names ``user``, the part that needs it, and the extra."""
  try:
    import aiohttp
  except ImportError as error:
    raise ImportError(f"{user} over HTTP needs aiohttp: pip install 'agentjax[web]'") from error
  return aiohttp


async def exchange(
  session: Any,
  method: str,
  url: str,
  *,
  body: Mapping[str, Any] | None = None,
  token_variable: str | None = None,
  most_bytes: int | None = None,
) -> tuple[int, bytes]:
  """Sends a request as JSON; status and bytes of the answer.

  Args:
    session: ``aiohttp.ClientSession``.
    method, url: of the request.
    body: sent as JSON.
    token_variable: environment variable with a bearer token; None sends none.
    most_bytes: of an answer; None takes any.

  Raises:
    NoTokenError: the variable is not set.
    NoAnswerError: no connection, no answer in time, or an answer that is too long.
  """
  aiohttp = load_aiohttp("a service")
  headers = {}
  if token_variable is not None:
    token = os.environ.get(token_variable)
    if not token:
      raise NoTokenError(f"the environment variable {token_variable} is not set")
    headers["Authorization"] = f"Bearer {token}"
  try:
    async with session.request(method, url, json=body, headers=headers) as response:
      data = bytearray()
      async for part in response.content.iter_chunked(1 << 16):
        data += part
        if most_bytes is not None and len(data) > most_bytes:
          raise NoAnswerError(f"{url}: an answer of more than {most_bytes} bytes")
      return response.status, bytes(data)
  except aiohttp.ClientConnectorError as error:
    raise NoAnswerError(f"{url}: no connection ({error})") from error
  except (aiohttp.ClientError, OSError, TimeoutError) as error:
    raise NoAnswerError(f"{url}: {type(error).__name__} {error}".rstrip()) from error
