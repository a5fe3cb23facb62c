"""Text: tokenizers, conversations as ids that only grow, tool calls inside turns. No jax."""

from agentjax.text.chat import (
  ChatConfig,
  PrefixError,
  Span,
  TargetSpan,
  assert_extends,
  conversation_texts,
  encode_assistant,
  encode_conversation,
  encode_observation,
  encode_prompt,
)
from agentjax.text.tokenizer import (
  SPECIAL_SPELLINGS,
  ByteTokenizer,
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
  describe_tools,
  format_call,
  parse_turn,
)

__all__ = [
  "SPECIAL_SPELLINGS",
  "ByteTokenizer",
  "ChatConfig",
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
  "assert_extends",
  "build_tokenizer",
  "conversation_texts",
  "describe_tools",
  "encode_assistant",
  "encode_conversation",
  "encode_observation",
  "encode_prompt",
  "format_call",
  "parse_turn",
  "train_sentencepiece",
]
