"""Models that continue a text (``flow.Writer``): our engine, or an endpoint."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from agentjax.adapters.chat_endpoint.endpoint import (
  EndpointConfig,
  JudgeRefusedError,
  chat_messages,
  post,
)
from agentjax.adapters.http_client import load_aiohttp
from agentjax.config import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, check
from agentjax.engine import Engine, Finish, SampleRequest, SamplingConfig
from agentjax.recipes.tessy.flow import Continuation, GivenUpError
from agentjax.rewards.judges import question_key, question_text, retry
from agentjax.rollout import keys
from agentjax.text.chat import Chat
from agentjax.trajectory.record import Message

PROMPT = "{prompt}"  # in a template: where the question stands
_THOUGHTS = ("reasoning_content", "reasoning")  # fields that some endpoints move thoughts to


class EngineWriter:
  """A model that an engine samples from.

  The text so far is encoded again for every piece, because the other model may have written parts
  of it; the engine's prefix cache saves the work for known text.

  Args:
    engine: with published weights.
    chat: of its vocabulary.
    sampling: how it is drawn.
  """

  def __init__(self, engine: Engine, chat: Chat, sampling: SamplingConfig):
    self._engine, self._chat, self._sampling = engine, chat, sampling

  async def extend(
    self, prompt: tuple[Message, ...], text: str, tokens: int, key: tuple[int, ...]
  ) -> Continuation:
    """As in ``Writer``. A character of which the last bytes are missing is left out."""
    ids = [i for span in self._chat.prompt(prompt) for i in span.ids] + self._chat.begun(text)
    if len(ids) >= self._engine.max_tokens:
      raise GivenUpError(f"{len(ids)} tokens fill engine.max_length")
    seed, *address = key
    context = await self._engine.open_ids(ids)
    try:
      sample = await context.generate(
        SampleRequest(
          key_data=keys.derive(seed, keys.Stream.WRITER, *address),
          max_tokens=tokens,
          sampling=self._sampling,
          stop_ids=self._chat.stop_ids,
        )
      )
    finally:
      context.close()
    drawn = [int(i) for i in sample.token_ids]
    # Markup that the policy must not write ends its turn like a stop.
    markup = self._chat.reserved_ids.union(self._chat.stop_ids)
    end = next((at for at, i in enumerate(drawn) if i in markup), len(drawn))
    ended = end < len(drawn)
    written = self._chat.tokenizer.decode(drawn[:end])
    if not ended:
      written = written.rstrip("\ufffd")
      if sample.finish is Finish.CONTEXT_FULL:
        raise GivenUpError("the text fills engine.max_length")
    return Continuation(written, len(drawn), ended)


@dataclasses.dataclass(unsafe_hash=True)
class HttpWriterConfig(EndpointConfig):
  """A model behind an endpoint, and how it samples.

  Attributes:
    protocol: "completions" sends the text itself, after ``template``; "chat" sends messages, the
      last of which is an assistant's that the model goes on with (``continue_final_message`` of
      vLLM and SGLang), and leaves the template to the endpoint.
    template: how a question is put to this model, with ``{prompt}`` for it; the text follows.
    temperature, top_p: of sampling.
    top_k: sent where it is above 0; not every endpoint knows it.
    attempts: at a request, while the endpoint cannot be reached.
  """

  protocol: Literal["completions", "chat"] = "completions"
  template: str = "{prompt}\n\n"
  temperature: NonNegativeFloat = 0.7
  top_p: PositiveShare = 0.8
  top_k: NonNegativeInt = 20
  attempts: PositiveInt = 3

  def validate(self, path: str = "writer") -> None:
    super().validate(path)
    count = self.template.count(PROMPT)
    check(count == 1, f"{path}.template", self.template, f"a text with one {PROMPT}")


class HttpWriter:
  """Asks ``POST base_url/completions``, or ``chat/completions``.

  Failures are those of ``post`` and ``chat_messages``.

  Raises:
    ImportError: aiohttp is missing.
  """

  def __init__(self, config: HttpWriterConfig):
    config.validate()
    load_aiohttp("a writer")
    self._config = config

  async def extend(
    self, prompt: tuple[Message, ...], text: str, tokens: int, key: tuple[int, ...]
  ) -> Continuation:
    config = self._config
    body: dict[str, Any] = {
      "max_tokens": tokens,
      "temperature": config.temperature,
      "top_p": config.top_p,
      "seed": question_key(*key) % 2**31,
    }
    if config.top_k:
      body["top_k"] = config.top_k
    if config.protocol == "completions":
      path = "completions"
      if any(message.images for message in prompt):
        raise JudgeRefusedError(
          f"a prompt for {config.model} holds an image, and HttpWriterConfig.protocol="
          "'completions' sends text only; set protocol='chat', and images to their folder."
        )
      body["prompt"] = config.template.replace(PROMPT, question_text(prompt)) + text
    else:
      path = "chat/completions"
      body["messages"] = await chat_messages(config, prompt)
      if text:
        body["messages"].append({"role": "assistant", "content": text})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    values = await retry(lambda: post(config, path, body), attempts=config.attempts)
    choice = values["choices"][0]
    try:
      reply = choice if path == "completions" else choice["message"]
      written = reply["text" if path == "completions" else "content"] or ""
      ended = choice["finish_reason"] == "stop"
      spent = int(values["usage"]["completion_tokens"])
      if not isinstance(written, str):
        raise TypeError("the text is none")
    except (KeyError, TypeError, ValueError) as error:
      raise JudgeRefusedError(
        f"the reply of {config.model} lacks its text, finish_reason or usage: {str(values)[:300]}"
      ) from error
    if not written and any(reply.get(name) for name in _THOUGHTS):
      raise JudgeRefusedError(
        f"{config.model} writes its thoughts apart from its text ({', '.join(_THOUGHTS)}); start "
        "the endpoint without a reasoning parser, or set protocol='completions'."
      )
    # A chunk may end within a character of several tokens, as in ``EngineWriter``.
    return Continuation(written if ended else written.rstrip("\ufffd"), spent, ended)
