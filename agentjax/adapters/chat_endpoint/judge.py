"""A judge behind an endpoint with the OpenAI chat protocol. Needs the extra [web]."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from agentjax.adapters.chat_endpoint.endpoint import (
  EndpointConfig,
  JudgeRefusedError,
  chat_messages,
  post,
)
from agentjax.adapters.http_client import load_aiohttp
from agentjax.config import NonNegativeFloat, PositiveInt, PositiveShare
from agentjax.trajectory.record import Message

_MOST_ALTERNATIVES = 20  # what endpoints give at most beside a token


class ChoiceNotToldError(JudgeRefusedError):
  """None of the choices is among the most likely tokens, so the margin is unknown."""


@dataclasses.dataclass(unsafe_hash=True)
class HttpJudgeConfig(EndpointConfig):
  """Where a judge is, and how it samples.

  Attributes:
    temperature, top_p, max_tokens: of its replies.
  """

  temperature: NonNegativeFloat = 0.0
  top_p: PositiveShare = 1.0
  max_tokens: PositiveInt = 1024


class HttpJudge:
  """Asks ``POST base_url/chat/completions``; a ``LetterJudge``.

  Failures are those of ``post`` and ``chat_messages``.

  Raises:
    ImportError: aiohttp is missing.
  """

  def __init__(self, config: HttpJudgeConfig):
    config.validate()
    load_aiohttp("a judge")
    self._config = config

  async def reply(self, messages: Sequence[Message], *, key: int) -> str:
    config = self._config
    choice = await self._ask(
      {
        "messages": await chat_messages(config, messages),
        **self._drawn(key),
      }
    )
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
      raise JudgeRefusedError(f"the reply of {config.model} has no text: {str(choice)[:300]}")
    return content

  async def log_probs(
    self, messages: Sequence[Message], opening: str, choices: Sequence[str]
  ) -> list[float]:
    """Log-probs of one-token choices, from the 20 most likely tokens that an endpoint tells.

    A choice that is not among them gets the lowest of their log-probs, an upper bound of its own.
    So a margin is finite and too small rather than infinite, and cannot win only because the other
    letter is missing. Exact log-probs come from ``EngineJudge``. Needs an endpoint that goes on
    with an assistant's message (``continue_final_message`` of vLLM and SGLang).

    Raises:
      ChoiceNotToldError: no choice is among the tokens told.
    """
    begun = await chat_messages(self._config, messages)
    begun.append({"role": "assistant", "content": opening})
    choice = await self._ask(
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

  def _drawn(self, key: int) -> dict[str, Any]:
    """How a reply is drawn, in the fields of a request."""
    config = self._config
    return {
      "temperature": config.temperature,
      "top_p": config.top_p,
      "max_tokens": config.max_tokens,
      "seed": key % 2**31,
    }

  async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
    return (await post(self._config, "chat/completions", body))["choices"][0]


def bounded_log_probs(alternatives: dict[str, float], choices: Sequence[str]) -> list[float]:
  """Log-probs of the choices among the tokens told; see ``HttpJudge.log_probs``."""
  if not any(choice in alternatives for choice in choices):
    raise ChoiceNotToldError(
      f"none of {list(choices)} is among the tokens told: {list(alternatives)[:20]}"
    )
  floor = min(alternatives.values())
  return [alternatives.get(choice, floor) for choice in choices]


def _alternatives(choice: dict[str, Any]) -> dict[str, float]:
  """Token text -> log-prob at the first position; blanks around a token do not count."""
  try:
    told = choice["logprobs"]["content"][0]["top_logprobs"]
    pairs = [(entry["token"].strip(), float(entry["logprob"])) for entry in told]
  except (KeyError, IndexError, TypeError, ValueError, AttributeError):
    raise JudgeRefusedError(
      "the endpoint tells no log-probs (top_logprobs); use one that does, or EngineJudge"
    ) from None
  found: dict[str, float] = {}
  for token, log_prob in pairs:
    found[token] = max(found.get(token, log_prob), log_prob)
  return found
