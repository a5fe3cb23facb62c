"""A judge over our own engine: replies, and exact log-probs of any continuation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from agentjax.engine import (
  ContextLengthError,
  Engine,
  EngineBusyError,
  Finish,
  SampleRequest,
  SamplingConfig,
)
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.rollout import keys
from agentjax.text.chat import Chat
from agentjax.threads import run_in_loop
from agentjax.trajectory.record import Message

T = TypeVar("T")


class EngineJudge:
  """A model that an engine samples from, as an ``agentjax.rewards.judges.LetterJudge``.

  Args:
    engine: with published weights: a frozen judge's own, or the policy's (a policy that judges
      itself changes its standard with every update).
    chat: of its vocabulary.
    sampling: of replies; temperature 0 is greedy.
    max_tokens: of a reply. A reply that is cut off is returned, but cannot be read.
    seed: with the key of a question it addresses all randomness.
    loop: the event loop that uses the engine, if questions come from other threads, such as those
      of a run's scorers. None: the caller's loop.
  """

  def __init__(
    self,
    engine: Engine,
    chat: Chat,
    sampling: SamplingConfig,
    *,
    max_tokens: int,
    seed: int,
    loop: asyncio.AbstractEventLoop | None = None,
  ):
    self._engine, self._chat, self._sampling = engine, chat, sampling
    self._max_tokens, self._seed, self._loop = max_tokens, seed, loop

  async def reply(self, messages: Sequence[Message], *, key: int) -> str:
    return await self._there(self._reply(messages, key))

  async def log_probs(
    self, messages: Sequence[Message], opening: str, choices: Sequence[str]
  ) -> list[float]:
    """Sums over the tokens of each choice, nats, at temperature 1: from whole distributions.

    Opening and choices are encoded separately, as when a model continues its own opening.
    """
    return await self._there(self._log_probs(messages, opening, choices))

  async def _there(self, work: Coroutine[Any, Any, T]) -> T:
    try:
      return await run_in_loop(self._loop, work)
    except EngineBusyError as error:
      raise JudgeUnavailableError(str(error)) from error

  def _prompt(self, messages: Sequence[Message]) -> list[int]:
    return [i for span in self._chat.prompt(messages) for i in span.ids]

  async def _reply(self, messages: Sequence[Message], key: int) -> str:
    prompt = self._prompt(messages)
    request = SampleRequest(
      key_data=keys.derive(self._seed, keys.Stream.JUDGE, key),
      max_tokens=self._max_tokens,
      sampling=self._sampling,
      stop_ids=self._chat.stop_ids,
    )
    context = await self._engine.open_ids(prompt)
    try:
      sample = await context.generate(request)
    finally:
      context.close()
    ids = sample.token_ids[:-1] if sample.finish is Finish.STOP else sample.token_ids
    return self._chat.tokenizer.decode([int(i) for i in ids])

  async def _log_probs(
    self, messages: Sequence[Message], opening: str, choices: Sequence[str]
  ) -> list[float]:
    encode = self._chat.tokenizer.encode
    prefix = [*self._prompt(messages), *encode(opening)]
    wanted = [tuple(encode(choice)) for choice in choices]
    if not all(wanted):
      raise ValueError(f"choices={list(choices)}; allowed: texts of at least one token.")
    longest = max(map(len, wanted))
    if len(prefix) + longest > self._engine.max_tokens:
      raise ContextLengthError(
        f"{len(prefix)} tokens and {longest} of a choice; engine.max_length and "
        f"engine.cache_tokens allow {self._engine.max_tokens}."
      )
    shared = await self._engine.prefill(prefix)
    try:
      return list(await asyncio.gather(*(self._log_prob(shared, ids) for ids in wanted)))
    finally:
      shared.release()

  async def _log_prob(self, prefix: Any, ids: tuple[int, ...]) -> float:
    context = await self._engine.open(prefix)
    try:
      sample = await context.generate(
        SampleRequest(
          key_data=(0, 0),  # nothing is drawn
          max_tokens=len(ids),
          sampling=SamplingConfig(temperature=1.0),
          forced_ids=ids,
        )
      )
    finally:
      context.close()
    return float(sample.behaviour_log_probs.sum(dtype=np.float64))
