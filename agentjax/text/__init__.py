"""Text: tokenizers, conversations as ids that only grow, tool calls inside turns. No jax."""

from agentjax.text.build import build_chat, check_chat
from agentjax.text.chat import (
  Chat,
  ChatConfig,
  MarkedChat,
  PrefixError,
  Span,
  TargetSpan,
  assert_extends,
  conversation_texts,
)
from agentjax.text.huggingface import HuggingFaceTokenizer
from agentjax.text.template import TemplateChat, TemplateRefusal
from agentjax.text.template_calls import TemplateCallFormat
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
  "ChatConfig",
  "HuggingFaceTokenizer",
  "MarkedChat",
  "MarkedTokenizer",
  "ParsedTurn",
  "PrefixError",
  "SentencePieceTokenizer",
  "Span",
  "SpecialTokens",
  "TargetSpan",
  "TemplateCallFormat",
  "TemplateChat",
  "TemplateRefusal",
  "Tokenizer",
  "TokenizerConfig",
  "TokenizerError",
  "ToolCallFormat",
  "assert_extends",
  "build_chat",
  "build_tokenizer",
  "check_chat",
  "conversation_texts",
  "format_call",
  "parse_turn",
  "train_sentencepiece",
]
