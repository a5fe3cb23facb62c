"""Text: tokenizers, conversations as ids that only grow, tool calls inside turns. No jax."""

from agentjax.text.build import FolderKind, build_chat, check_chat, read_chat
from agentjax.text.chat import (
  Chat,
  ChatConfig,
  MarkedChat,
  PrefixError,
  Span,
  TargetSpan,
  conversation_texts,
)
from agentjax.text.tokenizer import (
  SPECIAL_SPELLINGS,
  ByteTokenizer,
  MarkedTokenizer,
  SentencePieceTokenizer,
  SpecialTokens,
  Tokenizer,
  TokenizerConfig,
  TokenizerError,
  build_tokenizer,
  train_sentencepiece,
)
from agentjax.text.tool_calls import (
  ParsedTurn,
  ToolCallFormat,
  format_call,
  parse_turn,
)

__all__ = [
  "SPECIAL_SPELLINGS",
  "ByteTokenizer",
  "Chat",
  "FolderKind",
  "ChatConfig",
  "MarkedChat",
  "MarkedTokenizer",
  "ParsedTurn",
  "PrefixError",
  "SentencePieceTokenizer",
  "Span",
  "SpecialTokens",
  "TargetSpan",
  "Tokenizer",
  "TokenizerConfig",
  "TokenizerError",
  "ToolCallFormat",
  "build_chat",
  "build_tokenizer",
  "check_chat",
  "conversation_texts",
  "format_call",
  "parse_turn",
  "read_chat",
  "train_sentencepiece",
]
