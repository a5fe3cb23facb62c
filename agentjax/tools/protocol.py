"""The protocol of tools: a name, a JSON schema, an async call, a result with a status."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Protocol

from agentjax.faults import Fault


class ToolStatus(enum.StrEnum):
  """How a call ended. Only INFRA_ERROR is the system's fault: it is retried, then masked."""

  OK = "ok"
  ERROR = "error"
  TIMEOUT = "timeout"
  OUTPUT_LIMIT = "output_limit"
  MEMORY_LIMIT = "memory_limit"
  KILLED = "killed"
  INFRA_ERROR = "infra_error"
  DENIED = "denied"  # a guard refused it, or withheld its result


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """Text for the policy, and how the call ended.

  Attributes:
    status: how it ended.
    output: what the policy reads.
    seconds: wall time.
    artifacts: files by name that are not text, such as a screenshot; for environments and people.
      A run keeps them in its folder ``artifacts`` by content hash.
    shown: names of artifacts, PNG or JPEG, that the policy sees after ``output``; none if it reads
      only text.
    fault: what failed, if status is INFRA_ERROR; None if nothing more is known.
  """

  status: ToolStatus
  output: str
  seconds: float = 0.0
  artifacts: Mapping[str, bytes] = dataclasses.field(default_factory=dict, hash=False)
  fault: Fault | None = None
  shown: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ToolContext:
  """Who calls: unique per episode, and the seed for tools that draw random numbers."""

  episode: str
  seed: int
  timeout: float  # seconds


class Tool(Protocol):
  """A tool. ``parameters`` is a JSON schema of type object.

  A tool may have these too, which the registry uses:

    stateful: bool, True if the calls of an episode depend on its earlier ones. An environment that
    continues from a snapshot then repeats those calls first. async end_episode(episode: str): the
    episode (``ToolContext.episode``) makes no more calls; frees its resources. async is_healthy()
    -> bool: whether the tool's sandbox works for an idle program now. If it does, a call that fails
    repeatedly has broken its own box and gets KILLED. async close(): frees the tool's resources; no
    calls follow.
  """

  name: str
  description: str
  parameters: Mapping[str, Any]

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    """Runs one call; never raises for what the policy did wrong (status ERROR instead)."""
    ...
