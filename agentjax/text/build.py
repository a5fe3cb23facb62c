"""The chat of a run, from its settings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import get_args

from agentjax.config import check
from agentjax.text.chat import Chat, ChatConfig, MarkedChat
from agentjax.text.template import TemplateChat
from agentjax.text.template_calls import TemplateCallFormat
from agentjax.text.tokenizer import TokenizerConfig, build_tokenizer
from agentjax.text.tool_calls import ToolCallFormat


def check_chat(chat: ChatConfig, tokenizer: TokenizerConfig, path: str = "config") -> None:
  """Raises ConfigError where a format of calls does not belong to the vocabulary's markup."""
  templated = tokenizer.kind == "huggingface"
  allowed = ("auto", *get_args(TemplateCallFormat if templated else ToolCallFormat))
  check(
    chat.tool_call_format in allowed,
    f"{path}.chat.tool_call_format",
    chat.tool_call_format,
    f"{', '.join(allowed)} with tokenizer.kind={tokenizer.kind!r}",
  )
  check(
    templated or chat.thinking is None,
    f"{path}.chat.thinking",
    chat.thinking,
    f"None with tokenizer.kind={tokenizer.kind!r}, which has no chat template",
  )


def marked_format(chat: ChatConfig) -> ToolCallFormat:
  """The format of calls in our own markup; "auto" is "compact"."""
  return "json" if chat.tool_call_format == "json" else "compact"


def build_chat(
  chat: ChatConfig,
  tokenizer: TokenizerConfig,
  *,
  lines: Iterable[str] = (),
  directory: str | os.PathLike[str] | None = None,
  pretrained: str | os.PathLike[str] | None = None,
) -> Chat:
  """Vocabulary and markup of a run.

  Args:
    chat, tokenizer: which.
    lines, directory: as in ``build_tokenizer``.
    pretrained: Hugging Face folder of the run; read by kind "huggingface" without a path.

  Raises:
    TokenizerError: files that cannot be used.
    ConfigError: settings that do not fit each other.
  """
  tokenizer.validate("config.tokenizer")
  check_chat(chat, tokenizer)
  if tokenizer.kind != "huggingface":
    return MarkedChat(
      build_tokenizer(tokenizer, lines=lines, directory=directory),
      marked_format(chat),
      chat.system_prompt,
    )
  folder = tokenizer.path if tokenizer.path is not None else pretrained
  check(
    folder is not None,
    "config.tokenizer.path",
    None,
    'a Hugging Face folder when kind is "huggingface" and config.pretrained is None',
  )
  assert folder is not None
  return TemplateChat.from_folder(
    folder,
    tool_call_format=chat.tool_call_format,
    system_prompt=chat.system_prompt,
    thinking=chat.thinking,
  )
