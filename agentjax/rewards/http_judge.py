"""A judge behind an endpoint with the OpenAI chat protocol. Needs the extra [web]."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from agentjax.config import Config, check
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.trajectory.record import Message

_MOST_ALTERNATIVES = 20  # what endpoints give at most beside a token


class JudgeRefusedError(RuntimeError):
  """The endpoint answered, but not with a reply: a wrong model name, key or request."""


@dataclasses.dataclass(unsafe_hash=True)
class HttpJudgeConfig(Config):
  """Where a judge is, and how it samples.

  Attributes:
    base_url: up to and with /v1, such as http://host:8000/v1.
    model: the name the endpoint knows it by.
    api_key_variable: environment variable that holds its key; "" sends none.
    temperature, top_p, max_tokens: of its replies.
    timeout: seconds a request.
  """

  base_url: str = ""
  model: str = ""
  api_key_variable: str = ""
  temperature: float = 0.0
  top_p: float = 1.0
  max_tokens: int = 1024
  timeout: float = 300.0

  def validate(self, path: str = "judge") -> None:
    super().validate(path)
    known = self.base_url.startswith(("http://", "https://"))
    check(known, f"{path}.base_url", self.base_url, "http://... or https://...")
    check(bool(self.model), f"{path}.model", self.model, "the endpoint's name of the model")
    check(self.temperature >= 0, f"{path}.temperature", self.temperature, ">= 0")
    check(0 < self.top_p <= 1, f"{path}.top_p", self.top_p, "over 0, up to 1")
    check(self.max_tokens >= 1, f"{path}.max_tokens", self.max_tokens, ">= 1")
    check(self.timeout > 0, f"{path}.timeout", self.timeout, "seconds > 0")


class HttpJudge:
  """Asks ``POST base_url/chat/completions``; a ``LetterJudge``.

  Connection failures, time-outs and the statuses 408, 429 and 5xx are ``JudgeUnavailableError``;
  any other refusal is a ``JudgeRefusedError``. Holds no connection between calls, so that threads
  with event loops of their own may share it.

  Raises:
    ImportError: aiohttp is missing.
  """

  def __init__(self, config: HttpJudgeConfig):
    config.validate()
    try:
      import aiohttp  # noqa: F401
    except ImportError as error:
      raise ImportError("judges over HTTP need aiohttp: pip install agentjax[web]") from error
    self._config = config

  async def reply(self, messages: Sequence[Message], *, key: int) -> str:
    config = self._config
    choice = await self._post(
      {
        "messages": [{"role": m.role, "content": m.content} for m in messages],
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
        "seed": key % 2**31,
      }
    )
    content = choice["message"].get("content")
    if not isinstance(content, str):
      raise JudgeRefusedError(f"the reply of {config.model} has no text: {str(choice)[:300]}")
    return content

  async def log_probs(
    self, messages: Sequence[Message], opening: str, choices: Sequence[str]
  ) -> list[float]:
    """Log-probs of one-token choices, from the 20 most likely tokens that an endpoint tells.

    A choice that is not among them gets the least log-prob that was told, which bounds its own from
    above: a margin is then finite and too small rather than infinite, and cannot win because the
    other letter was cut off. Exact log-probs come from ``EngineJudge``. Needs an endpoint that goes
    on with an assistant's message (``continue_final_message`` of vLLM and SGLang).

    Raises:
      JudgeRefusedError: no choice is among the tokens told.
    """
    begun = [*({"role": m.role, "content": m.content} for m in messages)]
    begun.append({"role": "assistant", "content": opening})
    choice = await self._post(
      {
        "messages": begun,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "temperature": 0.0,
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": _MOST_ALTERNATIVES,
      }
    )
    return bounded_log_probs(_alternatives(choice), choices)

  async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
    import aiohttp

    config, headers = self._config, {}
    if config.api_key_variable:
      secret = os.environ.get(config.api_key_variable)
      if not secret:
        raise JudgeRefusedError(f"the environment variable {config.api_key_variable} is not set")
      headers["Authorization"] = f"Bearer {secret}"
    url = f"{config.base_url.rstrip('/')}/chat/completions"
    limit = aiohttp.ClientTimeout(total=config.timeout)
    try:
      async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(url, json={"model": config.model, **body}, headers=headers) as response,
      ):
        text = await response.text()
        if response.status in (408, 429) or response.status >= 500:
          raise JudgeUnavailableError(f"{url} answered {response.status}: {text[:200]}")
        if response.status != 200:
          raise JudgeRefusedError(f"{url} answered {response.status}: {text[:500]}")
        values = await response.json(content_type=None)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
      raise JudgeUnavailableError(f"{url}: {type(error).__name__}: {error}") from error
    try:
      return values["choices"][0]
    except (KeyError, IndexError, TypeError):
      raise JudgeRefusedError(f"{url} gave no choice: {str(values)[:300]}") from None


def bounded_log_probs(alternatives: dict[str, float], choices: Sequence[str]) -> list[float]:
  """Log-probs of the choices among the tokens told; see ``HttpJudge.log_probs``."""
  if not any(choice in alternatives for choice in choices):
    raise JudgeRefusedError(
      f"none of {list(choices)} is among the tokens told: {list(alternatives)[:20]}"
    )
  floor = min(alternatives.values())
  return [alternatives.get(choice, floor) for choice in choices]


def _alternatives(choice: dict[str, Any]) -> dict[str, float]:
  """Token text -> log-prob at the first position; blanks around a token do not count."""
  try:
    told = choice["logprobs"]["content"][0]["top_logprobs"]
  except (KeyError, IndexError, TypeError):
    raise JudgeRefusedError(
      "the endpoint tells no log-probs (top_logprobs); use one that does, or EngineJudge"
    ) from None
  found: dict[str, float] = {}
  for entry in told:
    token, log_prob = entry["token"].strip(), float(entry["logprob"])
    found[token] = max(found.get(token, log_prob), log_prob)
  return found
