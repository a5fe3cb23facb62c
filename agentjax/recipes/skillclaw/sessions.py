"""Sessions: what agents did, from files of conversations or from stored episodes.

Conversations of a folder are untrusted: anybody may have written them. What they say reaches models
as material between marks, within the bounds below, and may lead to a proposal; only replays on
tasks of our own can publish it (``recipes.skillclaw.night``). They never count for or against
a skill. Episodes that we played ourselves are trusted as to who read which skill, and what they
earned; their text is not.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterable, Sequence

from agentjax.adapters.agent_trajectories import AgentTrajectory, TrajectoryForm, read_trajectories
from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.recipes.skillclaw.retrieval import skills_in, without_catalogue
from agentjax.recipes.skillclaw.skill import FILE
from agentjax.recipes.skillclaw.world import READ
from agentjax.rewards.judges import number_in
from agentjax.text.chat import Chat
from agentjax.tools.protocol import ToolStatus
from agentjax.trajectory.messages import message_to_json
from agentjax.trajectory.record import Message, Segment, Trajectory

FIELD, ERROR, CALLS = 400, 300, 8  # the source's: characters of a text and an error, calls a turn
MOST_TEXT = 24_000  # characters of a whole session; ours
MOST_BYTES = 64 << 20  # of a file; ours
_ENDINGS = (".jsonl", ".json", ".traj", ".jsonl.gz", ".json.gz", ".traj.gz")
_FAILED = ("error", "traceback", "exception", "fatal:")  # how a failed tool's answer begins; ours


@dataclasses.dataclass(frozen=True)
class Session:
  """One session of an agent.

  Attributes:
    name: of the session, for people.
    messages: what was said and called.
    score: 0 to 1, what it was worth by its world; None if a judge must say.
    trusted: whether we played it ourselves.
    read: names of skills whose text it read or changed; to be shown a name does not count.
    failed_tools: whether a tool failed.
  """

  name: str
  messages: tuple[Message, ...]
  score: float | None = None
  trusted: bool = False
  read: tuple[str, ...] = ()
  failed_tools: bool = False

  @property
  def sha(self) -> str:
    """Hash of all of it."""
    plain = [
      self.name,
      [message_to_json(message) for message in self.messages],
      self.score,
      self.trusted,
      self.read,
      self.failed_tools,
    ]
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_transcripts(
  folder: str | pathlib.Path, form: TrajectoryForm
) -> tuple[list[Session], list[str]]:
  """Sessions of all files of conversations in a folder and below, by name, and what was refused.

  A file that cannot be read gives the sessions before its first wrong row: one wrong file of many
  must not hold up a night.

  Raises:
    ConfigError: no such folder, or no file of conversations in it.
  """
  root = pathlib.Path(folder)
  files = sorted(p for p in root.rglob("*") if p.name.endswith(_ENDINGS) and p.is_file())
  if not files:
    raise ConfigError(
      f"--transcripts={folder!r} holds no conversations; allowed: a folder of files that end in "
      f"{', '.join(_ENDINGS)}."
    )
  found: list[Session] = []
  refused: list[str] = []
  for file in files:
    if file.is_symlink() or _is_large(file):
      refused.append(f"{file}: a link, or above {MOST_BYTES >> 20} MiB")
      continue
    try:
      for trajectory in read_trajectories(file, form):
        found.append(_from_transcript(trajectory))
    except DataError as error:
      refused.append(str(error))
  return found, refused


def _is_large(file: pathlib.Path) -> bool:
  """Whether a file holds more than ``MOST_BYTES``, unpacked."""
  if not file.name.endswith(".gz"):
    return file.stat().st_size > MOST_BYTES
  size = 0
  try:
    with gzip.open(file, "rb") as stream:
      while size <= MOST_BYTES and (part := stream.read(1 << 20)):
        size += len(part)
  except (OSError, EOFError, zlib.error):
    return False  # the reader says what is wrong
  return size > MOST_BYTES


def _from_transcript(trajectory: AgentTrajectory) -> Session:
  reward = number_in(trajectory.metadata.get("reward"), 0, 1)
  messages = trajectory.messages
  failed = any(m.role == "tool" and _looks_failed(m.content) for m in messages)
  return Session(
    trajectory.name[:200],
    messages,
    reward,
    read=tuple(sorted(_skills_read(messages))),
    failed_tools=failed,
  )


def sessions_of_episodes(episodes: Iterable[Trajectory], chat: Chat) -> list[Session]:
  """Sessions of episodes that we played and stored; those without a verdict are left out.

  Args:
    episodes: of one agent each.
    chat: of the policy that played them.
  """
  found = []
  for episode in episodes:
    if episode.status.masked or episode.reward.value is None:
      continue
    messages = tuple(m for s in episode.segments if (m := _message(s, chat)) is not None)
    names = _skills_read(messages)
    if messages and messages[0].role in ("system", "user"):
      names.update(skills_in(messages[0].content)[1])
      first = Message(messages[0].role, without_catalogue(messages[0].content))
      messages = (first, *messages[1:])
    names.update(
      str(tool.arguments.get("name"))
      for tool in episode.tools
      if tool.name == READ and tool.status == ToolStatus.OK
    )
    found.append(
      Session(
        f"{episode.source}, step {episode.step}, task {episode.task_id}, sample {episode.sample}",
        messages,
        min(1.0, max(0.0, episode.reward.value)),
        trusted=True,
        read=tuple(sorted(names)),
        failed_tools=any(tool.status != ToolStatus.OK for tool in episode.tools),
      )
    )
  return found


def _message(segment: Segment, chat: Chat) -> Message | None:
  """What a segment says; None if it is markup alone."""
  ids = segment.token_ids.tolist()
  if segment.owner == "assistant":
    if not segment.sampled.any() and chat.reserved_ids.issuperset(ids):
      return None  # it asks for a turn
    try:
      turn = chat.parse(ids)
      text, calls = turn.text, turn.calls
    except ValueError:
      text, calls = chat.tokenizer.decode(ids), ()
    return Message("assistant", text, calls) if text or calls else None
  markup = chat.reserved_ids.union(chat.stop_ids)
  text = chat.tokenizer.decode([i for i in ids if i not in markup]).strip("\n")
  role = segment.owner if segment.owner in ("system", "user", "tool") else "user"
  return Message(role, text) if text else None


def _skills_read(messages: Sequence[Message]) -> set[str]:
  """Names of skills that calls read or change: by the tool, or by a path to their file."""
  names: set[str] = set()
  for message in messages:
    for call in message.tool_calls:
      if call.name == READ and isinstance(call.arguments.get("name"), str):
        names.add(call.arguments["name"])
      for value in call.arguments.values():
        if isinstance(value, str) and FILE in value[:MOST_TEXT]:
          before = value[:MOST_TEXT].replace("\\", "/").split(f"/{FILE}")[:-1]
          names.update(part.rsplit("/", 1)[-1].strip("\"' ") for part in before)
  return {name[:80] for name in names if name}


def _looks_failed(text: str) -> bool:
  return text.lstrip()[:40].lower().startswith(_FAILED)


def session_text(session: Session) -> str:
  """The session in words: a function of the session alone, within the bounds of the source."""
  lines = [] if session.score is None else [f"score {session.score:.2f} (0 to 1, by its world)"]
  if session.read:
    lines.append(f"skills read: {', '.join(session.read)}")
  for message in session.messages:
    failed = message.role == "tool" and _looks_failed(message.content)
    clipped = _clip(message.content, ERROR if failed else FIELD)
    lines.append(f"{message.role}: {clipped}" if clipped else f"{message.role}:")
    for call in message.tool_calls[:CALLS]:
      arguments = json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
      lines.append(f"  calls {_clip(call.name, 80)} {_clip(arguments, FIELD)}")
    if len(message.tool_calls) > CALLS:
      lines.append(f"  and {len(message.tool_calls) - CALLS} calls more")
  text = "\n".join(lines)
  if len(text) <= MOST_TEXT:
    return text
  half = MOST_TEXT // 2
  return f"{text[:half]}\n[...]\n{text[-half:]}"


def _clip(text: str, most: int) -> str:
  text = text.encode("utf-8", "replace").decode()
  return text if len(text) <= most else f"{text[:most]}..."
