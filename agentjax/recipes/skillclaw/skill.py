"""A skill: a SKILL.md with a name, a description and a body, and what keeps it from being one.

Skills are written by models that have read untrusted transcripts. So each is screened before it is
tried and again before it is stored (``refusals``): its name is a plain word, its size is bounded,
and it holds no URL, no secret, no markup of a conversation and no character that cannot be seen.
The rules are ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping

FILE = "SKILL.md"
NAME_LENGTH, DESCRIPTION_LENGTH, BODY_LENGTH = 64, 1024, 8192  # characters at most

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_HEAD = re.compile(r"\A---\n(.*?)\n---(?:\n|\Z)", re.S)
# A field goes on in the lines below that are indented or blank.
_FIELD = re.compile(r"^(name|description):(.*(?:\n(?:[ \t].*)?$)*)", re.M)
_BLOCK = re.compile(r"[>|][1-9]?[+-]?[1-9]?(\s+#.*)?")
_QUOTED = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')(\s+#.*)?""")
_OTHER_FORMS = "\"'|>[{&*!"  # first signs of YAML's values that are no plain text
_MARKUP = re.compile(
  r"<\|[^|>]{0,40}\|>|</?\s*(available_skills|skill|system|tool_calls?|tool_response"
  r"|(start|end)_of_turn)\b|\[/?INST\]|<</?SYS>>",
  re.I,
)
_NO_INK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # letters and marks without any
_NO_SIGN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")  # categories
_URL = re.compile(
  r"\b(?:[a-z][a-z0-9+.-]*://|www\.|mailto:|data:[a-z]+/)|\b\d{1,3}(\.\d{1,3}){3}\b", re.I
)
_SECRETS: Mapping[str, re.Pattern[str]] = {
  "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
  "a cloud's access key": re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}"),
  "a token": re.compile(r"\b(gh[pousr]_\w{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}"
                        r"|sk-[\w-]{16,}|hf_\w{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"),
  "a password": re.compile(
    r"\b(password|passwd|secret|api[_ -]?key|access[_ -]?token)\b\s*[:=]\s*\S{6,}", re.I
  ),
  "a bearer token": re.compile(r"\bbearer\s+[\w.~+/-]{16,}", re.I),
  "a long code": re.compile(r"(?=[A-Za-z+]*\d)(?=[\d+]*[A-Za-z])[A-Za-z0-9+]{40,}"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Skill:
  """What an agent can be shown.

  Attributes:
    name: lower-case words and digits with hyphens between; also the name of its folder.
    description: one line that says when it helps.
    body: Markdown.
  """

  name: str
  description: str
  body: str

  def __post_init__(self) -> None:
    for field in ("name", "description", "body"):  # so that a file gives back what was written
      object.__setattr__(self, field, getattr(self, field).strip())

  @property
  def text(self) -> str:
    """The content of its SKILL.md."""
    name, description = _written(self.name), _written(self.description)
    return f"---\nname: {name}\ndescription: {description}\n---\n{self.body}\n"

  @property
  def sha(self) -> str:
    """SHA-256 of the text, in hex."""
    return hashlib.sha256(self.text.encode()).hexdigest()


def read_skill(text: str) -> Skill:
  """Inverse of ``Skill.text``; further fields of the front matter are left out.

  Name and description may have YAML's forms of a text: plain, in quotes, or a block (``>-`` or
  ``|``). Several lines become one.

  Raises:
    ValueError: no front matter with a name and a description, or one that is no text.
  """
  text = text.replace("\r\n", "\n")
  head = _HEAD.match(text)
  fields = dict(_FIELD.findall(head[1])) if head is not None else {}
  if head is None or len(fields) < 2:
    raise ValueError(
      f"begins with {text[:60]!r}; allowed: '---', 'name: ...', 'description: ...', '---', each on "
      "a line of its own, then Markdown"
    )
  name, description = _value(fields["name"]), _value(fields["description"])
  return Skill(name, description, text[head.end() :].strip())


def _value(written: str) -> str:
  """The text of a field; ValueError for a value that is no text."""
  first, *more = (line.strip() for line in written.split("\n"))
  if _BLOCK.fullmatch(first):
    return _joined(more)
  text = _joined([first, *more])
  if quoted := _QUOTED.fullmatch(text):
    if text[0] == "'":
      return quoted[1][1:-1].replace("''", "'")
    with contextlib.suppress(ValueError):  # an escape that JSON does not have
      return str(json.loads(quoted[1], strict=False))
  if text[:1] and text[0] in _OTHER_FORMS:
    raise ValueError(
      f"a field is {text[:60]!r}; allowed: plain text, text in quotes with JSON's escapes, or '>-' "
      "or '|' and indented lines of text"
    )
  return text


def _joined(lines: Iterable[str]) -> str:
  return " ".join(line for line in lines if line)


def _written(text: str) -> str:
  """A text as ``_value`` reads it: plain if that gives it back, else in quotes."""
  with contextlib.suppress(ValueError):
    if _value(text) == text:
      return text
  return json.dumps(text, ensure_ascii=False)


def skill_id(name: str) -> str:
  """The registry's id of a name: 12 hex digits of its SHA-256."""
  return hashlib.sha256(name.encode()).hexdigest()[:12]


def bundle_hash(files: Mapping[str, bytes]) -> str:
  """SHA-256 over the sorted lines ``path NUL sha NUL size``, in hex."""
  lines = sorted(
    f"{path}\0{hashlib.sha256(data).hexdigest()}\0{len(data)}\n" for path, data in files.items()
  )
  return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_name(text: str) -> bool:
  """Whether a text is the name of a skill, and so of a folder: no dots, no slashes, no case."""
  return len(text) <= NAME_LENGTH and _NAME.fullmatch(text) is not None


def refusals(skill: Skill) -> list[str]:
  """Why a skill must be neither tried nor stored; [] if nothing speaks against it."""
  return list(_refusals(skill))


def _refusals(skill: Skill) -> Iterator[str]:
  if not is_name(skill.name):
    yield (
      f"the name {skill.name[:80]!r}; allowed: up to {NAME_LENGTH} lower-case letters and digits, "
      "with single hyphens between words"
    )
  if not 1 <= len(skill.description) <= DESCRIPTION_LENGTH or "\n" in skill.description:
    yield (
      f"a description of {len(skill.description)} characters; allowed: one line of 1 to "
      f"{DESCRIPTION_LENGTH}"
    )
  if not 1 <= len(skill.body) <= BODY_LENGTH:
    yield f"a body of {len(skill.body)} characters; allowed: 1 to {BODY_LENGTH}"
  for field in ("description", "body"):
    yield from (
      f"its {field} holds {what}" for what in unwanted(getattr(skill, field)[:BODY_LENGTH])
    )


def _is_hidden(before: str, c: str) -> bool:
  """Whether a character behind another one cannot be seen; a sign may choose its own form."""
  if c in "\ufe0e\ufe0f":
    return before.isalpha() or before.isspace() or _is_hidden(" ", before)
  return (c not in "\n\t" and unicodedata.category(c) in _NO_SIGN) or (
    c in _NO_INK
    or "\ufe00" <= c <= "\ufe0d"
    or "\u180b" <= c <= "\u180f"
    or "\U000e0000" <= c <= "\U000e0fff"
  )


def unwanted(text: str) -> Iterator[str]:
  """What a text holds that no skill may hold."""
  hidden = {c for before, c in zip(f" {text}", text, strict=False) if _is_hidden(before, c)}
  if hidden:
    yield f"characters that cannot be seen ({', '.join(sorted(map(ascii, hidden)))})"
  # Compatibility forms, such as full-width letters, must not hide the rest from the patterns.
  plain = unicodedata.normalize("NFKC", text)
  if found := _URL.search(plain):
    yield f"an address ({found[0][:40]!r})"
  if found := _MARKUP.search(plain):
    yield f"markup of a conversation ({found[0][:40]!r})"
  yield from (what for what, pattern in _SECRETS.items() if pattern.search(plain))
