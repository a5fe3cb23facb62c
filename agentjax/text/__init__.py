"""Text: tokenizers, conversations as append-only ids, tool calls inside turns. No jax."""

from agentjax.text.build import FolderKind, build_chat, check_chat, read_chat
from agentjax.text.chat import (
  Chat,
  ChatConfig,
  MarkedChat,
  PrefixError,
  Span,
)
from agentjax.text.tokenizer import (
  ByteTokenizer,
  SentencePieceTokenizer,
  Tokenizer,
  TokenizerConfig,
  TokenizerError,
)
from agentjax.text.tool_calls import (
  ParsedTurn,
)

__all__ = [
  "ByteTokenizer",
  "Chat",
  "FolderKind",
  "ChatConfig",
  "MarkedChat",
  "ParsedTurn",
  "PrefixError",
  "SentencePieceTokenizer",
  "Span",
  "Tokenizer",
  "TokenizerConfig",
  "TokenizerError",
  "build_chat",
  "check_chat",
  "read_chat",
]
