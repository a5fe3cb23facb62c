"""The registry of predicates, and the bundled ones.

A predicate is a pure function of a ``Situation`` and of the literals it is given in a rule::

    @predicate("is_destructive")
    def is_destructive(situation: Situation) -> bool: ...

    @predicate("calls_over")
    def calls_over(situation: Situation, limit: int) -> bool: ...

A parameter annotated ``int``, ``float`` or ``str`` takes literals of that type only, one annotated
``re.Pattern`` a regular expression; both are checked before a run starts. An exception, and any
result except True or False, denies the action. A rule also finds a function that is not registered
by ``module:function``.

The bundled predicates that read shell commands or code look for common forms. They protect against
accidents and bad habits. A policy can write a command that they do not know, so only the sandbox
prevents harm.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from agentjax.rollout.guards.interface import Situation, Step, as_json, strings
from agentjax.tools.protocol import ToolStatus

F = TypeVar("F", bound=Callable[..., bool])


PREDICATES: dict[str, Callable[..., bool]] = {}


def predicate(name: str) -> Callable[[F], F]:
  """Registers a predicate by the name that rules use.

  Raises:
    ValueError: no name of the rule language, or one that is taken.
  """

  def register(function: F) -> F:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name) or name in ("true", "false", "enforce"):
      raise ValueError(
        f"predicate {name!r}; allowed: a letter or '_', then letters, digits, '_', '.', '-', and "
        "none of true, false, enforce"
      )
    if name in PREDICATES:
      raise ValueError(f"two predicates are named {name!r}; names must be distinct")
    PREDICATES[name] = function
    return function

  return register


# What is called and with what.


@predicate("tool_matches")
def tool_matches(situation: Situation, glob: str) -> bool:
  """The tool's name matches a glob such as ``"file_*"``."""
  return fnmatch.fnmatchcase(situation.tool_name, glob)


@predicate("argument_matches")
def argument_matches(situation: Situation, key: str, pattern: re.Pattern[str]) -> bool:
  """A string within the argument ``key`` holds a match; numbers and the like count as JSON."""
  if key not in situation.tool_input:
    return False
  value = situation.tool_input[key]
  texts = list(strings(value)) or [as_json(value)]
  return any(pattern.search(text) for text in texts)


@predicate("input_matches")
def input_matches(situation: Situation, pattern: re.Pattern[str]) -> bool:
  """A string among the arguments holds a match."""
  return any(pattern.search(text) for text in situation.texts)


@predicate("observation_matches")
def observation_matches(situation: Situation, pattern: re.Pattern[str]) -> bool:
  """The new observation contains a match."""
  return pattern.search(situation.observation) is not None


@predicate("user_input_matches")
def user_input_matches(situation: Situation, pattern: re.Pattern[str]) -> bool:
  """The user's last message holds a match."""
  return pattern.search(situation.user_input) is not None


@predicate("tool_failed")
def tool_failed(situation: Situation) -> bool:
  """The call did not end with status ok; only "after_action" knows."""
  return situation.result is not None and situation.result.status is not ToolStatus.OK


# How often, and how much.


@predicate("is_repeated")
def is_repeated(situation: Situation, times: int = 1) -> bool:
  """The same call, with equal arguments, was made at least ``times`` times before."""
  same = situation.signature
  return sum(step.signature == same for step in situation.steps) >= times


@predicate("turns_over")
def turns_over(situation: Situation, limit: int) -> bool:
  """This is a later turn than the first ``limit``."""
  return situation.turn >= limit


@predicate("calls_over")
def calls_over(situation: Situation, limit: int) -> bool:
  """``limit`` calls went before, those that were denied not counted."""
  return _calls(situation.steps) >= limit


@predicate("calls_of_tool_over")
def calls_of_tool_over(situation: Situation, limit: int) -> bool:
  """``limit`` calls of this tool went before, those that were denied not counted."""
  return _calls([s for s in situation.steps if s.tool == situation.tool_name]) >= limit


@predicate("tool_seconds_over")
def tool_seconds_over(situation: Situation, limit: float) -> bool:
  """Tools took more than ``limit`` seconds in the earlier turns."""
  return sum(step.seconds for step in situation.steps) > limit


@predicate("output_characters_over")
def output_characters_over(situation: Situation, limit: int) -> bool:
  """Tools put out more than ``limit`` characters in the earlier turns."""
  return sum(len(step.output) for step in situation.steps) > limit


def _calls(steps: Sequence[Step]) -> int:
  return sum(step.status != ToolStatus.DENIED for step in steps)


# What the arguments would do. The forms known here are ours. No part of a pattern may be unbounded:
# the policy writes the searched text and must not be able to make the search slow.

_WORD = r"(?<![\w.-])"  # where the name of a command may begin
_REST = r"[^\n;|&]{0,100}"  # more of the same command

_DESTRUCTIVE_COMMANDS = [
  rf"rm[\"',]{{0,3}}\s{{1,9}}(?:{_REST}\s)?[\"']?-(?:\w{{0,9}}[rRf]|-recursive|-force)",
  r"(?:mkfs(?:\.\w+)?|wipefs|shred|fdisk|parted|mkswap|shutdown|reboot|halt|poweroff)\b",
  rf"dd\s{_REST}\bof=",
  rf"(?:chmod|chown|chgrp)\s(?:{_REST}\s)?-(?:\w{{0,9}}R|-recursive)\b",
  rf"find\s{_REST}\s-delete\b",
  rf"xargs\s{_REST}\brm\b",
  rf"truncate\s{_REST}-(?:s|-size)[\s=]{{0,9}}0",
  r"kill(?:all)?\s{1,9}(?:-\w{1,9}\s{1,9}){0,3}-1\b",
  rf"git\s{_REST}\bpush\s{_REST}(?:--force|--mirror|--delete|(?<=\s)-[a-zA-Z]{{0,9}}f\b)",
  rf"git\s{_REST}\breset\s{_REST}--hard",
  rf"git\s{_REST}\bclean\s{_REST}-(?:\w{{0,9}}f|-force)",
  rf"git\s{_REST}\b(?:branch\s{_REST}-D|filter-branch|reflog\s+expire)",
  r"shutil\.rmtree\s{0,9}\(",
  r"os\.(?:remove|unlink|rmdir|removedirs)\s{0,9}\(",
  r"(?i:drop\s{1,9}(?:table|database|schema|index|view)\b)",
  r"(?i:truncate\s{1,9}table\b)",
  r"(?i:delete\s{1,9}from\s{1,9}[\w.\"`\[\]]{1,200}\s{0,9}(?:;|$))",  # no WHERE
]
_DESTRUCTIVE = re.compile(
  rf"{_WORD}(?:{'|'.join(_DESTRUCTIVE_COMMANDS)})"
  r"|>\s{0,9}/dev/(?:sd|hd|vd|nvme|xvd|mmcblk|disk)"
  r"|:\s{0,9}\(\s{0,9}\)\s{0,9}\{\s{0,9}:\s{0,9}\|\s{0,9}:\s{0,9}&",  # the fork bomb
  re.MULTILINE,
)

_NETWORK_COMMANDS = [
  r"(?i:(?:https?|ftps?|sftp|ssh|wss?|git|rsync|telnet|ldap|smb)://)",
  r"(?:curl|wget|nc|ncat|netcat|socat|telnet|ssh|scp|sftp|rsync|ftp|ping)\s",
  rf"git\s{_REST}\b(?:clone|fetch|pull|push|ls-remote|submodule)\b",
  r"(?:pip3?|uv|npm|pnpm|yarn|cargo|gem|go|conda|apt|apt-get|dnf|yum|brew|apk)\s"
  rf"(?:{_REST}\s)?(?:install|add|get|update|upgrade|download|fetch)\b",
  r"(?:import|from)\s{1,9}(?:requests|urllib|urllib3|httpx|aiohttp|socket|http\.client|ftplib|"
  r"smtplib|telnetlib|paramiko)\b",
]
_NETWORK = re.compile(rf"{_WORD}(?:{'|'.join(_NETWORK_COMMANDS)})|/dev/(?:tcp|udp)/")

_SECRET = re.compile(
  "|".join(
    [
      r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY",
      r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS
      r"\bgh[opsur]_[A-Za-z0-9]{36,}",
      r"\bgithub_pat_[A-Za-z0-9_]{22,}",
      r"\bglpat-[A-Za-z0-9_-]{20,}",
      r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
      r"\bAIza[A-Za-z0-9_-]{35}",  # Google
      r"\bsk-[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic
      r"\bhf_[A-Za-z0-9]{30,}",
      r"\bey[A-Za-z0-9_-]{8,2000}\.ey[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8}",  # JSON web token
      r"(?i:\b(?:password|passwd|secret|api[_-]?key|access[_-]?token|auth[_-]?token)\b"
      r"[\"']?\s*[=:]\s*[\"']?[^\s\"'<>${}]{8,})",
      r"(?i:\bauthorization:\s*(?:bearer|basic)\s+\S{8,})",
      r"\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{1,200}:[^\s/@]{4,200}@",  # a password in an address
    ]
  )
)


@predicate("is_destructive")
def is_destructive(situation: Situation) -> bool:
  """A shell command, SQL statement or Python call among the arguments deletes or overwrites."""
  return any(_DESTRUCTIVE.search(text) for text in situation.texts)


@predicate("uses_network")
def uses_network(situation: Situation) -> bool:
  """An argument holds an address of the network, or a command or import that reaches it."""
  return any(_NETWORK.search(text) for text in situation.texts)


@predicate("has_secret")
def has_secret(situation: Situation) -> bool:
  """An argument holds a private key, or what looks like a password or an access token."""
  return any(_SECRET.search(text) for text in situation.texts)


_WRITING_TOOL = re.compile(
  r"(?i)write|edit|create|append|save|delete|remove|move|rename|copy|patch|replace|mkdir|upload"
)
_PATH_KEY = re.compile(
  r"(?i)^(?:.*_)?(?:path|paths|file|files|filename|dir|directory|folder|target|destination|dest|to)$"
)
_OPENED = re.compile(
  r"\bopen\s*\(\s*[rbfRBF]*([\"'])(?P<path>[^\"'\n]+)\1\s*,\s*(?:mode\s*=\s*)?[\"'][^\"']*[wax+]"
)
_PATH_METHOD = re.compile(
  r"\bPath\s*\(\s*[rbfRBF]*([\"'])(?P<path>[^\"'\n]+)\1\s*\)\s*\.\s*"
  r"(?:write_text|write_bytes|touch|mkdir|unlink|rmdir|rename|replace|chmod)\b"
)
_SINKS = ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty")
_ALL_ARGUMENTS = {"rm", "rmdir", "touch", "mkdir", "tee", "truncate", "unlink", "shred"}
_LAST_ARGUMENT = {"cp", "mv", "ln", "install", "rsync", "scp"}
_WRAPPERS = {"sudo", "env", "nohup", "time", "exec", "command", "xargs", "doas"}
_SEPARATORS = {";", "&&", "||", "|", "&", "(", ")", "|&", ";;"}
_REDIRECTIONS = {">", ">>", "&>", "&>>", ">|", ">&", "<>"}


@predicate("writes_outside")
def writes_outside(situation: Situation, directory: str) -> bool:
  """A file outside ``directory`` would be written, moved or deleted.

  Looked at are redirections and the common commands of a shell, ``open`` and ``Path`` in Python,
  and the paths given to tools whose name says that they write. Relative paths count from
  ``directory``; a path with a variable or ``~`` counts as outside, because its target is unknown.
  """
  return any(_outside(path, directory) for path in _written(situation))


def _outside(path: str, directory: str) -> bool:
  if path in _SINKS or not path:
    return False
  if path.startswith("~") or "$" in path or "`" in path:
    return True
  root = posixpath.normpath(directory)
  full = posixpath.normpath(posixpath.join(root, path))
  return full != root and not full.startswith(root.rstrip("/") + "/")


def _written(situation: Situation) -> Iterator[str]:
  """Paths that the call would write to."""
  if _WRITING_TOOL.search(situation.tool_name):
    for key, value in situation.tool_input.items():
      if _PATH_KEY.match(key):
        yield from strings(value)
  for text in situation.texts:
    for pattern in (_OPENED, _PATH_METHOD):
      for match in pattern.finditer(text):
        yield match["path"]
    yield from _written_by_shell(text)


def _written_by_shell(text: str) -> Iterator[str]:
  for line in text.replace("\\\n", " ").split("\n"):
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    try:
      words = list(lexer)
    except ValueError:  # quotes that are not closed
      words = line.split()
    command: list[str] = []
    redirected = False
    for word in words:
      if redirected:
        redirected = False
        if not word.isdigit():  # 2>&1
          yield word
      elif word in _REDIRECTIONS:
        redirected = True
      elif word in _SEPARATORS:
        yield from _written_by_command(command)
        command = []
      else:
        command.append(word)
    yield from _written_by_command(command)


def _written_by_command(words: Sequence[str]) -> Iterator[str]:
  words = list(words)
  while words and (posixpath.basename(words[0]) in _WRAPPERS or re.match(r"\w+=", words[0])):
    words.pop(0)
  if not words:
    return
  name = posixpath.basename(words[0])
  plain = [word for word in words[1:] if not word.startswith("-")]
  if name in _ALL_ARGUMENTS:
    yield from plain
  elif name in _LAST_ARGUMENT and plain:
    yield plain[-1]
    if name == "mv":
      yield from plain[:-1]
  elif name == "dd":
    yield from (word.removeprefix("of=") for word in words if word.startswith("of="))
  elif name == "sed" and any(re.match(r"-\w*i|--in-place", word) for word in words[1:]):
    yield from plain[1:]
  elif name in ("curl", "wget", "gcc", "sort"):
    for flag, value in zip(words, words[1:], strict=False):
      if flag in ("-o", "-O", "--output", "--output-document"):
        yield value
