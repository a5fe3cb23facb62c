"""The record: tasks, token segments, trajectories, typed rewards. Python and numpy, no jax.

A trajectory is a tree of segments. Every token is recorded with whether the policy sampled it, its
loss weight, behaviour log-prob, entropy and the version of the weights that sampled it; these
cannot be computed later. ``columns`` hold everything else about a token, a turn or a sequence
(``trajectory.columns``).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentjax.trajectory.columns import find_column, value_or_fill

AGENT = "agent"  # the one agent of an episode that has no others
POLICY = "policy"  # the parameter set that is trained


class Status(enum.StrEnum):
  """How a trajectory ended."""

  OK = "ok"
  TRUNCATED = "truncated"  # ran out of tokens, turns or time
  ENV_ERROR = "env_error"  # infrastructure fault: masked out of loss and group statistics
  ENGINE_ERROR = "engine_error"  # the policy's own numbers broke down: masked likewise
  VERIFIER_ERROR = "verifier_error"  # the reward could not be computed: masked likewise
  POLICY_ERROR = "policy_error"  # the policy broke the protocol; a legitimate negative

  @property
  def broken(self) -> bool:
    """Whether the episode itself failed, so that there is nothing to score."""
    return self in (Status.ENV_ERROR, Status.ENGINE_ERROR)

  @property
  def masked(self) -> bool:
    """Whether it is excluded from training because of a fault of ours."""
    return self.broken or self is Status.VERIFIER_ERROR


class Flag(enum.StrEnum):
  """Marks on a segment, used by weight rules and analyses."""

  TOOL_ERROR = "tool_error"
  REFLECTION = "reflection"
  TRUNCATED = "truncated"
  ENV_FAULT = "env_fault"
  DENIED = "denied"  # a guard refused something the turn asked for
  NOT_EXECUTED = "not_executed"  # the environment did not carry out the action of the turn


@dataclasses.dataclass(frozen=True)
class Reward:
  """A value, or invalid with a reason. There is no sentinel zero."""

  value: float | None
  reason: str | None = None  # why it is invalid; None when it is a value

  def __post_init__(self) -> None:
    if (self.value is None) == (self.reason is None):
      raise ValueError(
        f"a reward is a value or invalid(reason), got value={self.value!r} reason={self.reason!r}"
      )
    if self.value is not None and not np.isfinite(self.value):
      raise ValueError(
        f"reward value must be finite, got {self.value!r}; use Reward.invalid(reason)"
      )

  @classmethod
  def invalid(cls, reason: str) -> Reward:
    return cls(value=None, reason=reason)

  @property
  def valid(self) -> bool:
    return self.value is not None


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """One call as the policy wrote it. ``error`` is set where the text could not be parsed."""

  name: str
  arguments: Mapping[str, Any]
  error: str | None = None


@dataclasses.dataclass(frozen=True)
class Image:
  """An image by its content: SHA-256 in hex, media type such as "image/png", size in pixels."""

  sha256: str
  media_type: str
  width: int
  height: int


Part = str | Image  # of a message


@dataclasses.dataclass(frozen=True)
class Message:
  """One turn of a conversation before it becomes tokens.

  Attributes:
    role: "system" | "user" | "assistant" | "tool".
    content: its text.
    tool_calls: of an assistant's.
    parts: texts and images in their order, if it has images (``Message.of``); () for text only.
    weight: loss weight of an assistant's message in a demonstration; 0 leaves it as context.
    flags: marks in a demonstration, for weight rules: a tool's "tool_error", an assistant's
      "reflection".
  """

  role: str
  content: str
  tool_calls: tuple[ToolCall, ...] = ()
  parts: tuple[Part, ...] = ()
  weight: float = 1.0
  flags: frozenset[Flag] = frozenset()

  def __post_init__(self) -> None:
    if self.parts and (self.role == "assistant" or self.content != _text_of(self.parts)):
      raise ValueError(
        f"a message of role {self.role!r} with the text {self.content[:80]!r} has other parts: "
        f"{self.parts!r:.200}; allowed: parts with that text, in messages that no policy writes."
      )

  @classmethod
  def of(cls, role: str, *parts: Part) -> Message:
    """A message of texts and images.

    Raises:
      ValueError: images in an assistant's message.
    """
    if all(isinstance(part, str) for part in parts):
      return cls(role, _text_of(parts))
    return cls(role, _text_of(parts), parts=parts)

  @property
  def images(self) -> tuple[Image, ...]:
    """Its images, in their order."""
    return tuple(part for part in self.parts if isinstance(part, Image))


def _text_of(parts: tuple[Part, ...]) -> str:
  return "".join(part for part in parts if isinstance(part, str))


@dataclasses.dataclass(frozen=True)
class Task:
  """One thing to solve. ``id`` is unique in its data set and addresses all randomness."""

  id: int
  prompt: tuple[Message, ...]
  answer: str
  source: str  # data set name: the grader and group statistics may depend on it
  demonstration: tuple[Message, ...] = ()  # assistant and tool messages of a worked solution
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Segment:
  """A run of tokens with one owner. Per-token arrays have one length.

  Attributes:
    owner: "system" | "user" | "assistant" | "tool" | "environment".
    token_ids: int32 [n].
    sampled: bool [n], True where the policy drew the token (False for markup, prompts, tool text).
    weights: float32 [n], loss weight; by default 1 where sampled.
    behaviour_log_probs, entropies: float32 [n] under the sampler, nats; 0 where not sampled.
    versions: int32 [n], weight version that sampled the token; -1 where not sampled.
    turn: index of the model call this segment belongs to.
    agent, policy: role in the episode and the parameter set that plays it.
    parent: index of the segment this one continues in ``Trajectory.segments``; None at a root.
    visible_to: agents that see it; empty means all.
    seconds: wall time the segment took.
    columns: further columns by name, [n, ...]; a column of turns has one value [...] here. Names
      that are not registered are kept as they are. Segments of branched episodes share the mapping:
      replace it, do not write into it.
  """

  owner: str
  token_ids: np.ndarray
  sampled: np.ndarray
  weights: np.ndarray
  behaviour_log_probs: np.ndarray
  entropies: np.ndarray
  versions: np.ndarray
  turn: int = 0
  agent: str = AGENT
  policy: str = POLICY
  parent: int | None = None
  visible_to: tuple[str, ...] = ()
  seconds: float = 0.0
  flags: frozenset[Flag] = frozenset()
  columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return len(self.token_ids)

  def column(self, name: str) -> np.ndarray:
    """[n, ...] of a column of tokens, [...] of one of turns; its fill where there is none."""
    column = find_column(name)
    of_turn = column is not None and column.level == "turn"
    return value_or_fill(self.columns, name, () if of_turn else (len(self),))

  def with_columns(self, values: Mapping[str, np.ndarray]) -> Segment:
    """A copy with these columns beside or in place of its own."""
    return dataclasses.replace(self, columns={**self.columns, **values})


@dataclasses.dataclass(frozen=True)
class ToolRecord:
  """A tool call with its result, for the journal, replay and the trajectory viewer.

  ``artifacts`` are the files it made, by name the SHA-256 of the content in hex; the content stands
  in the run's ``artifacts`` folder for a while (``trajectory.artifacts``). ``agent`` is who called.
  """

  turn: int
  name: str
  arguments: Mapping[str, Any]
  status: str  # ToolStatus value
  output: str
  seconds: float
  artifacts: Mapping[str, str] = dataclasses.field(default_factory=dict)
  agent: str = AGENT


@dataclasses.dataclass(frozen=True)
class GuardRecord:
  """An act of a guard: a rule fired, a hook changed something, a host was refused.

  Attributes:
    turn: index of the model call it was about; -1 at the start of the episode.
    event: "episode_start", "before_action", "after_action", "state_change" or "finish".
    tool: the tool called; "" where the event is about none.
    guard: "rule @name", "hook name", "egress" or "setting name".
    decision: "continue", "reflect", "skip", "deny" or "stop".
    reason: in words.
    arguments: the changed arguments of the call; None if they were not changed.
  """

  turn: int
  event: str
  tool: str
  guard: str
  decision: str
  reason: str = ""
  arguments: Mapping[str, Any] | None = None


GUARDS = "guards"  # in the metadata of a guarded episode: its GuardRecords as plain dicts

MONTE_CARLO = "monte_carlo"  # part of the reward that completions from between turns give

BRANCHES = "branches"  # in the metadata of an episode that shares its beginning with others

ENDED_BY = "ended_by"  # in the metadata: which of several agents ended an episode by a breach


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of one of several agents.

  Attributes:
    learns: whether its tokens carry loss; otherwise it only has parts.
    reward, parts: as ``Trajectory.reward`` and ``reward_parts``.
  """

  learns: bool
  reward: Reward
  parts: Mapping[str, Reward] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Trajectory:
  """One episode. ``(step, task_id, sample)`` is its address; batches are ordered by it.

  An episode that was branched off another is complete in itself. ``metadata[BRANCHES]`` of both
  holds one int per segment, the branch that wrote it: two episodes of one task and step share
  segment i if the same branch wrote it in both.

  ``turn_rewards`` hold, for parts that are earned by turns, one number per segment: its reward, or
  None if it was not judged. They sum up to the part. Parts of the whole episode have none.

  ``columns`` holds further columns of the whole episode by name (columns of sequences).

  ``agents`` holds the result of each of several agents by name; it is empty for one agent. Each
  agent has its own tree among the segments. ``reward`` and ``reward_parts`` are then means over the
  agents that learn; ``trajectory.seats`` splits an episode by agent.
  """

  step: int
  task_id: int
  sample: int
  source: str
  segments: list[Segment]
  status: Status = Status.OK
  reward: Reward = Reward(0.0)
  reward_parts: dict[str, Reward] = dataclasses.field(default_factory=dict)
  turn_rewards: dict[str, list[float | None]] = dataclasses.field(default_factory=dict)
  tools: list[ToolRecord] = dataclasses.field(default_factory=list)
  answer: str | None = None  # final answer as the environment read it
  group: str = ""  # group key of the advantage; "" means the task
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
  columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  agents: Mapping[str, Outcome] = dataclasses.field(default_factory=dict)

  @property
  def address(self) -> tuple[int, int, int]:
    return (self.step, self.task_id, self.sample)

  @property
  def advantage_group(self) -> tuple[int, str, str]:
    """Equal for the episodes that the advantage compares: step, source, and group or task."""
    return (self.step, self.source, self.group or f"task {self.task_id}")

  @property
  def usable(self) -> bool:
    """Whether it can be learnt from: it has a reward, and no fault of ours masks it."""
    return self.reward.valid and not self.status.masked
