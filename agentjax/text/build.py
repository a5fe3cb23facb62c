"""The chat of a run, from its settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import get_args

from agentjax.config import check
from agentjax.names import entry_names, load, wrong
from agentjax.text.chat import Chat, ChatConfig, MarkedChat
from agentjax.text.tokenizer import FOLDER_KINDS, TokenizerConfig, build_tokenizer
from agentjax.text.tool_calls import ToolCallFormat


@dataclasses.dataclass(frozen=True)
class FolderKind:
  """A kind of folder that holds a vocabulary and a chat format.

  Attributes:
    formats: of tool calls, for ``ChatConfig.tool_call_format`` beside "auto".
    read: ``(folder, tool_call_format=, system_prompt=, thinking=) -> chat``, see ``ChatConfig``;
      all but the folder may be left out.
  """

  formats: tuple[str, ...]
  read: Callable[..., Chat]


def folder_kind(name: str) -> FolderKind:
  """The kind of folder that ``TokenizerConfig.kind`` names.

  Raises:
    ConfigError: nothing of that name.
  """
  path, allowed = "config.tokenizer.kind", "a FolderKind"
  found = load(entry_names(*FOLDER_KINDS).get(name, name), path, allowed)
  if not isinstance(found, FolderKind):
    raise wrong(name, path, found, allowed)
  return found


def read_chat(
  folder: str | os.PathLike[str], kind: str = "huggingface", *, thinking: bool | None = None
) -> Chat:
  """Vocabulary and conversations of a folder; ``thinking`` as in ``ChatConfig``."""
  return folder_kind(kind).read(folder, thinking=thinking)


def check_chat(chat: ChatConfig, tokenizer: TokenizerConfig, path: str = "config") -> None:
  """Raises ConfigError if a format of calls does not fit the vocabulary's markup."""
  folder = folder_kind(tokenizer.kind) if tokenizer.reads_folder else None
  allowed = ("auto", *(folder.formats if folder is not None else get_args(ToolCallFormat)))
  check(
    chat.tool_call_format in allowed,
    f"{path}.chat.tool_call_format",
    chat.tool_call_format,
    f"{', '.join(allowed)} with tokenizer.kind={tokenizer.kind!r}",
  )
  check(
    folder is not None or chat.thinking is None,
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
    pretrained: Hugging Face folder of the run, which is read if the tokenizer has no path.

  Raises:
    TokenizerError: files that cannot be used.
    ConfigError: settings that do not fit each other.
  """
  tokenizer.validate("config.tokenizer")
  check_chat(chat, tokenizer)
  if not tokenizer.reads_folder:
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
    f"a folder when kind is {tokenizer.kind!r} and config.pretrained is None",
  )
  assert folder is not None
  return folder_kind(tokenizer.kind).read(
    folder,
    tool_call_format=chat.tool_call_format,
    system_prompt=chat.system_prompt,
    thinking=chat.thinking,
  )
