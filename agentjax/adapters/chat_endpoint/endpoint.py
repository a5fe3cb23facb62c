"""Model endpoints with the OpenAI protocol: where they are, and how they fail. Needs [web]."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from agentjax.config import Config, PositiveFloat, check
from agentjax.faults import Fault, Owner
from agentjax.http_client import NoAnswerError, NoTokenError, exchange, load_aiohttp
from agentjax.rewards.judges import JudgeUnavailableError

_OF_THE_REQUEST = frozenset((400, 413, 422))


class JudgeRefusedError(RuntimeError):
  """The endpoint answered, but not with a reply: a wrong model name, key or request.

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
  """

  base_url: str = ""
  model: str = ""
  api_key_variable: str = ""
  timeout: PositiveFloat = 300.0

  def validate(self, path: str = "endpoint") -> None:
    super().validate(path)
    known = self.base_url.startswith(("http://", "https://"))
    check(known, f"{path}.base_url", self.base_url, "http://... or https://...")
    check(bool(self.model), f"{path}.model", self.model, "the endpoint's name of the model")


def endpoint_identity(config: EndpointConfig) -> dict[str, Any]:
  """The settings of an endpoint that influence its text."""
  by_the_way = ("api_key_variable", "timeout", "attempts")
  return {name: value for name, value in config.to_dict().items() if name not in by_the_way}


async def post(config: EndpointConfig, path: str, body: dict[str, Any]) -> dict[str, Any]:
  """The answer of ``POST base_url/path``, with at least one choice.

  Holds no connection between calls, so that threads with event loops of their own may share it.

  Args:
    config: of the endpoint.
    path: such as "chat/completions".
    body: of the request; the model's name is added.

  Raises:
    JudgeUnavailableError: no connection, a time-out, or the statuses 408, 429 and 5xx.
    JudgeRefusedError: any other refusal, no key in the environment, or no choice.
  """
  aiohttp = load_aiohttp("a model")
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
      )
  except NoTokenError as error:
    raise JudgeRefusedError(str(error)) from None
  except NoAnswerError as error:
    raise JudgeUnavailableError(str(error)) from error
  if status in (408, 429) or status >= 500:
    raise JudgeUnavailableError(f"{url} answered {status}: {_text(data[:200])}")
  if status != 200:
    raise JudgeRefusedError(f"{url} answered {status}: {_text(data[:500])}", status)
  values = json.loads(data)
  try:
    values["choices"][0]
  except (KeyError, IndexError, TypeError):
    raise JudgeRefusedError(f"{url} gave no choice: {str(values)[:300]}") from None
  return values


def _text(data: bytes) -> str:
  return data.decode(errors="replace")
