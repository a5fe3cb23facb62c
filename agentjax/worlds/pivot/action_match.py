"""Shared by all verifiers: whether an action of the policy would do the same as an expert's.

An action is an assistant ``Message``: its text and its tool calls. A matcher first says whether it
can judge an expected action (``refusal``). Otherwise every policy would score 0 on it, and the turn
would be dropped silently as too hard.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Protocol

from agentjax.tools.declared import DeclaredTool
from agentjax.trajectory.record import Message, ToolCall

PATHS = ("path", "file", "file_path", "filename", "file_name")  # names of arguments
COMMANDS = ("command", "cmd")
MOST_CHARACTERS = 2000  # that SequenceMatcher compares; it takes quadratic time
_SHELL = re.compile(
  r"""(?P<blank>[ \t]+|\\\n)
    | (?P<operator>\n|\d*(?:<<<|<<-|<<|>>|<>|>\||[<>]&|[<>])|&>>|&>|&&|\|\||\|&|;;|[;&|()])
    | '(?P<single>[^']*)'
    | "(?P<double>(?:[^"\\]|\\.)*)"
    | \\(?P<escaped>.)
    | (?P<plain>[^\s'"\\;&|()<>]+)
    | (?P<other>.)""",
  re.VERBOSE | re.DOTALL,
)
_ACTIVE = re.compile(r"([$`*?\[\]{}~!#])")  # what a shell reads as more than the character
_ACTIVE_IN_QUOTES = re.compile(r"\\([$`\"\\\n])|([$`])")


@dataclasses.dataclass(frozen=True)
class Match:
  """How well an action matches the expected one, 0..1, and why it is not more."""

  score: float
  reason: str = ""


class Matcher(Protocol):
  """Judges actions against an expected one."""

  def refusal(self, expected: Message, tools: Sequence[DeclaredTool]) -> str | None:
    """Why this expected action cannot be judged; None where it can."""
    ...

  def match(self, expected: Message, actual: Message, tools: Sequence[DeclaredTool]) -> Match:
    """Judges an action that the policy finished; ``refusal`` was None."""
    ...


def undeclared(expected: Message, tools: Sequence[DeclaredTool]) -> str | None:
  """Why the calls of an expected action are none of ``tools``; None where they are."""
  names = {tool.name for tool in tools}
  for call in expected.tool_calls:
    if call.error is not None:
      return f"the expected call of {call.name!r} is malformed: {call.error}"
    if call.name not in names:
      shown = ", ".join(sorted(names)) or "none"
      return f"the expected action calls {call.name!r}, which is not declared; declared: {shown}"
  return None


def match_message(actual: Message) -> Match:
  """1 if the policy sent a message and called nothing; the text is not compared."""
  if actual.tool_calls:
    return Match(0.0, f"a message is expected, got a call of {actual.tool_calls[0].name!r}")
  if not actual.content.strip():
    return Match(0.0, "a message is expected, got nothing")
  return Match(1.0)


def match_one_call(
  expected: Message, actual: Message, judge: Callable[[ToolCall, ToolCall], Match]
) -> Match:
  """Messages by ``match_message``, and one call by ``judge``.

  Several calls do something else than the one expected. The released servers only look at the
  first, so they pay for any calls after it.
  """
  if not expected.tool_calls:
    return match_message(actual)
  if not actual.tool_calls:
    return Match(0.0, "a tool call is expected, got a message")
  if len(actual.tool_calls) > 1:
    return Match(0.0, f"one call is expected, got {len(actual.tool_calls)}")
  call = actual.tool_calls[0]
  if call.error is not None:
    return Match(0.0, f"the call is malformed: {call.error}")
  return judge(expected.tool_calls[0], call)


def similarity(left: str, right: str) -> float:
  """``SequenceMatcher.ratio`` of the first 2,000 characters: 2 * matching / total, 0..1."""
  return SequenceMatcher(None, left[:MOST_CHARACTERS], right[:MOST_CHARACTERS]).ratio()


def largest_matching(candidates: Sequence[Sequence[int]]) -> Mapping[int, int]:
  """A maximum bipartite matching, right index -> left index (augmenting paths; Kuhn, 1955).

  Args:
    candidates: the right indices that each left index may take.
  """
  partner: dict[int, int] = {}

  def augment(left: int, tried: set[int]) -> bool:
    for right in candidates[left]:
      if right in tried:
        continue
      tried.add(right)
      if right not in partner or augment(partner[right], tried):
        partner[right] = left
        return True
    return False

  for left in range(len(candidates)):
    augment(left, set())
  return partner


def same_command(expected: str, actual: str) -> bool:
  """Whether a shell would run the same: equal operators and words, in order, quotes removed.

  Blanks between words, empty lines, and a separator at the end do not count. Nothing is expanded:
  ``$A``, ``"$A"`` and ``'$A'`` are three words. Texts that are no shell commands must be equal, and
  so must those with a document (``<<``), whose blanks and lines count, but for blanks around them.
  """
  wanted, given = shell_words(expected), shell_words(actual)
  if wanted is None or given is None:
    return expected == actual
  operators = {text.lstrip("0123456789") for kind, text in wanted if kind == "operator"}
  if operators & {"<<", "<<-"}:
    return expected.strip() == actual.strip()
  return wanted == given


def shell_words(text: str) -> list[tuple[str, str]] | None:
  """("word" or "operator", text) of a command; None where a quote stays open.

  Text that the shell expands gets one NUL in front, in quotes two, so that ``'*'`` and ``*``
  differ.
  """
  words: list[tuple[str, str]] = []
  word: str | None = None
  for token in _SHELL.finditer(text):
    kind, part = token.lastgroup, token[token.lastgroup or 0]
    if kind == "other":
      return None
    if kind in ("blank", "operator"):
      if word is not None:
        words.append(("word", word))
      word = None
      if kind == "operator":
        words.append(("operator", ";" if part == "\n" else part))
    elif kind == "plain":
      word = (word or "") + _ACTIVE.sub("\0\\1", part)
    elif kind == "double":
      word = (word or "") + _ACTIVE_IN_QUOTES.sub(_in_quotes, part)
    else:
      word = (word or "") + part
  if word is not None:
    words.append(("word", word))
  separator = ("operator", ";")
  kept = [w for i, w in enumerate(words) if w != separator or (i and words[i - 1] != separator)]
  return kept[:-1] if kept and kept[-1] == separator else kept


def _in_quotes(found: re.Match[str]) -> str:
  escaped, active = found.groups()
  return f"\0\0{active}" if active else "" if escaped == "\n" else escaped


def same_path(expected: str, actual: str) -> bool:
  """Whether two paths are one after ``.``, ``..`` and doubled slashes are resolved."""
  return posixpath.normpath(expected) == posixpath.normpath(actual)
