"""Writers over an engine and over HTTP: text goes on as text, and every draw has an address."""

import asyncio
from types import SimpleNamespace

import jax
import pytest

from agentjax import models
from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.config import ConfigError
from agentjax.engine import Engine, EngineConfig, Finish, SamplingConfig
from agentjax.recipes.tessy.flow import GivenUpError
from agentjax.recipes.tessy.writers import EngineWriter, HttpWriter, HttpWriterConfig
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.record import Image, Message

CHAT = MarkedChat(ByteTokenizer())
MODEL = models.ModelConfig(
  vocab_size=264, d_model=16, pattern="*", num_heads=2, num_kv_heads=1, head_dim=8, init_scale=3.0
)
ASKED = (Message("user", "2 + 3?"),)


@pytest.fixture(scope="module")
def engine():
  config = EngineConfig(
    slots=4, max_length=96, chunk_tokens=4, extend_buckets=(64,), extend_rows=(4,), warmup=False
  )
  engine = Engine(MODEL, config, decode=CHAT.tokenizer.decode)
  engine.publish(models.init(MODEL, jax.random.key(0)), 0)
  yield engine
  engine.close()


def _extend(writer, text="", tokens=8, key=(7, 3, 0, 0), asked=ASKED):
  return asyncio.run(writer.extend(asked, text, tokens, key))


def test_a_key_addresses_what_is_written_and_the_text_so_far_conditions_it(engine):
  writer = EngineWriter(engine, CHAT, SamplingConfig(temperature=0.7))
  first = _extend(writer)
  assert first == _extend(writer)
  assert first != _extend(writer, key=(7, 3, 0, 1)) and first != _extend(writer, key=(8, 3, 0, 0))
  greedy = EngineWriter(engine, CHAT, SamplingConfig(temperature=0.0))
  for number in range(64):
    asked = (Message("user", f"{number}?"),)
    whole = _extend(greedy, asked=asked)
    if len(whole.text) == 8 and whole.text.isascii():  # else the pieces may not be whole characters
      break
  begun = _extend(greedy, tokens=4, asked=asked)
  assert begun.text + _extend(greedy, begun.text, 4, asked=asked).text == whole.text
  assert len(whole.text) == 8 and whole.text.isascii()


class _Fixed:
  """An engine that draws given ids."""

  def __init__(self, ids, finish="length"):
    self.max_tokens, self._ids, self._finish = 96, ids, finish

  async def open_ids(self, ids):
    self.opened = ids
    return self

  async def generate(self, request):
    return SimpleNamespace(token_ids=self._ids, finish=Finish(self._finish))

  def close(self):
    pass


def test_what_a_chunk_ends_in():
  encode, special = CHAT.tokenizer.encode, CHAT.tokenizer.special

  def written(ids, finish="length"):
    return _extend(EngineWriter(_Fixed(ids, finish), CHAT, SamplingConfig()), "so ")

  assert written(encode("it is")).text == "it is"
  stopped = written([*encode(" 5."), special.end], "stop")
  assert (stopped.text, stopped.tokens, stopped.ended) == (" 5.", 4, True)
  # The first bytes of a character are no text yet.
  cut = written(encode("a é")[:-1])
  assert (cut.text, cut.tokens, cut.ended) == ("a ", 3, False)
  # A turn that forges markup is over.
  forged = written([*encode("ok"), special.user, *encode("2")])
  assert (forged.text, forged.ended) == ("ok", True)
  with pytest.raises(GivenUpError, match="max_length"):
    written(encode("x"), "context_full")


def test_a_text_that_fills_the_context_is_given_up(engine):
  writer = EngineWriter(engine, CHAT, SamplingConfig())
  with pytest.raises(GivenUpError, match="max_length"):
    _extend(writer, "x" * 96)


def test_an_engine_reads_prompt_and_text():
  engine = _Fixed(CHAT.tokenizer.encode("x"))
  _extend(EngineWriter(engine, CHAT, SamplingConfig()), "so ")
  assert engine.opened == [i for s in CHAT.prompt(ASKED) for i in s.ids] + CHAT.begun("so ")


async def _served(respond, ask):
  """Runs ``ask(url)`` beside a server that answers with ``respond(path, body)``."""
  from aiohttp import web

  seen = []

  async def receive(request):
    body = await request.json()
    seen.append((request.path, body))
    status, values = respond(request.path, body)
    return web.json_response(values, status=status)

  app = web.Application()
  app.router.add_post("/{tail:.*}", receive)
  runner = web.AppRunner(app)
  await runner.setup()
  site = web.TCPSite(runner, "127.0.0.1", 0)
  await site.start()
  try:
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    return await ask(url), seen
  finally:
    await runner.cleanup()


def _reply(path, text, finish="length", tokens=2):
  choice = {"message": {"content": text}} if "chat" in path else {"text": text}
  return {
    "choices": [{**choice, "finish_reason": finish}],
    "usage": {"completion_tokens": tokens},
  }


def test_an_endpoint_goes_on_with_the_text_in_either_protocol():
  pytest.importorskip("aiohttp", reason="needs the extra [web]")

  def respond(path, body):
    return 200, _reply(path, " and on", "stop" if body["max_tokens"] == 9 else "length")

  async def ask(url):
    plain = HttpWriter(HttpWriterConfig(url, "big", template="<q>{prompt}</q><a>"))
    chat = HttpWriter(HttpWriterConfig(url, "big", protocol="chat", top_k=0))
    return [
      await plain.extend(ASKED, "so {prompt}", 5, (7, 3, 0, 0)),
      await plain.extend(ASKED, "so", 9, (7, 3, 0, 1)),
      await chat.extend(ASKED, "so", 5, (7, 3, 0, 0)),
      await chat.extend(ASKED, "", 5, (7, 3, 0, 0)),
    ]

  found, seen = asyncio.run(_served(respond, ask))
  assert [(c.text, c.tokens, c.ended) for c in found[:2]] == [
    (" and on", 2, False),
    (" and on", 2, True),
  ]
  (path, body), (_, other), (chat_path, chat), (_, fresh) = seen
  assert path == "/v1/completions" and body["prompt"] == "<q>2 + 3?</q><a>so {prompt}"
  assert (body["model"], body["top_k"], body["top_p"], body["temperature"]) == ("big", 20, 0.8, 0.7)
  assert body["seed"] != other["seed"] and body["seed"] == chat["seed"]
  assert chat_path == "/v1/chat/completions" and "top_k" not in chat
  assert chat["messages"][-1] == {"role": "assistant", "content": "so"}
  assert chat["continue_final_message"] and "continue_final_message" not in fresh


@pytest.mark.parametrize(
  ("status", "values", "error"),
  [
    (503, {}, JudgeUnavailableError),
    (404, {}, JudgeRefusedError),
    (200, {"choices": []}, JudgeRefusedError),
    (200, {"choices": [{"text": "x", "finish_reason": "length"}]}, JudgeRefusedError),
    (200, _reply("", 7), JudgeRefusedError),
  ],
)
def test_an_endpoint_that_fails_says_how(status, values, error):
  pytest.importorskip("aiohttp", reason="needs the extra [web]")

  async def ask(url):
    writer = HttpWriter(HttpWriterConfig(url, "big", attempts=1))
    with pytest.raises(error):
      await writer.extend(ASKED, "", 5, (7, 3, 0, 0))

  asyncio.run(_served(lambda path, body: (status, values), ask))


def test_an_endpoint_that_puts_thoughts_apart_is_refused_and_does_not_spend_all_tokens():
  pytest.importorskip("aiohttp", reason="needs the extra [web]")

  def respond(path, body):
    values = _reply(path, None)
    values["choices"][0]["message"]["reasoning_content"] = "So"
    return 200, values

  async def ask(url):
    writer = HttpWriter(HttpWriterConfig(url, "big", protocol="chat"))
    with pytest.raises(JudgeRefusedError, match="reasoning parser"):
      await writer.extend(ASKED, "", 5, (7, 3, 0, 0))

  asyncio.run(_served(respond, ask))


@pytest.mark.parametrize(("finish", "text"), [("length", "née"), ("stop", "née\ufffd")])
def test_half_a_character_at_the_end_of_a_chunk_is_drawn_again(finish, text):
  pytest.importorskip("aiohttp", reason="needs the extra [web]")

  async def ask(url):
    writer = HttpWriter(HttpWriterConfig(url, "big"))
    return await writer.extend(ASKED, "", 5, (7, 3, 0, 0))

  found, _ = asyncio.run(_served(lambda path, _: (200, _reply(path, "née\ufffd", finish)), ask))
  assert found.text == text


def test_an_image_is_refused_by_completions():
  pytest.importorskip("aiohttp", reason="needs the extra [web]")
  asked = (Message.of("user", "?", Image("ab" * 32, "image/png", 7, 5)),)
  for protocol, named in (
    ("completions", "set protocol='chat'"),
    ("chat", "Config.images is None"),
  ):
    writer = HttpWriter(HttpWriterConfig("http://127.0.0.1:9/v1", "big", protocol=protocol))
    with pytest.raises(JudgeRefusedError, match=named):
      _extend(writer, asked=asked)


def test_impossible_settings_name_the_field():
  good = {"base_url": "http://x/v1", "model": "m"}
  for changes, named in (
    ({"template": "no question"}, "writer.template"),
    ({"base_url": "x"}, "writer.base_url"),
    ({"model": ""}, "writer.model"),
    ({"top_p": 0.0}, "writer.top_p"),
    ({"attempts": 0}, "writer.attempts"),
  ):
    with pytest.raises(ConfigError, match=named):
      HttpWriterConfig(**(good | changes)).validate()
