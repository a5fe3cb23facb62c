r"""Tool calls that do the same: names, arguments and parallel calls compared.

All rules but that for strings are those of NeMo-Gym's server
``single_step_tool_use_with_argument_comparison``, with which the single-turn tasks of PivotRL
(2603.21383) were released:

  names       equal
  types       equal; unlike there, true is not the integer 1
  objects     same keys, each value compared
  lists       same length, compared in order
  floats      ``|a - b| < 1e-6``
  strings     equal where either has fewer than two words; else their lower-case words are
              compared, and must reach a threshold
  the rest    equal

"ordered" is the longest common subsequence of two lists of words, divided by the longer length: 1
for equal texts, and less for words that are reordered, left out or appended. Arguments named
``command`` or ``cmd`` must be the same shell command, and paths are equal once normalised.

"overlap", as released, is ``|A & B| / (|A| + |B|)`` over multisets, which is 0.5 for equal texts: a
threshold above 0.5 would refuse everything. "jaccard" is ``|A & B| / |A | B|``, 1 for equal texts.
Both pay for the same words in any order, and with a low threshold also for appended text.

Parallel calls are paired by a maximum matching with m pairs among e expected and a actual calls.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jsonschema

from agentjax.config import Config, PositiveFloat
from agentjax.tools.declared import DeclaredTool
from agentjax.trajectory.record import Message, ToolCall
from agentjax.worlds.pivot.action_match import (
  COMMANDS,
  PATHS,
  Match,
  largest_matching,
  match_message,
  match_one_call,
  same_command,
  same_path,
  undeclared,
)

_MOST_WORDS = 500  # that are compared one with another


@dataclasses.dataclass(unsafe_hash=True)
class ArgumentMatchConfig(Config):
  """How calls are compared.

  Attributes:
    string_similarity: "ordered", at most 1; "overlap", as released, at most 0.5; or "jaccard", at
      most 1. See the module.
    string_threshold: words must agree at least this much; with 0.9 one word in ten may be another.
      Released, with "overlap": 0.1 (tool use, parallel calls), 0.3 (search), 0.0 (edits: any two
      texts of two words or more are then alike).
    float_tolerance: of numbers with a decimal point, absolute.
    ignored_keys: keys of objects whose values are not compared; the released server ignores "goal".
    only_keys: of the arguments of a call only these are compared, where the expected call has any
      of them; () compares all. ("query",) asks for a search for the same words.
    parallel: the score of several calls. "binary_strict": 1 where m is all that is needed, else 0;
      "fractional": m / needed; "f1": 2 m / (e + a). Needed is e, or min(e, a) with ``allow_fewer``.
    allow_fewer, allow_more: whether an action with fewer or more calls than expected may score at
      all. With "f1" both are safe; with the others ``allow_more`` pays for calling everything.
  """

  string_similarity: Literal["ordered", "overlap", "jaccard"] = "ordered"
  string_threshold: float = 0.9
  float_tolerance: PositiveFloat = 1e-6
  ignored_keys: tuple[str, ...] = ()
  only_keys: tuple[str, ...] = ()
  parallel: Literal["binary_strict", "fractional", "f1"] = "binary_strict"
  allow_fewer: bool = False
  allow_more: bool = False

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    most = 0.5 if self.string_similarity == "overlap" else 1.0
    require(
      0 <= self.string_threshold <= most,
      "string_threshold",
      f"0 to {most}, what string_similarity={self.string_similarity!r} gives equal texts",
    )


class ArgumentMatcher:
  """``ArgumentMatchConfig`` as a matcher; a message is expected where no call is."""

  def __init__(self, config: ArgumentMatchConfig):
    self._config = config

  def refusal(self, expected: Message, tools: Sequence[DeclaredTool]) -> str | None:
    return undeclared(expected, tools)

  def match(self, expected: Message, actual: Message, tools: Sequence[DeclaredTool]) -> Match:
    del tools
    if not expected.tool_calls:
      return match_message(actual)
    if not actual.tool_calls:
      return Match(0.0, "a tool call is expected, got a message")
    return self._match_calls(expected.tool_calls, actual.tool_calls)

  def _match_calls(self, expected: Sequence[ToolCall], actual: Sequence[ToolCall]) -> Match:
    config, count = self._config, f"{len(expected)} calls are expected, got {len(actual)}"
    if len(actual) < len(expected) and not config.allow_fewer:
      return Match(0.0, count)
    if len(actual) > len(expected) and not config.allow_more:
      return Match(0.0, count)
    differences = [[call_difference(e, a, config) for a in actual] for e in expected]
    candidates = [[i for i, text in enumerate(row) if text is None] for row in differences]
    pairs = len(largest_matching(candidates))
    needed = min(len(expected), len(actual)) if config.allow_fewer else len(expected)
    score = {
      "binary_strict": float(pairs == needed),
      "fractional": pairs / needed,
      "f1": 2 * pairs / (len(expected) + len(actual)),
    }[config.parallel]
    if score == 1.0:
      return Match(1.0)
    unmatched = [row[0] for row, found in zip(differences, candidates, strict=True) if not found]
    return Match(score, (unmatched[0] if unmatched else None) or count)


def call_difference(
  expected: ToolCall, actual: ToolCall, config: ArgumentMatchConfig
) -> str | None:
  """Why two calls do not do the same; None where they do."""
  if actual.error is not None:
    return f"the call is malformed: {actual.error}"
  if expected.name != actual.name:
    return f"a call of {expected.name!r} is expected, got {actual.name!r}"
  wanted, given = dict(expected.arguments), dict(actual.arguments)
  if only := wanted.keys() & set(config.only_keys):
    wanted = {key: wanted[key] for key in only}
    given = {key: value for key, value in given.items() if key in only}
  return _difference(wanted, given, config, expected.name)


def _difference(expected: Any, actual: Any, config: ArgumentMatchConfig, where: str) -> str | None:
  if type(expected) is not type(actual):
    return f"{where} is a {type(actual).__name__}, expected a {type(expected).__name__}"
  if isinstance(expected, Mapping):
    if expected.keys() != actual.keys():
      return f"{where} has the keys {sorted(actual)}, expected {sorted(expected)}"
    compared = [k for k in expected if k not in config.ignored_keys]
    found = (_named_difference(k, expected[k], actual[k], config, where) for k in compared)
    return next((text for text in found if text is not None), None)
  if isinstance(expected, list):
    if len(expected) != len(actual):
      return f"{where} has {len(actual)} items, expected {len(expected)}"
    pairs = enumerate(zip(expected, actual, strict=True))
    found = (_difference(e, a, config, f"{where}[{i}]") for i, (e, a) in pairs)
    return next((text for text in found if text is not None), None)
  if isinstance(expected, float):
    same = abs(expected - actual) < config.float_tolerance
  elif isinstance(expected, str):
    same = _alike(expected, actual, config)
  else:
    same = expected == actual
  return None if same else f"{where} is {str(actual)[:80]!r}, expected {str(expected)[:80]!r}"


def _named_difference(
  key: str, expected: Any, actual: Any, config: ArgumentMatchConfig, where: str
) -> str | None:
  """``_difference``, but commands and paths are compared as such, so that extra words in them are
  found."""
  if (
    config.string_similarity == "ordered" and isinstance(expected, str) and isinstance(actual, str)
  ):
    same = {**dict.fromkeys(COMMANDS, same_command), **dict.fromkeys(PATHS, same_path)}.get(key)
    if same is not None:
      if expected and actual and same(expected, actual):
        return None
      if expected != actual:
        return f"{where}.{key} is {actual[:80]!r}, expected {expected[:80]!r}"
  return _difference(expected, actual, config, f"{where}.{key}")


def _alike(expected: str, actual: str, config: ArgumentMatchConfig) -> bool:
  if min(len(expected.split()), len(actual.split())) < 2:
    return expected == actual
  return word_similarity(expected, actual, config.string_similarity) >= config.string_threshold


def word_similarity(left: str, right: str, kind: Literal["ordered", "overlap", "jaccard"]) -> float:
  """How much of the lower-case words of two texts agrees; see the module."""
  if kind == "ordered":
    return _ordered_similarity(left.lower().split(), right.lower().split())
  words = [collections.Counter(text.lower().split()) for text in (left, right)]
  common, total = (words[0] & words[1]).total(), words[0].total() + words[1].total()
  whole = total if kind == "overlap" else total - common
  return common / whole if whole else 1.0


def _ordered_similarity(left: Sequence[str], right: Sequence[str]) -> float:
  """The longest common subsequence over the longer length; 0 over 500 words that differ."""
  if left == right:
    return 1.0
  longer = max(len(left), len(right))
  if longer > _MOST_WORDS:
    return 0.0
  row = [0] * (len(right) + 1)  # of the dynamic programme, one word of the left at a time
  for word in left:
    diagonal = 0
    for j, other in enumerate(right, 1):
      diagonal, row[j] = row[j], diagonal + 1 if word == other else max(row[j], row[j - 1])
  return row[-1] / longer


class NameMatcher:
  """1 where the same tool is called, whatever its arguments; PivotRL's own verifier of edits.

  Coarse: with it PivotRL stays behind supervised learning on SWE-bench (2603.21383, table 1).
  """

  def refusal(self, expected: Message, tools: Sequence[DeclaredTool]) -> str | None:
    return _not_one_call(expected) or undeclared(expected, tools)

  def match(self, expected: Message, actual: Message, tools: Sequence[DeclaredTool]) -> Match:
    del tools
    return match_one_call(expected, actual, _match_names)


class SchemaMatcher:
  """1 where the same tool is called with arguments that fit its schema; PivotRL's verifier of tau2.

  Which values the arguments have is not compared.
  """

  def refusal(self, expected: Message, tools: Sequence[DeclaredTool]) -> str | None:
    return _not_one_call(expected) or undeclared(expected, tools)

  def match(self, expected: Message, actual: Message, tools: Sequence[DeclaredTool]) -> Match:
    schemas = {tool.name: tool.parameters for tool in tools}

    def judge(wanted: ToolCall, call: ToolCall) -> Match:
      if wanted.name != call.name:
        return _match_names(wanted, call)
      validator = jsonschema.Draft202012Validator(schemas[wanted.name])
      error = next(validator.iter_errors(dict(call.arguments)), None)
      return Match(1.0) if error is None else Match(0.0, f"{call.name}: {error.message[:200]}")

    return match_one_call(expected, actual, judge)


def _match_names(wanted: ToolCall, call: ToolCall) -> Match:
  if wanted.name == call.name:
    return Match(1.0)
  return Match(0.0, f"a call of {wanted.name!r} is expected, got {call.name!r}")


def _not_one_call(expected: Message) -> str | None:
  count = len(expected.tool_calls)
  return f"{count} calls are expected at once; this verifier judges one" if count > 1 else None
