"""The reward of one turn taken from an expert's trajectory: does it do what the expert did?"""

from __future__ import annotations

import dataclasses
from typing import Literal

from agentjax.config import Config, check
from agentjax.tools.declared import declared_tools
from agentjax.tools.protocol import ToolStatus
from agentjax.trajectory.record import Message, Reward, Status, Task, ToolCall, Trajectory
from agentjax.worlds.pivot.action_match import Matcher
from agentjax.worlds.pivot.edit_match import EditMatchConfig, EditMatcher
from agentjax.worlds.pivot.terminal_match import TerminalMatchConfig, TerminalMatcher
from agentjax.worlds.pivot.tool_match import (
  ArgumentMatchConfig,
  ArgumentMatcher,
  NameMatcher,
  SchemaMatcher,
  word_similarity,
)

VerifierKind = Literal["arguments", "tool_name", "schema", "edits", "terminal"]


@dataclasses.dataclass(unsafe_hash=True)
class PivotVerifierConfig(Config):
  """When two actions count as the same (the functional reward of PivotRL, 2603.21383, section 3).

  Attributes:
    kind: "arguments", names and arguments of calls, also parallel ones (``tool_match``);
      "tool_name", the name alone; "schema", the name, and arguments that fit the tool's schema;
      "edits", steps of a coding agent (``edit_match``); "terminal", keystrokes in JSON
      (``terminal_match``). All but the last compare calls and not messages.
    message_similarity: words that a message must share with the expected one, as a share of all
      words of both (Jaccard). 0, as released, pays 1 for any message where one is expected.
    arguments, edits, terminal: settings of those kinds.
  """

  kind: VerifierKind = "arguments"
  message_similarity: float = 0.0
  arguments: ArgumentMatchConfig = dataclasses.field(default_factory=ArgumentMatchConfig)
  edits: EditMatchConfig = dataclasses.field(default_factory=EditMatchConfig)
  terminal: TerminalMatchConfig = dataclasses.field(default_factory=TerminalMatchConfig)

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    least = self.message_similarity
    check(0 <= least <= 1, f"{path}.message_similarity", least, "0 to 1")


def build_matcher(config: PivotVerifierConfig) -> Matcher:
  """The matcher of a config."""
  match config.kind:
    case "arguments":
      return ArgumentMatcher(config.arguments)
    case "tool_name":
      return NameMatcher()
    case "schema":
      return SchemaMatcher()
    case "edits":
      return EditMatcher(config.edits)
    case "terminal":
      return TerminalMatcher(config.terminal)


class PivotScorer:
  """Reward part "pivot": the action of a one-turn episode against the task's demonstration.

  The demonstration is the expert's turn, one assistant message. A turn that was cut off or broke
  the protocol scores 0. Where the matcher cannot judge the expected action the reward is invalid.
  """

  def __init__(self, config: PivotVerifierConfig):
    self.matcher = build_matcher(config)
    self._config = config
    self._compares_words = config.kind != "terminal"  # whose every action is a text

  def refusal(self, task: Task) -> str | None:
    """Why the task cannot be scored; None where it can."""
    if len(task.demonstration) != 1 or task.demonstration[0].role != "assistant":
      return f"task {task.id} of {task.source!r} has no expected action as its demonstration"
    return self.matcher.refusal(task.demonstration[0], declared_tools(task.metadata))

  def __call__(self, trajectory: Trajectory, task: Task) -> Reward:
    refusal = self.refusal(task)
    if refusal is not None:
      return Reward.invalid(refusal)
    if trajectory.status is not Status.OK:
      return Reward(0.0)
    expected, action = task.demonstration[0], _action(trajectory)
    if self._compares_words and not expected.tool_calls:
      alike = word_similarity(expected.content, action.content, "jaccard")
      if alike < self._config.message_similarity:
        return Reward(0.0)
    return Reward(self.matcher.match(expected, action, declared_tools(task.metadata)).score)


def _action(trajectory: Trajectory) -> Message:
  """What the policy did, as ``PivotEnvironment`` recorded it."""
  calls = tuple(
    ToolCall(
      record.name,
      record.arguments,
      None if record.status == ToolStatus.OK else record.output,
    )
    for record in trajectory.tools
  )
  return Message("assistant", trajectory.answer or "", calls)
