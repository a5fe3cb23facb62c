"""Sampling: slots that hold live contexts, continuous batching, addressed randomness."""

from agentjax.engine.config import EngineConfig, SamplingConfig
from agentjax.engine.engine import Context, Engine, Prefix
from agentjax.engine.grammar import (
  Grammar,
  GrammarError,
  compile_regex,
  compile_schema,
  compile_tool_calls,
)
from agentjax.engine.request import (
  ContextLengthError,
  EngineBusyError,
  EngineError,
  Finish,
  ImageError,
  NonFiniteError,
  Sample,
  SampleRequest,
)
from agentjax.engine.sampling import address_key
from agentjax.engine.scheduler import EngineStats
from agentjax.engine.slots import SlotEngine

__all__ = [
  "Context",
  "ContextLengthError",
  "Engine",
  "EngineBusyError",
  "EngineConfig",
  "EngineError",
  "EngineStats",
  "Finish",
  "Grammar",
  "GrammarError",
  "ImageError",
  "NonFiniteError",
  "Prefix",
  "Sample",
  "SampleRequest",
  "SamplingConfig",
  "SlotEngine",
  "address_key",
  "compile_regex",
  "compile_schema",
  "compile_tool_calls",
]
