"""What the models of a night are asked, in our words, and how their replies are read.

Each is a ``rewards.judges.Judge``: a model behind an endpoint, a policy of ours, or a function in
tests. Everything that a session says stands between marks that it cannot contain, and every model
is told that it is material. That is a help and no guarantee: a model may still do what a session
says, so nothing here publishes anything.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.faults import Boundary, fault_of
from agentjax.recipes.skillclaw.skill import Skill
from agentjax.rewards.judges import (
  Judge,
  ask,
  delimit,
  last_json_object,
  material_notice,
  nonce,
  number_in,
)
from agentjax.trajectory.record import Message

_log = logging.getLogger(__name__)

NO_SKILL = "__no_skill__"  # the group of sessions that read none
MOST_MATERIAL = 60_000  # characters of all sessions that one question shows; ours

Action = Literal["improve_skill", "optimize_description", "create_skill", "skip"]
FAILURES = (
  "SKILL_CONTENT_STALE",
  "SKILL_MISSELECT",
  "SKILL_GAP",
  "TOOL_ERROR",
  "MODEL_BASELINE",
)
GRADES = {
  "task_completion": 0.55,
  "response_quality": 0.30,
  "efficiency": 0.05,
  "tool_usage": 0.10,
}
CRITERIA = (
  "grounded_in_evidence",
  "preserves_existing_value",
  "specificity_and_reusability",
  "safe_to_publish",
)

SUMMARISE = "You summarise sessions of agents."
GRADE = "You grade sessions of agents."
EVOLVE = "You look after the skills of agents."
MERGE = "You merge skills of agents."
VERIFY = "You check changes of the skills of agents."

_ASKED_SUMMARY = (
  "Say in 8 to 15 sentences what the agent was to do, which steps it took, which of them caused "
  "the result, what went wrong and why, and what part skills and tools had in it."
)
_ASKED_GRADE = (
  "End with one JSON object, each value from 0 to 1: {"
  + ", ".join(f'"{name}": ...' for name in GRADES)
  + "}."
)
_ASKED_EVOLVE = (
  "What should change in the skills? The present text of a skill is the source of truth: keep what "
  "serves. Say for failures whether the skill, the agent or the environment caused them, and of "
  f"which kind they are ({', '.join(FAILURES)}). If you are in doubt, skip. A skill holds what "
  "helps other tasks of the kind, no names of persons, no addresses and no secrets. End with one "
  'JSON object: {"action": ACTION, "cause": "skill", "agent" or "environment", "failure": KIND, '
  '"reason": "...", "name": "lower-case-words", "description": "one line, when it helps", "body": '
  '"Markdown"}. ACTION is '
)
_ASKED_MERGE = (
  "The library has a skill of this name, and another is proposed. Write one skill that keeps what "
  'serves of both. End with one JSON object: {"description": "one line", "body": "Markdown"}.'
)
_ASKED_VERIFY = (
  "Grade the proposed change by the sessions. End with one JSON object, each value from 0 to 1: {"
  + ", ".join(f'"{name}": ...' for name in CRITERIA)
  + "}."
)


@dataclasses.dataclass(frozen=True)
class Edit:
  """What the writer proposes.

  Attributes:
    action: what to do.
    reason: in words; also why a reply could not be used, with the action "skip".
    skill: as it would be; None with "skip".
    cause: what caused failures, "skill", "agent" or "environment".
    failure: one of FAILURES, or "".
  """

  action: Action
  reason: str
  skill: Skill | None = None
  cause: str = ""
  failure: str = ""


@dataclasses.dataclass(frozen=True)
class Evidence:
  """A session as the writer sees it: its summary, its score (None if nobody could tell), its
  text."""

  summary: str
  score: float | None
  text: str


@dataclasses.dataclass(frozen=True)
class SkillModels:
  """Who is asked; one model may do all.

  Attributes:
    summarise, evolve, merge: writers.
    grade, verify: judges.
  """

  summarise: Judge
  evolve: Judge
  merge: Judge
  grade: Judge
  verify: Judge

  async def summary(self, text: str, key: int) -> str:
    """The causal summary of a session."""
    return (await _ask(self.summarise, SUMMARISE, {"session": text}, _ASKED_SUMMARY, key)).strip()

  async def score(self, text: str, key: int) -> float | None:
    """The grade of a session, 0 to 1; None if the reply cannot be read: that is no zero."""
    reply = await _ask(self.grade, GRADE, {"session": text}, _ASKED_GRADE, key)
    grades = _numbers(reply, tuple(GRADES))
    return None if grades is None else sum(GRADES[n] * g for n, g in grades.items())

  async def edit(self, skill: Skill | None, sessions: Sequence[Evidence], key: int) -> Edit:
    """What the sessions of a group say about its skill; None is the group without one."""
    actions = ["create_skill", "skip"]
    material = {} if skill is None else {"skill": skill.text}
    if skill is not None:
      actions = ["improve_skill", "optimize_description", *actions]
    material |= _shown(sessions)
    asked = _ASKED_EVOLVE + ", ".join(f'"{action}"' for action in actions) + "."
    return read_edit(await _ask(self.evolve, EVOLVE, material, asked, key), skill)

  async def merged(self, present: Skill, proposed: Skill, key: int) -> Skill | None:
    """One skill of two with one name; None if the reply cannot be read."""
    material = {"present": present.text, "proposed": proposed.text}
    found = last_json_object(await _ask(self.merge, MERGE, material, _ASKED_MERGE, key)) or {}
    description, body = found.get("description"), found.get("body")
    if not isinstance(description, str) or not isinstance(body, str):
      return None
    return Skill(present.name, description, body)

  async def checked(
    self, present: Skill | None, proposed: Skill, sessions: Sequence[Evidence], key: int
  ) -> dict[str, float] | None:
    """Grades of a change by criterion, 0 to 1; None if the reply cannot be read."""
    material = {} if present is None else {"present": present.text}
    material["proposed"] = proposed.text
    material |= _shown(sessions)
    return _numbers(await _ask(self.verify, VERIFY, material, _ASKED_VERIFY, key), CRITERIA)


def read_edit(reply: str, present: Skill | None) -> Edit:
  """The edit of a reply; one that cannot be used is "skip" with the reason.

  The name of an improved skill stays, and so does the body where only the description is to change.
  """
  found = last_json_object(reply)
  if found is None:
    return Edit("skip", "the reply has no JSON object")
  action: Any = found.get("action")
  reason = str(found.get("reason") or "")[:2000]
  cause, failure = (str(found.get(name) or "")[:40] for name in ("cause", "failure"))
  failure = failure if failure in FAILURES else ""
  allowed = ("create_skill", "skip") if present is None else get_args(Action)
  if action not in allowed:
    return Edit("skip", f"action {str(action)[:80]!r}; allowed: {', '.join(allowed)}")
  if cause not in ("skill", "agent", "environment", ""):
    return Edit("skip", f"cause {cause!r}; allowed: skill, agent, environment")
  if action == "skip":
    return Edit("skip", reason, None, cause, failure)
  name, description, body = (found.get(field) for field in ("name", "description", "body"))
  if present is not None and action != "create_skill":
    name = present.name
    body = present.body if action == "optimize_description" else body
    description = present.description if description is None else description
  if not (isinstance(name, str) and isinstance(description, str) and isinstance(body, str)):
    return Edit("skip", f"{action} without texts name, description and body")
  return Edit(action, reason, Skill(name, description, body), cause, failure)


def _shown(sessions: Sequence[Evidence]) -> dict[str, str]:
  """The sessions as material; each has the same room."""
  room, material = MOST_MATERIAL // max(len(sessions), 1), {}
  for number, session in enumerate(sessions):
    score = "unknown" if session.score is None else f"{session.score:.2f}"
    whole = f"score: {score}\nsummary: {session.summary}\n\n{session.text}"
    material[f"session_{number}"] = whole[:room]
  return material


def _numbers(reply: str, names: Sequence[str]) -> dict[str, float] | None:
  """The values of a reply's object by name; None unless all are numbers from 0 to 1."""
  found: Mapping[str, Any] = last_json_object(reply) or {}
  values = {name: number_in(found.get(name), 0, 1) for name in names}
  known = {name: value for name, value in values.items() if value is not None}
  return known if len(known) == len(names) else None


async def _ask(judge: Judge, who: str, material: Mapping[str, str], asked: str, key: int) -> str:
  """A reply about texts, which stand between marks; "" if the model refuses such a text.

  A session that is too long for a model, for instance, must not hold up all nights.
  """
  mark = nonce(key, *material.values())
  shown = "\n\n".join(delimit(name, text, mark) for name, text in material.items())
  messages = (
    Message("system", f"{who} {material_notice(mark)}"),
    Message("user", f"{shown}\n\n{asked}"),
  )
  try:
    return await ask(judge, messages, key=key)
  except (JudgeRefusedError, ValueError) as error:
    fault = fault_of(error, Boundary.VERDICT)
    if fault.masks:
      raise
    _log.warning("%s No reply about a text of %d characters: %s", who, len(shown), fault.detail)
    return ""


def as_json(edit: Edit) -> dict[str, Any]:
  """An edit as a row holds it."""
  return dataclasses.asdict(edit)


def from_json(row: Mapping[str, Any]) -> Edit:
  """Inverse of ``as_json``."""
  skill = row["skill"]
  return Edit(
    row["action"],
    row["reason"],
    None if skill is None else Skill(**skill),
    row["cause"],
    row["failure"],
  )
