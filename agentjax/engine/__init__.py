"""Sampling: slots that hold live contexts, continuous batching, addressed randomness."""

from agentjax.engine.config import EngineConfig, SamplingConfig
from agentjax.engine.request import (
  ContextLengthError,
  EngineBusyError,
  EngineError,
  Finish,
  NonFiniteError,
  Sample,
  SampleRequest,
)
from agentjax.engine.sampling import address_key
from agentjax.engine.scheduler import Context, Engine, EngineStats, Prefix
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
  "NonFiniteError",
  "Prefix",
  "Sample",
  "SampleRequest",
  "SamplingConfig",
  "SlotEngine",
  "address_key",
]
