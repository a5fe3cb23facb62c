"""Steps of a terminal agent that do the same: JSON of the right form, and keystrokes alike.

After NeMo-Gym's ``terminus_judge`` server, without its language-model judge. The action is the text
of the turn. It must be a JSON object that fits the schema of the harness that the expected action
fits (Terminus 1 or 2) and have the same flag for being done. Its keystrokes, one after the other,
are the same commands as the expected ones, with or without the line feed that sends the last one
("strict"), or have a similarity of at least a threshold with them ("released", which pays ``cd
source`` for ``cd src`` in a long step). (The verdicts recorded with the server join keystrokes like
that; its later code puts blanks between them.)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal

import jsonschema

from agentjax.config import Config, PositiveShare
from agentjax.tools.declared import DeclaredTool
from agentjax.trajectory.record import Message
from agentjax.worlds.pivot.action_match import Match, same_command

_MOST_CHARACTERS = 4000  # of keystrokes that are compared one by one: half a second at worst


@dataclasses.dataclass(unsafe_hash=True)
class TerminalMatchConfig(Config):
  """How keystrokes are compared.

  Attributes:
    rules: "strict", the same words and operators in the same order (``action_match.same_command``);
      or "released", similar characters.
    threshold: similarity (``difflib.SequenceMatcher.ratio``) from which on they do the same, of
      "released". There it is 0.9, below which a language model is asked; here below is 0.
  """

  rules: Literal["strict", "released"] = "strict"
  threshold: PositiveShare = 0.9


def _schema(
  texts: Sequence[str], command: Mapping[str, str], needed: Sequence[str], done: str
) -> dict[str, Any]:
  """A batch of commands: texts, the fields of a command, its needed ones, and the flag."""
  return {
    "type": "object",
    "additionalProperties": False,
    "properties": {
      **{text: {"type": "string"} for text in texts},
      "commands": {
        "type": "array",
        "items": {
          "type": "object",
          "additionalProperties": False,
          "properties": {name: {"type": kind} for name, kind in command.items()},
          "required": list(needed),
        },
      },
      done: {"type": "boolean"},
    },
  }


_ONE = _schema(
  ("state_analysis", "explanation"),
  {"keystrokes": "string", "is_blocking": "boolean", "timeout_sec": "number"},
  ("keystrokes", "is_blocking", "timeout_sec"),
  "is_task_complete",
)
_TWO = _schema(
  ("analysis", "plan"),
  {"keystrokes": "string", "duration": "number"},
  ("keystrokes",),
  "task_complete",
)
HARNESSES: Mapping[str, Mapping[str, Any]] = {
  "terminus_1": {**_ONE, "required": sorted(_ONE["properties"])},
  "terminus_2": {**_TWO, "required": ["analysis", "commands", "plan"]},
}


class TerminalMatcher:
  """``TerminalMatchConfig`` as a matcher. The expected action must fit a harness itself."""

  def __init__(self, config: TerminalMatchConfig):
    self._config = config

  def refusal(self, expected: Message, tools: Sequence[DeclaredTool]) -> str | None:
    del tools
    if expected.tool_calls:
      return "the expected action is a tool call; a terminal step is JSON in the text"
    if harness_of(expected.content) is None:
      return f"the expected action fits none of the harnesses {', '.join(HARNESSES)}"
    return None

  def match(self, expected: Message, actual: Message, tools: Sequence[DeclaredTool]) -> Match:
    del tools
    harness = harness_of(expected.content)
    assert harness is not None
    wanted, given = read_object(expected.content), read_object(actual.content)
    if actual.tool_calls or given is None:
      return Match(0.0, "the text is no JSON object")
    error = next(jsonschema.Draft202012Validator(HARNESSES[harness]).iter_errors(given), None)
    if error is not None:
      return Match(0.0, f"{harness}: {error.json_path}: {error.message[:200]}")
    assert wanted is not None
    if _done(wanted) != _done(given):
      return Match(0.0, f"done is {_done(given)}, expected {_done(wanted)}")
    if self._config.rules == "strict":
      keys = [keystrokes(batch) for batch in (wanted, given)]
      same = same_command(*keys) and _enters(keys[0]) == _enters(keys[1])
      return Match(float(same), "" if same else "other commands")
    alike = keystroke_similarity(wanted, given, least=self._config.threshold)
    return Match(float(alike >= self._config.threshold), f"similarity {alike:.3f}")


def harness_of(text: str) -> str | None:
  """The harness whose schema a text fits; None where there is none."""
  value = read_object(text)
  fits = (
    name
    for name, schema in HARNESSES.items()
    if jsonschema.Draft202012Validator(schema).is_valid(value)
  )
  return next(fits, None) if value is not None else None


def keystrokes(batch: Mapping[str, Any]) -> str:
  """The keystrokes of a batch of commands, one after the other."""
  return "".join(command["keystrokes"] for command in batch["commands"])


def _enters(keys: str) -> bool:
  """Whether the last command is sent; without a line feed a terminal only shows it."""
  return "\n" in keys[len(keys.rstrip()) :]


def keystroke_similarity(
  expected: Mapping[str, Any], actual: Mapping[str, Any], *, least: float = 0.0
) -> float:
  """Ratio of the joined keystrokes of two batches of commands, 0..1; 1 where both have none.

  SequenceMatcher takes more than quadratic time. So if an upper bound is below ``least``, the bound
  is returned; texts of over 4,000 characters give 1 if they are equal, else 0.
  """
  if not expected["commands"] or not actual["commands"]:
    return float(expected["commands"] == actual["commands"])
  left, right = keystrokes(expected), keystrokes(actual)
  if left == right:
    return 1.0
  if max(len(left), len(right)) > _MOST_CHARACTERS:
    return 0.0
  matcher = SequenceMatcher(None, left, right)
  for bound in (matcher.real_quick_ratio, matcher.quick_ratio):  # of the lengths, of the letters
    if (most := bound()) < least:
      return most
  return matcher.ratio()


def read_object(text: str) -> dict[str, Any] | None:
  """The JSON object after the thinking of a turn; None where there is none."""
  try:
    value = json.loads(text.rpartition("</think>")[2].strip())
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _done(batch: Mapping[str, Any]) -> bool:
  return bool(batch.get("task_complete") or batch.get("is_task_complete"))
