"""A night: what sessions say becomes skills that replays have proved.

  count -> withdraw -> aggregate -> summarise -> judge -> execute -> verify -> replay -> publish

* *Count.* Own episodes are counted for the skills that they read: how many, and how many succeeded.
* *Withdraw* (ours). A skill that was read often and has rarely served is replayed without. It goes
  unless the replays are worse without it.
* *Aggregate.* A session joins the group of each published skill that it read, or the group of those
  that read none. Of a large group some are looked at.
* *Summarise, judge.* A text of each of them, a causal summary, and a grade where the world gave
  none.
* *Execute.* The writer proposes one edit a group, or none. A proposal whose name is taken is merged
  with the skill of that name, as it is when its turn comes.
* *Verify.* The proposal is screened (``skill.refusals``), then graded by four criteria, each of
  which must reach ``verify_least``.
* *Replay.* Held-out tasks of our own are played with the present library and with the proposal, by
  the same draws. It passes with a mean of at least ``accept`` that is above the present mean, by
  ``gain`` or more: a proposal that changes nothing has shown nothing. (The source publishes ties.
  ``ties`` does so too, but only if all sessions of the group are episodes that we played.)
* *Publish.* Nothing else writes skills.

So what a transcript says can at most cost a replay. What replays cannot show, such as harm that no
task of ours measures, ``publish="propose"`` leaves to people.

Everything is a row in a file of the night's folder before the next thing begins, and every change
of the library carries the name of what made it. A night that died goes on where it was, and comes
to the same library.

Reference: 2604.08377 and its code, which has up to 30 sessions a group, temperatures of .2, .4 and
.3 for summaries, edits and merges, 8192 tokens, .75 for verification and replays, 3 cases, and one
approval or rejection. Its "direct" publication, without a replay, is left out.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from agentjax.config import (
  Config,
  ConfigError,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveInt,
  Share,
)
from agentjax.data.synthesis_folder import (
  Report,
  Row,
  RowFile,
  claim,
  fill,
  unreported,
)
from agentjax.files import write_atomically
from agentjax.recipes.skillclaw.library import Entries, Library, digest, with_skill, without
from agentjax.recipes.skillclaw.models import (
  NO_SKILL,
  Edit,
  Evidence,
  SkillModels,
  as_json,
  from_json,
)
from agentjax.recipes.skillclaw.retrieval import RetrievalConfig
from agentjax.recipes.skillclaw.sessions import Session, session_text
from agentjax.recipes.skillclaw.skill import Skill, refusals
from agentjax.rewards.judges import question_key

SUMMARIES, EDITS, REPLAYS = "summaries.jsonl", "edits.jsonl", "replays.jsonl"
WITHDRAWALS, DECISIONS = "withdrawals.jsonl", "decisions.jsonl"
START, REPORT = "start.json", "report.json"
_ROWS = (SUMMARIES, EDITS, REPLAYS, WITHDRAWALS, DECISIONS)
_EPSILON = 1e-9  # means are multiples of 1 / n: a difference of rounding must not decide


@dataclasses.dataclass(unsafe_hash=True)
class SkillClawConfig(Config):
  """Settings of a night; those without "ours" are the source's.

  Attributes:
    most_sessions: of a night; further ones are left out. Ours.
    group_sessions: of one edit, at most.
    summary_temperature, edit_temperature, merge_temperature: of the writer.
    judge_temperature: of grades and checks. Ours.
    edit_tokens: of an edit or a merge, at most. reply_tokens: of every other reply; ours.
    verify: whether proposals are graded before they are replayed.
    verify_least: each of the four grades of a proposal must be at least this.
    publish: "validated" publishes what replays have proved; "propose" publishes nothing, and leaves
      the proposals in ``decisions.jsonl``. Ours; the source's "direct" is left out.
    cases: held-out tasks of a replay. samples: episodes a task; ours.
    accept: mean reward of a replay, at least.
    gain: over the present mean, at least. The source has 0.
    ties: whether a proposal with exactly the present mean passes, as in the source, if its sessions
      are all our own; never from sessions of others. Ours.
    withdraw_after: episodes that must have read a skill before it may be withdrawn; 0 never
      withdraws. Ours.
    withdraw_below: a skill with a lower share of successes is replayed without. Ours.
    success: an episode succeeds with at least this reward. Ours.
    retrieval: which skills a task is shown.
    concurrency: questions at once. Ours.
  """

  most_sessions: PositiveInt = 1000
  group_sessions: PositiveInt = 30
  summary_temperature: NonNegativeFloat = 0.2
  edit_temperature: NonNegativeFloat = 0.4
  merge_temperature: NonNegativeFloat = 0.3
  judge_temperature: NonNegativeFloat = 0.0
  edit_tokens: PositiveInt = 8192
  reply_tokens: PositiveInt = 1024
  verify: bool = True
  verify_least: Share = 0.75
  publish: Literal["validated", "propose"] = "validated"
  cases: PositiveInt = 3
  samples: PositiveInt = 1
  accept: Share = 0.75
  gain: Share = 0.0
  ties: bool = False
  withdraw_after: NonNegativeInt = 20
  withdraw_below: Share = 0.5
  success: Share = 0.75
  retrieval: RetrievalConfig = dataclasses.field(default_factory=RetrievalConfig)
  concurrency: PositiveInt = 16


class _Item(NamedTuple):
  """What a row is made for."""

  id: int


class Began(NamedTuple):
  """A skill as the night began, with the day's episodes counted."""

  version: int
  shown: int
  positive: int


class Replay(Protocol):
  """Plays held-out tasks with a library."""

  async def __call__(self, entries: Entries) -> Sequence[float | None]:
    """The mean reward of each case, None without a verdict; the same skills give the same."""
    ...


@dataclasses.dataclass(frozen=True)
class NightReport:
  """What came of a night.

  Attributes:
    skills: published as the night began, with their versions.
    sessions, groups: of the night.
    withdrawn, published, proposed, refused, skipped: skills by name, or groups for the last two.
    reasons: why proposals were refused, by group.
  """

  skills: tuple[str, ...]
  sessions: int
  groups: int
  withdrawn: tuple[str, ...] = ()
  published: tuple[str, ...] = ()
  proposed: tuple[str, ...] = ()
  refused: tuple[str, ...] = ()
  skipped: tuple[str, ...] = ()
  reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Night:
  """One night over a library, in a folder; see the module.

  Args:
    folder: new, or of a night that was stopped.
    name: of the night in the history of the library; a hash of what it was made of is added.
    library: held by ``Library.writing``.
    sessions: of the day, in a fixed order.
    models: who is asked.
    replay: plays with libraries; None only with ``publish="propose"``.
    config: validated.
    key: of all randomness.
    made_with: plain JSON that names the models and the tasks.
    report: called with what is done.

  Raises:
    ConfigError: the folder was made with other settings or sessions.
    DataError: its files are damaged.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    name: str,
    library: Library,
    sessions: Sequence[Session],
    models: SkillModels,
    replay: Replay | None,
    config: SkillClawConfig,
    *,
    key: int,
    made_with: Mapping[str, Any],
    report: Report = unreported,
  ):
    config.validate("skills")
    if replay is None and config.publish != "propose":
      raise ConfigError(
        f"skills.publish={config.publish!r} without tasks to replay; allowed: 'propose', or a "
        "config with tasks and a player."
      )
    self._library, self._models, self._replay = library, models, replay
    self._config, self._report = config, report
    self._key = question_key(key, name)  # of all draws: they do not depend on settings
    self._sessions = list(sessions)[: config.most_sessions]
    settings = config.to_dict()
    del settings["concurrency"]
    made = {
      "skills": settings,
      "key": key,
      "sessions": question_key(*(session.sha for session in self._sessions)),
      **made_with,
    }
    self._folder = claim(folder, made, (*_ROWS, START))
    # The same night in another folder has the same name, and changes a library only once.
    self._name = f"{name}-{question_key(json.dumps(made, sort_keys=True)):016x}"
    kinds: Mapping[str, Mapping[str, type]] = {
      SUMMARIES: {"session": str, "summary": str},
      EDITS: {"group": str, "edit": dict, "sessions": list},
      REPLAYS: {"library": str, "rewards": list},
      WITHDRAWALS: {"name": str, "withdrawn": bool},
      DECISIONS: {"group": str, "verdict": str, "reasons": list},
    }
    self._rows = {file: RowFile(self._folder / file, kinds[file]) for file in _ROWS}

  async def run(self) -> NightReport:
    """Goes through the night, from where it was stopped."""
    start = self._started()
    await self._withdraw(start)
    gone = {row["name"] for row in self._rows[WITHDRAWALS].rows.values() if row["withdrawn"]}
    skills = {n: self._library.skill(n, b.version) for n, b in start.items() if n not in gone}
    groups = self._groups(skills)
    await self._summarise(sorted({number for shown in groups.values() for number in shown}))
    await self._execute(groups, skills)
    await self._decide(skills)
    return self._finish(start, gone, len(groups))

  # ---------------------------------------------------------------------------- counts

  def _started(self) -> dict[str, Began]:
    """Version and counts of each skill as the night began, with the day's episodes."""
    file = self._folder / START
    if not file.exists():
      published = {entry.name for entry in self._library.entries()}
      self._library.count(
        f"{self._name}/day",
        [
          ([n for n in s.read if n in published], (s.score or 0.0) >= self._config.success)
          for s in self._sessions
          if s.trusted and s.score is not None
        ],
      )
      entries = self._library.entries()
      values = {e.name: (e.version, e.shown, e.positive) for e in entries}
      write_atomically(file, json.dumps(values, indent=1) + "\n")
    return {name: Began(*value) for name, value in json.loads(file.read_text()).items()}

  async def _withdraw(self, start: Mapping[str, Began]) -> None:
    config, rows = self._config, self._rows[WITHDRAWALS]
    suspects = [
      name
      for name, began in sorted(start.items())
      if config.withdraw_after
      and began.shown >= config.withdraw_after
      and began.positive < config.withdraw_below * began.shown
    ]
    for number, name in enumerate(suspects if config.publish == "validated" else ()):
      source = f"{self._name}/withdraw/{number}"
      if number in rows.rows:
        continue
      row: Row = {"id": number, "name": name, "withdrawn": True}
      if self._library.made_by(source) is None:
        entries = self._library.entries()
        present, apart = await self._compare(entries, without(entries, name))
        row |= {"with": present, "without": apart}
        # No verdict keeps a skill: it says nothing against it.
        row["withdrawn"] = present is not None and apart is not None and apart >= present - _EPSILON
        if row["withdrawn"]:
          self._library.withdraw(name, source=source, evidence=row)
      rows.append(row)

  # ---------------------------------------------------------------------------- sessions

  async def _summarise(self, shown: Sequence[int]) -> None:
    rows = self._rows[SUMMARIES]

    async def work(item: _Item) -> None:
      number = item.id
      session = self._sessions[number]
      text, key = session_text(session), question_key(self._key, "session", number)
      summary = await self._models.summary(text, question_key(key, "summary"))
      score = session.score
      if score is None:
        score = await self._models.score(text, question_key(key, "grade"))
      rows.append({"id": number, "session": session.sha, "summary": summary, "score": score})

    await self._fill(rows, shown, work, "sessions")

  async def _fill(
    self, rows: RowFile, numbers: Iterable[int], work: Callable[[_Item], Awaitable[None]], what: str
  ) -> None:
    """Makes the rows of these numbers that are not there yet."""
    items, most = map(_Item, numbers), self._config.concurrency
    await fill([rows], items, work, what=what, report=self._report, concurrency=most)

  def _groups(self, skills: Mapping[str, Skill]) -> dict[str, list[int]]:
    """Sessions by the skill that they read, or NO_SKILL; of too many some, chosen by the key."""
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for number, session in enumerate(self._sessions):
      for name in [n for n in session.read if n in skills] or [NO_SKILL]:
        groups[name].append(number)

    def some(name: str) -> list[int]:
      order = sorted(groups[name], key=lambda n: question_key(self._key, name, n))
      return sorted(order[: self._config.group_sessions])

    return {name: some(name) for name in sorted(groups)}

  def _evidence(self, numbers: Sequence[int]) -> list[Evidence]:
    rows = self._rows[SUMMARIES].rows
    return [
      Evidence(rows[i]["summary"], rows[i]["score"], session_text(self._sessions[i]))
      for i in numbers
    ]

  # ---------------------------------------------------------------------------- edits

  async def _execute(
    self, groups: Mapping[str, Sequence[int]], skills: Mapping[str, Skill]
  ) -> None:
    rows = self._rows[EDITS]
    names = list(groups)

    async def work(item: _Item) -> None:
      name = names[item.id]
      shown = list(groups[name])
      key = question_key(self._key, "edit", name)
      edit = await self._models.edit(skills.get(name), self._evidence(shown), key)
      edit = await self._merged(edit, skills, question_key(key, "merge"))
      rows.append({"id": item.id, "group": name, "edit": as_json(edit), "sessions": shown})

    await self._fill(rows, range(len(names)), work, "groups")

  async def _merged(self, edit: Edit, skills: Mapping[str, Skill], key: int) -> Edit:
    """The edit; a new skill whose name is taken is merged with that of the name."""
    proposed = edit.skill
    if proposed is None or edit.action != "create_skill" or proposed.name not in skills:
      return edit
    both = await self._models.merged(skills[proposed.name], proposed, key)
    if both is None:
      return dataclasses.replace(
        edit, action="skip", skill=None, reason=f"{proposed.name!r} is taken, and was not merged"
      )
    return dataclasses.replace(edit, skill=both)

  # ---------------------------------------------------------------------------- decisions

  async def _decide(self, skills: Mapping[str, Skill]) -> None:
    """One edit after the other, each over what the ones before it have left."""
    edits, rows = self._rows[EDITS].rows, self._rows[DECISIONS]
    for number in sorted(edits):
      if number in rows.rows:
        continue
      row = {"id": number, "group": edits[number]["group"], "verdict": "published", "reasons": []}
      source = f"{self._name}/edit/{number}"
      edit = from_json(edits[number]["edit"])
      if edit.skill is not None:
        row["name"] = edit.skill.name
      if (made := self._library.made_by(source)) is not None:
        row |= {"name": made[0], "version": made[1].version}
      else:
        row |= await self._judged(edit, edits[number], skills, source)
      rows.append(row)
      self._report("edits", len(rows.rows), len(edits))

  async def _judged(
    self,
    edit: Edit,
    row: Row,
    skills: Mapping[str, Skill],
    source: str,
  ) -> Row:
    """What becomes of an edit: verdict, reasons and figures."""
    skill = edit.skill
    if skill is None:
      return {"verdict": "skipped", "reasons": [edit.reason]}
    if reasons := refusals(skill):
      return {"verdict": "refused", "reasons": reasons}
    entries = self._library.entries()
    if digest(with_skill(entries, skill)) == digest(entries):
      return {"verdict": "skipped", "reasons": ["it changes nothing"]}
    present = next((entry.skill for entry in entries if entry.name == skill.name), None)
    if present not in (None, skills.get(skill.name)):  # an edit before this one wrote it
      both = await self._models.merged(
        present, skill, question_key(self._key, "merge", row["group"])
      )
      if both is None:
        reasons = [f"{skill.name!r} was changed in this night, and was not merged"]
        return {"verdict": "refused", "reasons": reasons}
      if reasons := refusals(both):
        return {"verdict": "refused", "reasons": reasons}
      skill = both
    found: Row = {"edit": edit.action, "cause": edit.cause, "failure": edit.failure}
    if self._config.verify:
      evidence = self._evidence(row["sessions"])
      key = question_key(self._key, "verify", row["group"])
      grades = await self._models.checked(present, skill, evidence, key)
      found["grades"] = grades
      low = [n for n, g in (grades or {}).items() if g < self._config.verify_least - _EPSILON]
      if grades is None or low:
        reason = "its check could not be read" if grades is None else f"low: {', '.join(low)}"
        return found | {"verdict": "refused", "reasons": [reason]}
    if self._config.publish == "propose":
      return found | {"verdict": "proposed", "text": skill.text}
    trusted = all(self._sessions[i].trusted for i in row["sessions"])
    failing = await self._fails(skill, entries, trusted, found)
    if failing is not None:
      return found | {"verdict": "refused", "reasons": [failing]}
    change = self._library.publish(skill, source=source, evidence={"reason": edit.reason, **found})
    return found | {"version": change.version}

  async def _fails(self, skill: Skill, entries: Entries, trusted: bool, found: Row) -> str | None:
    """Why replays do not prove a skill; None if they do. The means are added to ``found``."""
    present, proposed = await self._compare(entries, with_skill(entries, skill))
    found |= {"present": present, "proposed": proposed}
    if present is None or proposed is None:
      return "the replays have no verdict"
    if proposed < self._config.accept - _EPSILON:
      return f"mean reward {proposed:.3f} with it; accept={self._config.accept:g}"
    if proposed < present + self._config.gain - _EPSILON:
      return (
        f"mean reward {proposed:.3f} with it, {present:.3f} without; gain={self._config.gain:g}"
      )
    if proposed <= present + _EPSILON and not (self._config.ties and trusted):
      return f"mean reward {proposed:.3f} with it and without: it shows no gain"
    return None

  async def _compare(self, present: Entries, changed: Entries) -> tuple[float | None, float | None]:
    """Mean rewards with two libraries, over the cases in which both have a verdict."""
    one, other = await self._rewards(present), await self._rewards(changed)
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if not pairs:
      return None, None
    a, b = zip(*pairs, strict=True)
    return sum(a) / len(a), sum(b) / len(b)

  async def _rewards(self, entries: Entries) -> list[float | None]:
    """Rewards of the cases with a library, which is played once in a night."""
    assert self._replay is not None
    rows, name = self._rows[REPLAYS], _state(entries)
    for row in rows.rows.values():
      if row["library"] == name:
        return row["rewards"]
    rewards = list(await self._replay(entries))
    rows.append({"id": len(rows.rows), "library": name, "rewards": rewards})
    self._report("replays", len(rows.rows), len(rows.rows))
    return rewards

  # ---------------------------------------------------------------------------- report

  def _finish(self, start: Mapping[str, Began], gone: set[str], groups: int) -> NightReport:
    by: dict[str, list[str]] = collections.defaultdict(list)
    reasons: dict[str, str] = {}
    for row in self._rows[DECISIONS].rows.values():
      kept = row["verdict"] in ("published", "proposed")
      by[row["verdict"]].append(row["name"] if kept else row["group"])
      if not kept:
        reasons[row["group"]] = "; ".join(row["reasons"])
    report = NightReport(
      skills=tuple(f"{name} v{began.version}" for name, began in start.items()),
      sessions=len(self._sessions),
      groups=groups,
      withdrawn=tuple(sorted(gone)),
      published=tuple(by["published"]),
      proposed=tuple(by["proposed"]),
      refused=tuple(by["refused"]),
      skipped=tuple(by["skipped"]),
      reasons=reasons,
    )
    text = json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False)
    write_atomically(self._folder / REPORT, text.encode("utf-8", "replace") + b"\n")
    return report


def _state(entries: Entries) -> str:
  """Names skills with their counts, which retrieval depends on."""
  counts = question_key(*(f"{e.name} {e.shown} {e.positive}" for e in entries))
  return f"{digest(entries)}-{counts:016x}"
