r"""Steps of a coding agent that do the same, in levels: kind of tool, target, content, size.

After NeMo-Gym's ``swe_pivot`` server (at commit 75aab1e), the verifier of PivotRL's released SWE
pivots, which replaced the paper's comparison of tool names (2603.21383). Each level must be passed.
With ``rules="released"`` they are the server's:

  0  kind      the same tool, or two of one category (edit, bash, search, read, ...)
  1  target    edits: sub-command, the last two parts of the path, and for views at least 0.8 of the
               expected lines; bash: first word, one path in common where both have any, similarity
               of at least 0.3; search and read: the last three parts of the path
  2  content   edits: the lower of the similarities of old_str and new_str, or that of patch, diff
               or text; bash: of the command; else 1
  3  size      edits, "continuous" only: reward times ``1 - penalty * min(characters / 500, 1)``

These rules also pay for another file of the same name, longer commands, and searches for something
else. With ``rules="strict"``, the default, level 1 asks for more:

  edits    the whole path, once normalised; for views both ranges cover 0.8 of each other; the same
           old_str; all other arguments but the text equal
  bash     the same words and operators in the same order (``action_match.same_command``)
  others   all arguments equal, paths once normalised; "think" and "finish" are free

Level 2 only compares the first 2,000 characters; later characters of a text must be equal.

In both, unlike on the server, the call must name what the expert's call names (path, command, any
argument): a call without arguments would pass the last three levels.

With similarity s, "binary" pays 1 where ``s >= 0.8``; "continuous" pays 1 there, and
``0.5 + 0.5 (s - 0.4) / 0.4`` from 0.4 on.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentjax.config import Config, Share, check
from agentjax.tools.declared import DeclaredTool
from agentjax.trajectory.record import Message, ToolCall
from agentjax.worlds.pivot.action_match import (
  COMMANDS,
  MOST_CHARACTERS,
  PATHS,
  Match,
  match_one_call,
  same_command,
  same_path,
  similarity,
  undeclared,
)

# Names that coding agents (OpenHands, OpenCode, Codex and others) give to tools of one kind.
_NAMES = {
  "edit": """str_replace_editor text_editor file_editor code_editor edit_file modify_file
    update_file file_edit edit modify apply_patch patch_file apply_diff apply_changes write
    write_file save_file create_file""",
  "bash": """execute_bash run_bash bash_exec shell_run shell bash terminal shell_command shell_cmd
    run_shell_cmd exec_command exec_cmd""",
  "search": """grep search_text find_pattern text_search glob find_files file_glob match_files
    grep_files search_files find_in_files code_search list_dir ls show_dir ls_dir list_directory""",
  "read": """read read_file view_file cat_file view file_view inspect show_file
    read_file_content""",
  "finish": "finish submit",
  "think": "think",
  "planning": """task_tracker todo_tracker plan_tracker todo_read todo_write update_plan list_tasks
    update_tasks read_todos write_todos edit_plan modify_plan""",
}
CATEGORIES: Mapping[str, str] = {
  spelling: category
  for category, names in _NAMES.items()
  for name in names.split()
  for spelling in (name, name.replace("_", ""))  # the latter is CamelCase, lowered
}
_TEXTS = ("old_str", "new_str", "patch", "diff", "content", "file_text")
_EDIT_SUFFIX, _SUFFIX = 2, 3  # parts of a path that must agree
_BASH_FLOOR = 0.3
_VIEW_COVERAGE = 0.8
_LARGE_EDIT = 500  # characters


@dataclasses.dataclass(unsafe_hash=True)
class EditMatchConfig(Config):
  """Levels and scores; all defaults but ``rules`` are the released ones.

  Attributes:
    rules: "strict", or "released", which pays more than what does the same; see the module.
    reward: "binary" or "continuous".
    partial_credit, full_credit: similarities from which on "continuous" pays 0.5, and both pay 1.
    size_penalty: most that a large edit loses, as a share; 0 is off.
    categories: further names, as "name=category" with a category of the module or one of your own.
  """

  rules: Literal["strict", "released"] = "strict"
  reward: Literal["binary", "continuous"] = "binary"
  partial_credit: float = 0.4
  full_credit: float = 0.8
  size_penalty: Share = 0.1
  categories: tuple[str, ...] = ()

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      0 <= self.partial_credit < self.full_credit <= 1,
      "partial_credit",
      f"0 to below full_credit ({self.full_credit}), which is at most 1",
    )
    for entry in self.categories:
      name, separator, category = entry.partition("=")
      check(bool(name and separator and category), f"{path}.categories", entry, '"name=category"')


class EditMatcher:
  """``EditMatchConfig`` as a matcher. An expected tool of unknown category is refused."""

  def __init__(self, config: EditMatchConfig):
    self._config = config
    further = (entry.partition("=") for entry in config.categories)
    self._categories = {**CATEGORIES, **{name.lower(): kind for name, _, kind in further}}

  def refusal(self, expected: Message, tools: Sequence[DeclaredTool]) -> str | None:
    if len(expected.tool_calls) > 1:
      return f"{len(expected.tool_calls)} calls are expected at once; this verifier judges one"
    for call in expected.tool_calls:
      if self._category(call) is None:
        return (
          f"the verifier knows no category of tool {call.name!r}; known names are in "
          f"{__name__}.CATEGORIES, give others by edits.categories=(NAME=CATEGORY,)"
        )
    return undeclared(expected, tools) if tools else None

  def match(self, expected: Message, actual: Message, tools: Sequence[DeclaredTool]) -> Match:
    del tools
    return match_one_call(expected, actual, self._judge)

  def _category(self, call: ToolCall) -> str | None:
    return self._categories.get(call.name.lower())

  def _judge(self, expected: ToolCall, actual: ToolCall) -> Match:
    kind, wanted, given = self._category(expected), expected.arguments, actual.arguments
    if expected.name.lower() != actual.name.lower() and kind != self._category(actual):
      return Match(0.0, f"a tool of kind {kind} is expected, got {actual.name!r}")
    strict = self._config.rules == "strict"
    difference = (strict_difference if strict else target_difference)(kind, wanted, given)
    if difference is not None:
      return Match(0.0, difference)
    # The same command may be written in another way.
    alike = 1.0 if strict and kind == "bash" else content_similarity(kind, wanted, given)
    score = self._credit(alike)
    if self._config.reward == "continuous" and kind == "edit":
      size = min(len(_edit_text(given)) / _LARGE_EDIT, 1.0)
      score *= 1.0 - self._config.size_penalty * size
    return Match(score, "" if score == 1.0 else f"similarity {alike:.3f}")

  def _credit(self, alike: float) -> float:
    low, high = self._config.partial_credit, self._config.full_credit
    if alike >= high:
      return 1.0
    if self._config.reward == "binary" or alike < low:
      return 0.0
    return 0.5 + 0.5 * (alike - low) / (high - low)


def strict_difference(
  kind: str | None, expected: Mapping[str, Any], actual: Mapping[str, Any]
) -> str | None:
  """Why two calls of one kind do not do the same but for the text of an edit; None where they do.

  Where the expert views a whole file or leaves out a path, so must the policy.
  """
  if kind in ("think", "finish"):
    return None
  for keys in (PATHS, COMMANDS if kind == "bash" else (), _TEXTS if kind == "edit" else ()):
    named = [[key for key in keys if key in call] for call in (expected, actual)]
    if len(named[1]) > len(named[0]):
      return f"it has the arguments {named[1]}, expected {named[0]}"
  for keys, same in ((PATHS, same_path), (COMMANDS if kind == "bash" else (), same_command)):
    wanted, given = _first(expected, keys), _first(actual, keys)
    if bool(wanted) != bool(given) or (wanted and not same(wanted, given)):
      return f"it works on {given[:80]!r}, expected {wanted[:80]!r}"
  read = PATHS + (COMMANDS if kind == "bash" else ())
  if kind == "edit":
    read += ("view_range", *_TEXTS)
    ranges = [call.get("view_range") for call in (expected, actual)]
    lines = [_lines(value) for value in ranges]
    if (ranges[0] is None) != (ranges[1] is None) or (
      ranges[0] is not None and not (_covers(*lines) and _covers(*lines[::-1]))
    ):
      return f"lines {str(ranges[1])[:80]} are viewed, expected {str(ranges[0])[:80]}"
    if _text(expected, "old_str") != _text(actual, "old_str"):
      return "another old_str"
    if _edit_text(expected)[MOST_CHARACTERS:] != _edit_text(actual)[MOST_CHARACTERS:]:
      return f"the texts differ behind their first {MOST_CHARACTERS} characters"
  for key in sorted({*expected, *actual} - set(read)):
    if expected.get(key) != actual.get(key):
      return f"{key} is {str(actual.get(key))[:80]!r}, expected {str(expected.get(key))[:80]!r}"
  return None


def _covers(wanted: tuple[int, int] | None, given: tuple[int, int] | None) -> bool:
  """Whether the lines of a view are at least 0.8 of those expected."""
  if wanted is None or given is None:
    return False
  common = min(wanted[1], given[1]) - max(wanted[0], given[0])
  return wanted == given or common / max(wanted[1] - wanted[0], 1) >= _VIEW_COVERAGE


def target_difference(
  kind: str | None, expected: Mapping[str, Any], actual: Mapping[str, Any]
) -> str | None:
  """Level 1: why two calls of one kind do not work on the same thing; None where they do.

  Arguments that the expert leaves out (a path, a sub-command) are not required; neither is a range
  of lines: a view without one shows all lines.
  """
  if expected and not actual:
    return "the call has no arguments"
  if kind == "edit":
    commands = _text(expected, "command"), _text(actual, "command")
    if commands[0] and commands[0] != commands[1]:
      return f"the command is {commands[1]!r}, expected {commands[0]!r}"
    if not _same_file(expected, actual, _EDIT_SUFFIX):
      return f"the file is {_path(actual)!r}, expected {_path(expected)!r}"
    lines = _lines(expected.get("view_range")), _lines(actual.get("view_range"))
    if commands[0] == commands[1] == "view" and lines[0] and actual.get("view_range") is not None:
      if lines[1] is None:
        return f"lines {str(actual['view_range'])[:80]} are viewed, expected {lines[0]}"
      common = min(lines[0][1], lines[1][1]) - max(lines[0][0], lines[1][0])
      if max(common, 0) / max(lines[0][1] - lines[0][0], 1) < _VIEW_COVERAGE:
        return f"lines {lines[1]} are viewed, expected {lines[0]}"
    return None
  if kind == "bash":
    return _command_difference(_command(expected), _command(actual))
  if kind in ("search", "read") and not _same_file(expected, actual, _SUFFIX):
    return f"the file is {_path(actual)!r}, expected {_path(expected)!r}"
  return None


def content_similarity(
  kind: str | None, expected: Mapping[str, Any], actual: Mapping[str, Any]
) -> float:
  """Level 2, 0..1."""
  if kind == "bash":
    wanted, given = _command(expected), _command(actual)
    return similarity(wanted, given) if wanted and given else 1.0
  if kind != "edit":
    return 1.0
  parts = ("old_str", "new_str")
  if all(any(_text(call, part) for part in parts) for call in (expected, actual)):
    return min(_part_similarity(_text(expected, p), _text(actual, p)) for p in parts)
  return _part_similarity(_edit_text(expected), _edit_text(actual))


def _part_similarity(left: str, right: str) -> float:
  return similarity(left, right) if left and right else float(left == right)


def _command_difference(expected: str, actual: str) -> str | None:
  if not expected:
    return None
  if not actual:
    return "there is no command"
  verbs = [command.split()[0].rsplit("/", 1)[-1] for command in (expected, actual)]
  if verbs[0] != verbs[1]:
    return f"the command is {verbs[1]!r}, expected {verbs[0]!r}"
  paths = [{_suffix(p, _SUFFIX) for p in _command_paths(command)} for command in (expected, actual)]
  if all(paths) and not paths[0] & paths[1]:
    return f"the command works on {sorted(paths[1])}, expected {sorted(paths[0])}"
  if similarity(expected, actual) < _BASH_FLOOR:
    return f"the command is {actual[:80]!r}, expected {expected[:80]!r}"
  return None


def _command_paths(command: str) -> list[str]:
  """Words of a command that hold a slash and are no options."""
  words = re.split(r"[\s='\"()<>|;&]+", command)
  return [w for w in words if "/" in w and not w.startswith("-") and w.strip("/.")]


def _same_file(expected: Mapping[str, Any], actual: Mapping[str, Any], parts: int) -> bool:
  wanted, given = _path(expected), _path(actual)
  return not wanted or _suffix(wanted, parts) == _suffix(given, parts)


def _suffix(path: str, parts: int) -> str:
  return "/".join(path.strip("/").split("/")[-parts:])


def _path(arguments: Mapping[str, Any]) -> str:
  return _first(arguments, PATHS)


def _command(arguments: Mapping[str, Any]) -> str:
  return _first(arguments, COMMANDS)


def _edit_text(arguments: Mapping[str, Any]) -> str:
  if "new_str" in arguments:
    return "\n".join((_text(arguments, "old_str"), _text(arguments, "new_str")))
  return _first(arguments, ("patch", "diff", "content", "file_text"))


def _first(arguments: Mapping[str, Any], keys: Sequence[str]) -> str:
  return next((_text(arguments, key).strip() for key in keys if key in arguments), "")


def _text(arguments: Mapping[str, Any], key: str) -> str:
  return str(arguments.get(key, ""))


def _lines(value: Any) -> tuple[int, int] | None:
  """First and last line of a view; also where the list is written as text."""
  try:
    first, last = json.loads(value) if isinstance(value, str) else value
    return int(first), int(last)
  except (TypeError, ValueError, OverflowError, RecursionError):
    return None
