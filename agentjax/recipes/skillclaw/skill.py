"""A skill: a SKILL.md with a name, a description and a body, and what keeps it from being one.

Skills are written by models that have read untrusted transcripts. So each is screened before it is
tried and again before it is stored (``refusals``): its name is a plain word, its size is bounded,
and it holds no URL, no secret, no markup of a conversation and no character that cannot be seen.
The rules are ours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping

FILE = "SKILL.md"
NAME_LENGTH, DESCRIPTION_LENGTH, BODY_LENGTH = 64, 1024, 8192  # characters at most

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_HEAD = re.compile(r"\A---\n(.*?)\n---(?:\n|\Z)", re.S)
_FIELD = re.compile(r"^(name|description):[ \t]*(.*?)[ \t]*$", re.M)
_MARKUP = re.compile(r"<\|[^|>]{0,40}\|>|</?\s*(available_skills|skill|system|tool_call)\b", re.I)
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
    return f"---\nname: {self.name}\ndescription: {self.description}\n---\n{self.body}\n"

  @property
  def sha(self) -> str:
    """SHA-256 of the text, in hex."""
    return hashlib.sha256(self.text.encode()).hexdigest()


def read_skill(text: str) -> Skill:
  """Inverse of ``Skill.text``; further fields of the front matter are left out.

  Raises:
    ValueError: no front matter with a name and a description in one line each.
  """
  text = text.replace("\r\n", "\n")
  head = _HEAD.match(text)
  fields = dict(_FIELD.findall(head[1])) if head is not None else {}
  if head is None or len(fields) < 2:
    raise ValueError(
      f"begins with {text[:60]!r}; allowed: '---', 'name: ...', 'description: ...', '---', each on "
      "a line of its own, then Markdown"
    )
  return Skill(fields["name"], fields["description"], text[head.end() :].strip())


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


def unwanted(text: str) -> Iterator[str]:
  """What a text holds that no skill may hold."""
  hidden = {
    c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs")
  }
  if hidden:
    yield f"characters that cannot be seen ({', '.join(sorted(map(ascii, hidden)))})"
  # Compatibility forms, such as full-width letters, must not hide the rest from the patterns.
  plain = unicodedata.normalize("NFKC", text)
  if found := _URL.search(plain):
    yield f"an address ({found[0][:40]!r})"
  if found := _MARKUP.search(plain):
    yield f"markup of a conversation ({found[0][:40]!r})"
  yield from (what for what, pattern in _SECRETS.items() if pattern.search(plain))
