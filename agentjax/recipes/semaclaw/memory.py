"""Memory beyond the window: daily notes in Markdown that are searched, and a list of what matters.

A memory is written to the note of its day and to ``memories.json``. That list holds at most 100;
the one with the least ``hits / (days since it was used + 1)`` goes. Notes stay. A search finds
chunks of notes by their words (BM25 of SQLite's FTS5) and counts as a use of the memories in them.
Chinese, Japanese and Korean are searched by pairs of characters, as their words have no fixed ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import pathlib
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentjax.config import FilePath, PositiveInt, check
from agentjax.faults import describe
from agentjax.files import write_atomically
from agentjax.recipes.semaclaw.folders import held
from agentjax.tools.config import ToolConfig, Workbench
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus

MEMORIES = "memories.json"
_LONGEST = 2000  # characters of one memory; ours
_NOTE = re.compile(r"\d{4}-\d{2}-\d{2}\.md")
_WORD = re.compile(r"\w+")
_MOST_WORDS = 32  # of a query; ours
# Kana, Hangul and ideographs with their marks of repetition.
_CJK = (
  "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
  "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_CHARACTER = re.compile(f"[{_CJK}]")
_RUN = re.compile(f"[{_CJK}]+|[^{_CJK}]+")


@dataclasses.dataclass(unsafe_hash=True)
class MemoryConfig(ToolConfig):
  """Settings of the tool "memory".

  Attributes:
    folder: of notes and list.
    most: memories in the list; 100 in the source.
    chunk_words, overlap_words: of a chunk that is searched; 400 and 80 tokens in the source.
    shown: chunks that a search shows; ours.
  """

  folder: FilePath = ""
  most: PositiveInt = 100
  chunk_words: PositiveInt = 400
  overlap_words: PositiveInt = 80
  shown: PositiveInt = 3

  def validate(self, path: str = "config.tools.settings.memory") -> None:
    super().validate(path)
    shorter = self.overlap_words < self.chunk_words
    check(shorter, f"{path}.overlap_words", self.overlap_words, "less than chunk_words")

  def check_run(self, bench: Workbench, path: str) -> None:
    check(bool(self.folder), f"{path}.folder", self.folder, "a folder for what is remembered")

  def build(self, bench: Workbench) -> Tool:
    return MemoryTool(Memory(self))


class Memory:
  """The memory of a folder.

  Args:
    config: validated.
    today: the day.
  """

  def __init__(
    self, config: MemoryConfig, today: Callable[[], datetime.date] = datetime.date.today
  ):
    self._config, self._today = config, today

  def save(self, text: str) -> None:
    """Remembers a text.

    Raises:
      ValueError: an empty one, or one that is too long.
    """
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    if not 0 < len(text) <= _LONGEST:
      raise ValueError(f"a memory of {len(text)} characters; allowed: 1 to {_LONGEST}")
    day = self._today().isoformat()
    with held(self._config.folder) as folder:
      note = folder / f"{day}.md"
      listed = _read(folder)
      before = note.read_bytes() if note.exists() else f"# {day}\n".encode()
      write_atomically(note, before + f"\n- {text}\n".encode())
      known = [memory for memory in listed if memory["text"] != text]
      hits = 1 + sum(memory["hits"] for memory in listed if memory["text"] == text)
      known = sorted(known, key=self._retention, reverse=True)[: self._config.most - 1]
      _write(folder, [*known, {"text": text, "used": day, "hits": hits}])

  def search(self, query: str) -> list[str]:
    """The chunks that fit a query best, each with its day; [] for none."""
    words = list(dict.fromkeys(_words(query)))[:_MOST_WORDS]
    if not words:
      return []
    with held(self._config.folder) as folder:
      found = self._find(folder, words)
      known, day = _read(folder), self._today().isoformat()
      used = [m for m in known if any(m["text"] in chunk for chunk in found)]
      if used:
        for memory in used:
          memory["hits"], memory["used"] = memory["hits"] + 1, day
        _write(folder, known)
    return found

  def _find(self, folder: pathlib.Path, words: Sequence[str]) -> list[str]:
    asked = " OR ".join(f'"{word}"' for word in words)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
      # FTS5 takes a run of letters as one word, so the index holds the text with blanks in runs.
      columns = "day UNINDEXED, text UNINDEXED, words"
      database.execute(f"CREATE VIRTUAL TABLE notes USING fts5({columns})")
      database.executemany(
        "INSERT INTO notes VALUES (?, ?, ?)",
        ((day, text, _spaced(text)) for day, text in self._chunks(folder)),
      )
      rows = database.execute(
        "SELECT day, text FROM notes WHERE notes MATCH ? ORDER BY rank, day DESC LIMIT ?",
        (asked, self._config.shown),
      )
      return [f"{day}: {text}" for day, text in rows]

  def _chunks(self, folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    step = self._config.chunk_words - self._config.overlap_words
    for note in sorted(folder.iterdir()):
      if not _NOTE.fullmatch(note.name) or note.is_symlink():
        continue
      lines = note.read_text("utf-8", "replace").splitlines()[1:]
      words = " ".join(line.removeprefix("- ") for line in lines if line.strip()).split(" ")
      for start in range(0, max(1, len(words) - self._config.overlap_words), step):
        yield note.stem, " ".join(words[start : start + self._config.chunk_words])

  def _retention(self, memory: Mapping[str, Any]) -> float:
    days = (self._today() - datetime.date.fromisoformat(memory["used"])).days
    return memory["hits"] / (max(days, 0) + 1)


def _words(query: str) -> Iterator[str]:
  """Words and phrases to search for, in lower case."""
  for word in _WORD.findall(query.lower()):
    for run in _RUN.findall(word):
      if _CHARACTER.match(run) and len(run) > 1:
        # A whole run is a sentence, of which a note need not hold all.
        yield from (" ".join(run[i : i + 2]) for i in range(len(run) - 1))
      else:
        yield run


def _spaced(text: str) -> str:
  """The text with blanks around each character of a script that has none between words."""
  return _CHARACTER.sub(r" \g<0> ", text)


def _read(folder: pathlib.Path) -> list[dict[str, Any]]:
  path = folder / MEMORIES
  if not path.exists():
    return []
  try:
    listed = json.loads(path.read_bytes())
    if not isinstance(listed, list):
      raise ValueError(f"it holds a {type(listed).__name__}")
    for memory in listed:
      _check(memory)
  except (RecursionError, ValueError) as error:
    # Not the fault of whoever saves or searches, as a ValueError would be.
    raise RuntimeError(
      f"{path} is no list of memories: {describe(error)}. Mend it, or remove it: the notes stay."
    ) from error
  return listed


def _check(memory: Any) -> None:
  """Raises ValueError unless it is a memory."""
  if not isinstance(memory, dict) or not {"text", "used", "hits"} <= set(memory):
    raise ValueError(f"{str(memory)[:80]!r} is no memory")
  text, used, hits = memory["text"], memory["used"], memory["hits"]
  if not isinstance(text, str) or not isinstance(used, str) or not isinstance(hits, int):
    raise ValueError(f"{str(memory)[:80]!r} is no memory")
  datetime.date.fromisoformat(used)


def _write(folder: pathlib.Path, memories: Sequence[Mapping[str, Any]]) -> None:
  write_atomically(folder / MEMORIES, json.dumps(memories, indent=1, ensure_ascii=False) + "\n")


class MemoryTool:
  """Saves and searches memories.

  Args:
    memory: what is remembered.
  """

  name = "memory"
  description = "Saves a short text for later conversations, or searches what was saved."
  parameters: Mapping[str, Any] = {
    "type": "object",
    "properties": {
      "action": {"enum": ["save", "search"]},
      "text": {"type": "string", "description": "to save, or words to search for"},
    },
    "required": ["action", "text"],
    "additionalProperties": False,  # or what a rule looks for could stand in one
  }

  def __init__(self, memory: Memory):
    self._memory = memory

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    del context
    text = str(arguments["text"])
    if arguments["action"] == "save":
      try:
        await asyncio.to_thread(self._memory.save, text)
      except ValueError as error:
        return ToolResult(ToolStatus.ERROR, f"error: {error}")
      return ToolResult(ToolStatus.OK, "saved")
    found = await asyncio.to_thread(self._memory.search, text)
    return ToolResult(ToolStatus.OK, "\n".join(found) or "nothing found")
