"""The models of a ``Harness``, each a ``rewards.judges.Judge``: what they are asked, in our words.

The router picks the entries of the library for a question. A tool is a prompt: the frozen judge
answers it in JSON, and reads the answers of the tools before its verdict. The analyser sees the
library with the demonstrations that the judge got wrong, and how it did, and answers with edits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from agentjax.engine import ContextLengthError
from agentjax.recipes.reward_harness.library import (
  Analysis,
  Demonstration,
  Edit,
  Entry,
  Judged,
  Library,
  read_sub_agent,
)
from agentjax.rewards.judges import (
  Judge,
  ask,
  delimit,
  last_json_object,
  material_notice,
  nonce,
  question_key,
)
from agentjax.trajectory.record import Message

MOST_SHOWN = 8  # wrong demonstrations that the analyser sees, and broken answers of a tool; ours
MOST_CHAIN = 2000  # last characters of how the judge came to a verdict that it sees; ours
MOST_TOOLS = 5  # tools asked for a verdict; the paper's judge calls as many

_VERDICT = (
  "Think, then end with <answer>{...}</answer> around one JSON object: "
  '{"preference": "A", "B" or "tie", "score_A_instruction": 1 to 4, "score_B_instruction": 1 to 4, '
  '"score_A_quality": 1 to 4, "score_B_quality": 1 to 4}'
)
_PICK = (
  "Pick the entries that help to judge these two answers. End with one JSON object of their names: "
  '{"skills": ["..."], "tools": ["..."]}'
)
_EDITS = (
  "Propose edits of the library that would correct these verdicts and hold for other answers too. "
  "They must not depend on the order of the answers. End with one JSON object: "
  '{"edits": [{"action": "add", "update" or "delete", "kind": "skill" or "tool", "name": "...", '
  '"text": "..."}]}. A skill is a criterion in words. A tool is a prompt that looks at both '
  "answers and replies with one JSON object."
)


class HarnessModels:
  """The four callables of a ``Harness``.

  Args:
    judge: the frozen judge; it also answers the tools.
    analyser: proposes edits and repairs tools; None is the judge.
    router: picks the entries for a question; None takes all.
  """

  def __init__(self, judge: Judge, analyser: Judge | None = None, router: Judge | None = None):
    self._judge, self._router = judge, router
    self._analyser = analyser or judge

  async def route(self, library: Library, demonstration: Demonstration, key: int) -> Library:
    """The entries that the router picks, maybe none; all if its reply names no lists of them."""
    if self._router is None or not library.entries:
      return library
    entries = [dataclasses.asdict(entry) for entry in library.entries]
    listed = json.dumps(entries, indent=1, ensure_ascii=False)
    task = f"You choose what a judge of two answers uses. These entries are there:\n{listed}"
    reply = await self._ask(self._router, task, demonstration, _PICK, question_key(key, "router"))
    found = last_json_object(reply) or {}
    picked = {"skill": found.get("skills"), "tool": found.get("tools")}
    if not all(isinstance(names, list) for names in picked.values()):
      return library
    kept = tuple(e for e in library.entries if e.name in picked[e.kind])  # type: ignore[operator]
    return library if any(picked.values()) and not kept else Library(kept)

  async def judge(self, library: Library, demonstration: Demonstration, key: int) -> Judged:
    """The judge's preference with the library; a tie if it cannot be read."""
    library = await self.route(library, demonstration, key)
    tools = library.of("tool")[:MOST_TOOLS]
    told = await asyncio.gather(
      *(self.probe(tool, demonstration, question_key(key, tool.name)) for tool in tools)
    )
    answers = [
      f"{t.name}: {json.dumps(last_json_object(a))}" for t, a in zip(tools, told, strict=True)
    ]
    skills = [f"{skill.name}: {skill.text}" for skill in library.of("skill")]
    parts = ["Which of two answers is better? You judge strictly and fairly."]
    if skills:
      parts.append("Judge by these criteria:\n" + "\n".join(skills))
    found = {}
    if answers:
      parts.append("Tools have looked at the answers; what they found stands behind them.")
      found["tools"] = "\n".join(answers)  # may quote the answers, so it is material too
    task = "\n\n".join(parts)
    reply = await self._ask(self._judge, task, demonstration, _VERDICT, key, found)
    used = "\n".join(f"{e.kind} {e.name}" for e in (*library.of("skill"), *tools))
    chain = "\n\n".join(filter(None, [used, *found.values(), reply]))
    return Judged(read_sub_agent(reply).preference, chain)

  async def probe(self, tool: Entry, demonstration: Demonstration, key: int) -> str:
    """What a tool answers."""
    return await self._ask(
      self._judge, tool.text, demonstration, "Answer with one JSON object.", key
    )

  async def propose(self, analysis: Analysis) -> list[Edit]:
    """The analyser's edits; none if its reply cannot be read."""
    wrong = [outcome for outcome in analysis.outcomes if not outcome.right]
    order = sorted(
      wrong,
      key=lambda o: question_key(analysis.key, o.demonstration.id, o.demonstration.label),
    )
    shown = [
      {
        "question": one.demonstration.content,
        "A": one.demonstration.first,
        "B": one.demonstration.second,
        "better": one.demonstration.label,
        "the judge said": one.choice,
        "how it came to it": one.chain[-MOST_CHAIN:],
      }
      for one in order[:MOST_SHOWN]
    ]
    library = [{"kind": e.kind, "name": e.name, "text": e.text} for e in analysis.library.entries]
    text = json.dumps({"library": library, "wrong": shown}, indent=1, ensure_ascii=False)
    asked = _EDITS + (" Propose at least one tool." if analysis.wants_tool else "")
    mark = nonce(analysis.key, text)
    reply = await _reply(
      self._analyser,
      (
        Message("system", "You improve a judge of answers. " + material_notice(mark)),
        Message("user", f"{delimit('verdicts', text, mark)}\n\n{asked}"),
      ),
      analysis.key,
    )
    return read_edits(reply)

  async def repair(self, tool: Entry, broken: Sequence[str], key: int) -> Entry:
    """The tool with a text of the analyser; as it was if its reply has none."""
    text = json.dumps({"prompt": tool.text, "answers": list(broken[:MOST_SHOWN])})
    mark = nonce(key, text)
    reply = await _reply(
      self._analyser,
      (
        Message("system", "You repair prompts. " + material_notice(mark)),
        Message(
          "user",
          f"{delimit('tool', text, mark)}\n\nThese answers of the prompt hold no JSON object. End "
          'with one JSON object that has a better prompt: {"text": "..."}',
        ),
      ),
      key,
    )
    found = (last_json_object(reply) or {}).get("text")
    usable = isinstance(found, str) and found.strip()
    return Entry("tool", tool.name, found) if usable else tool  # type: ignore[arg-type]

  async def _ask(
    self,
    judge: Judge,
    task: str,
    demonstration: Demonstration,
    asked: str,
    key: int,
    more: Mapping[str, str] | None = None,
  ) -> str:
    shown = (
      ("question", json.dumps(demonstration.content, ensure_ascii=False)),
      ("answer_A", demonstration.first),
      ("answer_B", demonstration.second),
      *(more or {}).items(),
    )
    mark = nonce(key, *(text for _, text in shown))
    material = "\n\n".join(delimit(name, text, mark) for name, text in shown)
    messages = (
      Message("system", f"{task}\n\n{material_notice(mark)}"),
      Message("user", f"{material}\n\n{asked}"),
    )
    return await _reply(judge, messages, key)


async def _reply(judge: Judge, messages: Sequence[Message], key: int) -> str:
  """What a model says; nothing to a question that is too long for it."""
  try:
    return await ask(judge, messages, key=key)
  except ContextLengthError as error:
    logging.warning("a model of the harness was asked too much: %s", error)
    return ""


def read_edits(reply: str) -> list[Edit]:
  """The edits of a reply; those that cannot be read are left out."""
  found: Any = (last_json_object(reply) or {}).get("edits")
  return [e for e in map(_edit, found if isinstance(found, list) else ()) if e is not None]


def _edit(value: Any) -> Edit | None:
  if not isinstance(value, dict):
    return None
  action: Any = value.get("action")
  kind: Any = value.get("kind")
  name: Any = value.get("name")
  text: Any = value.get("text")
  if action not in ("add", "update", "delete") or kind not in ("skill", "tool"):
    return None
  text = "" if action == "delete" else text
  if not all(isinstance(x, str) for x in (name, text)) or not name.strip():
    return None
  if action != "delete" and not text.strip():
    return None
  return Edit(action, Entry(kind, name, text))
