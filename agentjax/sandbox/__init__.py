"""Isolation for code that a policy wrote: the interface of back ends, and the back ends."""

from agentjax.sandbox.config import SandboxConfig, Sandboxes
from agentjax.sandbox.interface import (
  Box,
  Capabilities,
  Command,
  Program,
  Protection,
  PythonCell,
  PythonScript,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  Session,
  run_once,
)
from agentjax.sandbox.process import ProcessSandbox, ProcessSandboxConfig

__all__ = [
  "Box",
  "Capabilities",
  "Command",
  "ProcessSandbox",
  "ProcessSandboxConfig",
  "Program",
  "Protection",
  "PythonCell",
  "PythonScript",
  "RunStatus",
  "Sandbox",
  "SandboxConfig",
  "SandboxError",
  "SandboxLimits",
  "SandboxResult",
  "Sandboxes",
  "Session",
  "run_once",
]
