"""A folder of skills with their history.

  manifest.json                       what is published, in which version; the one commit point
  skills/NAME/history/vN.md           every version; vN_evidence.md says why it was published
  skills/NAME/history/vN_withdrawn.md says why it was withdrawn
  skills/NAME/SKILL.md                a copy of the published version, for agents that read files

A version is written first, then the manifest, which is replaced at once, then the copy. A process
that dies in between leaves a version that the manifest does not name: it is not published, and the
next one takes its place. ``Library.writing`` mends the copies. A reader trusts the manifest and the
hash in it, never a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.files import held, write_atomically
from agentjax.recipes.skillclaw.skill import (
  FILE,
  Skill,
  bundle_hash,
  is_name,
  read_skill,
  refusals,
  skill_id,
)

MANIFEST = "manifest.json"
MOST_HISTORY = 20  # entries of a skill that are kept
_FORMAT = 1
_LOCK = ".lock"


@dataclasses.dataclass(frozen=True)
class Entry:
  """A published skill.

  Attributes:
    skill: its text.
    version: from 1 on.
    shown: own episodes that read it. positive: those of them that succeeded.
  """

  skill: Skill
  version: int = 0
  shown: int = 0
  positive: int = 0

  @property
  def name(self) -> str:
    return self.skill.name

  @property
  def effectiveness(self) -> float:
    """Share of the episodes that succeeded; .5 where it was never shown."""
    return self.positive / self.shown if self.shown else 0.5


Entries = tuple[Entry, ...]  # by name


def with_skill(entries: Entries, skill: Skill) -> Entries:
  """The entries with a new skill, in the place of the one of its name if there is one."""
  return tuple(sorted((*without(entries, skill.name), Entry(skill)), key=lambda e: e.name))


def without(entries: Entries, name: str) -> Entries:
  """The entries but one."""
  return tuple(entry for entry in entries if entry.name != name)


def digest(entries: Entries) -> str:
  """Hash of what the skills say, as one bundle."""
  return bundle_hash({f"{e.name}/{FILE}": e.skill.text.encode() for e in entries})


@dataclasses.dataclass(frozen=True)
class Change:
  """A line of a skill's history.

  Attributes:
    action: "publish" or "withdraw".
    version: of the skill.
    content_sha: of its text.
    source: what made the change, such as "night_003/edit/2"; a source changes a skill once.
  """

  action: Literal["publish", "withdraw"]
  version: int
  content_sha: str
  source: str


@dataclasses.dataclass(frozen=True)
class Record:
  """What the manifest says of a skill; ``history`` has the newest change last."""

  status: Literal["published", "withdrawn"]
  history: tuple[Change, ...]
  shown: int = 0
  positive: int = 0

  @property
  def latest(self) -> Change:
    return self.history[-1]

  def after(self, change: Change) -> Record:
    """The record with a change. A new version has not been shown yet."""
    published = change.action == "publish"
    return Record(
      "published" if published else "withdrawn",
      (*self.history, change)[-MOST_HISTORY:],
      0 if published else self.shown,
      0 if published else self.positive,
    )


class Library:
  """The folder of a library; see the module.

  Args:
    path: a new or an empty folder, or one of an earlier call.

  Raises:
    DataError: its manifest cannot be read.
    ConfigError: it holds other files.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path)
    self._locked = False
    manifest = self.path / MANIFEST
    if not manifest.exists() and (self.path / "skills").exists():
      # A first publication died before its commit; what it wrote is in history folders alone.
      strays = [p for p in (self.path / "skills").glob("*/*") if p.name != "history"]
      if strays:
        raise ConfigError(
          f"{self.path} holds skills and no {MANIFEST}; allowed: a new or an empty folder, or a "
          "library. Take skills of another folder in with --add=FOLDER."
        )
    self._read()

  # Reading.

  def _read(self) -> None:
    file = self.path / MANIFEST
    self.records: dict[str, Record] = {}
    self._counted: tuple[str, ...] = ()
    if not file.exists():
      return
    try:
      values = json.loads(file.read_text())
      if values["format"] != _FORMAT:
        raise ValueError(f"format {values['format']!r}; this version reads {_FORMAT}")
      for name, record in values["skills"].items():
        if not is_name(name) or not record["history"]:
          raise ValueError(f"skill {name!r} has no name for a folder, or no history")
        history = tuple(Change(**change) for change in record["history"])
        self.records[name] = Record(
          record["status"], history, int(record["shown"]), int(record["positive"])
        )
      self._counted = tuple(values["counted"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      raise DataError(f"is no manifest of a library ({error})", file) from error

  def entries(self) -> Entries:
    """The published skills, by name."""
    return tuple(
      Entry(self.skill(name), record.latest.version, record.shown, record.positive)
      for name, record in sorted(self.records.items())
      if record.status == "published"
    )

  def skill(self, name: str, version: int | None = None) -> Skill:
    """A version of a skill; None is its newest.

    Raises:
      ConfigError: there is none.
      DataError: its file is not what was published.
    """
    history = self.records[name].history if name in self.records else ()
    change = next((c for c in reversed(history) if version in (None, c.version)), None)
    if change is None:
      raise ConfigError(
        f"{self.path} has no version {version} of {name!r}; allowed: "
        + (", ".join(sorted(self.records)) or "none, it is empty")
      )
    file = self._version(name, change.version)
    try:
      skill = read_skill(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
      raise DataError(f"cannot be read as a skill ({error})", file) from error
    if skill.sha != change.content_sha or skill.name != name:
      raise DataError(f"was changed after it was published; its hash is {skill.sha}", file)
    return skill

  def made_by(self, source: str) -> tuple[str, Change] | None:
    """The change of a source, with the skill's name; None where there is none yet."""
    for name, record in self.records.items():
      for change in record.history:
        if change.source == source:
          return name, change
    return None

  def counted(self, source: str) -> bool:
    """Whether the episodes of a source are in the counts."""
    return source in self._counted

  # Writing.

  @contextlib.contextmanager
  def writing(self) -> Iterator[None]:
    """Holds the library for this process, and mends what one that died left.

    Raises:
      ConfigError: another process holds it.
    """
    self.path.mkdir(parents=True, exist_ok=True)
    refusal = ConfigError(
      f"--library={self.path} is in use by another process; stop it or give another folder."
    )
    with held(self.path / _LOCK, refusal):
      self._read()
      for name in self.records:
        self._copy(name)
      self._locked = True
      try:
        yield
      finally:
        self._locked = False

  def publish(self, skill: Skill, *, source: str, evidence: Mapping[str, Any]) -> Change:
    """Makes a skill the published version of its name; a source that did so before does nothing.

    Args:
      skill: screened here once more.
      source: of the change.
      evidence: plain JSON, why.

    Raises:
      ValueError: a skill that must not be stored.
    """
    if (made := self.made_by(source)) is not None:
      return made[1]
    if reasons := refusals(skill):
      raise ValueError(f"skill {skill.name[:80]!r} has {'; '.join(reasons)}")
    old = self.records.get(skill.name)
    version = 1 + max((c.version for c in old.history), default=0) if old else 1
    change = Change("publish", version, skill.sha, source)
    write_atomically(self._version(skill.name, version), skill.text)
    self._write_reason(skill.name, f"v{version}_evidence.md", change, evidence)
    record = (old or Record("withdrawn", ())).after(change)
    self._commit({**self.records, skill.name: record}, self._counted)
    self._copy(skill.name)
    return change

  def withdraw(self, name: str, *, source: str, evidence: Mapping[str, Any]) -> Change:
    """Takes a published skill out of use; its history stays."""
    if (made := self.made_by(source)) is not None:
      return made[1]
    record = self.records.get(name)
    if record is None or record.status != "published":
      raise ConfigError(f"{self.path} has published no {name!r}; nothing can be withdrawn.")
    change = dataclasses.replace(record.latest, action="withdraw", source=source)
    self._write_reason(name, f"v{change.version}_withdrawn.md", change, evidence)
    self._commit({**self.records, name: record.after(change)}, self._counted)
    self._copy(name)
    return change

  def count(self, source: str, outcomes: Sequence[tuple[Sequence[str], bool]]) -> None:
    """Counts episodes once a source.

    Args:
      source: of the episodes.
      outcomes: the published skills that each one read, and whether it succeeded.
    """
    if not outcomes or self.counted(source):
      return
    records = dict(self.records)
    for names, positive in outcomes:
      for name in set(names) & records.keys():
        old = records[name]
        records[name] = dataclasses.replace(
          old, shown=old.shown + 1, positive=old.positive + positive
        )
    self._commit(records, (*self._counted, source))

  def _commit(self, records: Mapping[str, Record], counted: tuple[str, ...]) -> None:
    if not self._locked:
      raise RuntimeError("a library changes within Library.writing() only")
    skills = {
      name: {
        "id": skill_id(name),
        "version": record.latest.version,
        "content_sha": record.latest.content_sha,
        **dataclasses.asdict(record),
      }
      for name, record in sorted(records.items())
    }
    values = {"format": _FORMAT, "skills": skills, "counted": list(counted)}
    write_atomically(self.path / MANIFEST, json.dumps(values, indent=1) + "\n")
    self.records, self._counted = dict(records), counted

  def _copy(self, name: str) -> None:
    """Makes the copy of a skill agree with the manifest."""
    copy, record = self._folder(name) / FILE, self.records[name]
    if record.status == "withdrawn":
      copy.unlink(missing_ok=True)
      return
    text = self.skill(name).text
    if not copy.exists() or copy.read_bytes() != text.encode():
      write_atomically(copy, text)

  def _write_reason(
    self, name: str, file: str, change: Change, evidence: Mapping[str, Any]
  ) -> None:
    shown = json.dumps(dict(evidence), indent=1, ensure_ascii=False)
    text = f"# {change.action} {name}, version {change.version}\n\n{change.source}\n\n{shown}\n"
    write_atomically(self._folder(name) / "history" / file, text.encode("utf-8", "replace"))

  def _folder(self, name: str) -> pathlib.Path:
    if not is_name(name):
      raise ValueError(f"{name!r} is no name of a skill, and so of no folder")
    return self.path / "skills" / name

  def _version(self, name: str, version: int) -> pathlib.Path:
    return self._folder(name) / "history" / f"v{version}.md"


def read_folder(path: str | os.PathLike[str]) -> list[Skill]:
  """The skills of a folder: every FOLDER/NAME/SKILL.md, or FOLDER/SKILL.md.

  Raises:
    DataError: there is none, one cannot be read, or one must not be stored.
  """
  root = pathlib.Path(path)
  files = sorted(f for f in (root / FILE, *root.glob(f"*/{FILE}")) if f.is_file())
  if not files:
    raise DataError(f"holds no {FILE} and no NAME/{FILE}", root)
  found = []
  for file in files:
    try:
      skill = read_skill(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
      raise DataError(f"cannot be read as a skill: {error}", file) from error
    if reasons := refusals(skill):
      raise DataError(f"cannot be stored: {'; '.join(reasons)}", file)
    found.append(skill)
  return found


def add(library: Library, skills: Sequence[Skill]) -> None:
  """Publishes skills by hand, without a replay; those that are published already stay."""
  present = {entry.name: entry.skill for entry in library.entries()}
  for skill in skills:
    if present.get(skill.name) != skill:
      library.publish(skill, source=by_hand(), evidence={})


def by_hand() -> str:
  """The source of a change that a person makes."""
  return f"hand/{uuid.uuid4().hex[:12]}"
