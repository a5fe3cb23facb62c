"""Model endpoints with the OpenAI protocol: where they are, what they are sent, how they fail.

Needs [web].
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.adapters.http_client import NoAnswerError, NoTokenError, exchange, load_aiohttp
from agentjax.config import Config, FilePath, PositiveFloat, check
from agentjax.faults import Fault, Owner
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.trajectory.artifacts import read_artifact
from agentjax.trajectory.record import Message, Part

_OF_THE_REQUEST = frozenset((400, 413, 422))


class JudgeRefusedError(RuntimeError):
  """No reply, and asking again will not help: a wrong model name, key, setting or request.

  Attributes:
    fault: the policy's, if the request was refused: it may be too long or malformed.
  """

  def __init__(self, message: str, status: int | None = None):
    super().__init__(message)
    self.fault = Fault(Owner.POLICY, "data", message) if status in _OF_THE_REQUEST else None


@dataclasses.dataclass(unsafe_hash=True)
class EndpointConfig(Config):
  """Where a model is served.

  Attributes:
    base_url: up to and with /v1, such as http://host:8000/v1.
    model: the name the endpoint knows it by.
    api_key_variable: environment variable that holds its key; "" sends none.
    timeout: seconds a request.
    images: folder with the images of messages by their hash, such as RUN/artifacts; the model must
      read images. None: it reads text only, and a message with an image is refused.
  """

  base_url: str = ""
  model: str = ""
  api_key_variable: str = ""
  timeout: PositiveFloat = 300.0
  images: FilePath | None = None

  def validate(self, path: str = "endpoint") -> None:
    super().validate(path)
    known = self.base_url.startswith(("http://", "https://"))
    check(known, f"{path}.base_url", self.base_url, "http://... or https://...")
    check(bool(self.model), f"{path}.model", self.model, "the endpoint's name of the model")


def endpoint_identity(config: EndpointConfig) -> dict[str, Any]:
  """The settings of an endpoint that influence its text."""
  by_the_way = ("api_key_variable", "timeout", "attempts", "images")
  return {name: value for name, value in config.to_dict().items() if name not in by_the_way}


async def chat_messages(
  config: EndpointConfig, messages: Sequence[Message]
) -> list[dict[str, Any]]:
  """The ``messages`` of a request; images are ``image_url`` parts with data URLs.

  Raises:
    JudgeRefusedError: an image, and ``config.images`` is None or does not hold it.
  """
  if not any(message.images for message in messages):
    return [{"role": m.role, "content": m.content} for m in messages]
  return await asyncio.to_thread(_with_images, config, messages)


def _with_images(config: EndpointConfig, messages: Sequence[Message]) -> list[dict[str, Any]]:
  return [
    {"role": m.role, "content": [_part(config, p) for p in m.parts] if m.parts else m.content}
    for m in messages
  ]


def _part(config: EndpointConfig, part: Part) -> dict[str, Any]:
  if isinstance(part, str):
    return {"type": "text", "text": part}
  folder, field = config.images, f"{type(config).__name__}.images"
  if folder is None:
    raise JudgeRefusedError(
      f"a message for {config.model} holds the image {part.sha256[:12]} ({part.media_type}), and "
      f"{field} is None: the endpoint reads text only. If its model reads images, set {field} to "
      "the folder that holds them by hash, such as RUN/artifacts."
    )
  content = read_artifact(folder, part.sha256)
  if content is None:
    raise JudgeRefusedError(
      f"a message for {config.model} holds the image {part.sha256} ({part.media_type}), and "
      f"{field}={folder} does not hold it; allowed: a folder that ArtifactStore wrote, such as "
      "RUN/artifacts of the run that made the image (a full store deletes its oldest files)."
    )
  url = f"data:{part.media_type};base64,{base64.b64encode(content).decode()}"
  return {"type": "image_url", "image_url": {"url": url}}


async def send(
  config: EndpointConfig,
  path: str,
  body: Mapping[str, Any],
  user: str,
  most_bytes: int | None = None,
) -> tuple[str, int, bytes]:
  """Address, status and bytes of the answer of ``POST base_url/path``, whatever the status is.

  Holds no connection between calls, so that threads with event loops of their own may share it.

  Args:
    config: of the endpoint.
    path: such as "chat/completions".
    body: of the request; the model's name is added.
    user: what needs aiohttp, for the message where it is missing.
    most_bytes: of an answer; None takes any.

  Raises:
    JudgeUnavailableError: no connection, no answer in time, or an answer that is too long.
    JudgeRefusedError: no key in the environment.
  """
  aiohttp = load_aiohttp(user)
  url = f"{config.base_url.rstrip('/')}/{path}"
  limit = aiohttp.ClientTimeout(total=config.timeout)
  try:
    async with aiohttp.ClientSession(timeout=limit) as session:
      status, data = await exchange(
        session,
        "POST",
        url,
        body={"model": config.model, **body},
        token_variable=config.api_key_variable or None,
        most_bytes=most_bytes,
      )
  except NoTokenError as error:
    raise JudgeRefusedError(str(error)) from None
  except NoAnswerError as error:
    raise JudgeUnavailableError(str(error)) from error
  return url, status, data


async def post(config: EndpointConfig, path: str, body: dict[str, Any]) -> dict[str, Any]:
  """The answer of ``POST base_url/path``, with at least one choice.

  Args:
    config: of the endpoint.
    path: such as "chat/completions".
    body: of the request; the model's name is added.

  Raises:
    JudgeUnavailableError: no connection, a time-out, the statuses 408, 429 and 5xx, or a text that
      is no JSON, such as the page of a proxy.
    JudgeRefusedError: any other refusal, no key in the environment, or no choice.
  """
  url, status, data = await send(config, path, body, "a model")
  if status in (408, 429) or status >= 500:
    raise JudgeUnavailableError(f"{url} answered {status}: {_text(data[:200])}")
  if status != 200:
    raise JudgeRefusedError(f"{url} answered {status}: {_text(data[:500])}", status)
  try:
    values = json.loads(data)
  except (ValueError, RecursionError):
    raise JudgeUnavailableError(f"{url} answered no JSON: {_text(data[:200])}") from None
  try:
    found = isinstance(values["choices"][0], dict)
  except (KeyError, IndexError, TypeError):
    found = False
  if not found:
    raise JudgeRefusedError(f"{url} gave no choice: {str(values)[:300]}")
  return values


def _text(data: bytes) -> str:
  return data.decode(errors="replace")
