"""Messages of texts and images: one form as JSON, images by the hash of their content."""

import asyncio
import dataclasses
import hashlib
import io
import json

import numpy as np
import pytest
from PIL import Image as Pixels

from agentjax.text.chat import MarkedChat
from agentjax.text.tokenizer import ByteTokenizer
from agentjax.tools.protocol import ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.messages import describe_image, message_from_json, message_to_json
from agentjax.trajectory.record import Flag, Image, Message, Task, ToolCall
from agentjax.world.environment import Action
from agentjax.world.question import QuestionEnvironment


def image_file(form, size=(7, 5), **options):
  file = io.BytesIO()
  values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
  Pixels.fromarray(values).save(file, form, **options)
  return file.getvalue()


@pytest.mark.parametrize(
  ("form", "options", "media_type"),
  [
    ("png", {}, "image/png"),
    ("jpeg", {}, "image/jpeg"),
    ("jpeg", {"progressive": True, "comment": b"\xff\xc0 no frame"}, "image/jpeg"),
  ],
)
def test_an_image_is_its_hash_its_type_and_its_size(form, options, media_type):
  content = image_file(form, **options)
  digest = hashlib.sha256(content).hexdigest()
  assert describe_image(content) == Image(digest, media_type, 7, 5)


@pytest.mark.parametrize(
  "content", [b"", b"GIF89a", image_file("png")[:20], image_file("jpeg")[:30], b"\xff\xd8\xff\x00"]
)
def test_what_is_no_whole_image_is_refused(content):
  with pytest.raises(ValueError, match=rf"an image of {len(content)} bytes.*PNG and JPEG"):
    describe_image(content)


SHOWN = Image("ab" * 32, "image/png", 640, 480)


@pytest.mark.parametrize(
  "message",
  [
    Message("user", "hello"),
    Message("assistant", "", (ToolCall("f", {"x": [1]}), ToolCall("", {}, error="no name"))),
    Message.of("user", "before ", SHOWN, "after"),
    Message.of("tool", "", SHOWN),
    Message("assistant", "no", weight=0.25, flags=frozenset({Flag.REFLECTION})),
    dataclasses.replace(Message.of("tool", "", SHOWN), flags=frozenset({Flag.TOOL_ERROR})),
  ],
)
def test_a_message_is_read_back_as_it_was(message):
  assert message_from_json(json.loads(json.dumps(message_to_json(message)))) == message


def test_parts_keep_their_order_and_text_alone_has_none():
  message = Message.of("user", "before ", SHOWN, "after")
  assert message.content == "before after" and message.images == (SHOWN,)
  assert Message.of("user", "a", "b") == Message("user", "ab")
  with pytest.raises(ValueError, match="allowed: parts with that text"):
    Message("user", "other", parts=("text", SHOWN))
  with pytest.raises(ValueError, match="that no policy writes"):
    Message.of("assistant", SHOWN)
  with pytest.raises(ValueError, match="type 'sound'"):
    message_from_json({"role": "user", "content": [{"type": "sound"}]})
  with pytest.raises(ValueError, match="role 'judge'"):
    message_from_json({"role": "judge", "content": ""})


def test_a_vocabulary_of_text_refuses_images():
  chat = MarkedChat(ByteTokenizer())
  for write in (chat.prompt, lambda messages: chat.observation(messages, [])):
    with pytest.raises(ValueError, match=r"image abababababab \(image/png\)"):
      write([Message.of("user", "look", SHOWN)])


class Camera:
  name, description = "camera", "Takes a picture."
  parameters = {"type": "object", "properties": {}}
  picture = image_file("png")

  async def __call__(self, arguments, context):
    return ToolResult(
      ToolStatus.OK, "a picture", artifacts={"a.png": self.picture}, shown=("a.png",)
    )


async def _look():
  environment = QuestionEnvironment(ToolRegistry([Camera()]), max_turns=3, tool_timeout=5.0)
  task = Task(1, (Message("user", "What is there?"),), "", "test")
  await environment.reset(task, 0)
  step = await environment.step(Action("", (ToolCall("camera", {}),)))
  again = QuestionEnvironment(ToolRegistry([Camera()]), max_turns=3, tool_timeout=5.0)
  state = environment.snapshot()
  await again.resume(task, 0, state if isinstance(state, bytes) else await state)
  return step, environment, again


def test_a_tool_shows_an_image_and_a_snapshot_keeps_it():
  step, environment, again = asyncio.run(_look())
  shown = describe_image(Camera.picture)
  assert step.observation.messages == (Message.of("tool", "a picture", shown),)
  assert environment.conversation == again.conversation
  assert again.conversation[-1].images == (shown,)
