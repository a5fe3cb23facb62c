"""Sessions, models made of functions, and replays by a table, for nights without any model."""

import json

from agentjax.recipes.skillclaw import models
from agentjax.recipes.skillclaw.library import Library
from agentjax.recipes.skillclaw.models import SkillModels
from agentjax.recipes.skillclaw.night import Night, SkillClawConfig
from agentjax.recipes.skillclaw.sessions import Session
from agentjax.recipes.skillclaw.skill import Skill
from agentjax.trajectory.record import Message
from tests.rewards.judging import Scripted, run

GOOD = {"name": "good", "description": "When it helps.", "body": "Do it well."}
FINE = dict.fromkeys(models.CRITERIA, 0.9)


def session(text, *, score=1.0, trusted=True, read=(), name="one"):
  said = (Message("user", "Do it."), Message("assistant", text))
  return Session(name, said, score, trusted, tuple(read))


def skill(body="Do it well.", name="good"):
  return Skill(name, "When it helps.", body)


def create(**changes):
  return {"action": "create_skill", "cause": "agent", "reason": "seen"} | GOOD | changes


def answers(*, edit, grades=FINE, merge=None, score=0.5):
  """What models answer; ``edit`` is an object, or a function of the question."""

  def answer(messages, key):
    who, asked = messages[0].content, messages[1].content
    if who.startswith(models.SUMMARISE):
      return f"Summary of {len(asked)} characters."
    if who.startswith(models.GRADE):
      return json.dumps(dict.fromkeys(models.GRADES, score))
    if who.startswith(models.EVOLVE):
      return json.dumps(edit(asked) if callable(edit) else edit)
    if who.startswith(models.MERGE):
      return json.dumps(merge)
    assert who.startswith(models.VERIFY)
    return json.dumps(grades)

  return Scripted(answer)


class Replays:
  """Rewards of four cases by what the skills say: from ``base`` towards 1 with each text of
  ``worth``, less with "badly"."""

  def __init__(self, worth=("well",), base=0.25):
    self.worth, self.base, self.played = worth, base, []

  async def __call__(self, entries):
    self.played.append(tuple(e.name for e in entries))
    text = " ".join(e.skill.body for e in entries)
    found = sum(word in text for word in self.worth) / max(len(self.worth), 1)
    harm = 0.25 if "badly" in text else 0.0
    return [max(0.0, self.base + (1 - self.base) * found - harm)] * 4


def night(path, sessions, judge, replay, name="night_000", library="library", **settings):
  """Runs a night over PATH/library in PATH/NAME; (report, library)."""
  shelf = Library(path / library)
  settings = {"accept": 0.5, **settings}
  with shelf.writing():
    made = Night(
      path / name, name, shelf, sessions, SkillModels(*[judge] * 5), replay,
      SkillClawConfig(**settings), key=3, made_with={"models": "scripted"},
    )  # fmt: skip
    return run(made.run()), shelf


def publish(path, *skills):
  """Puts skills into PATH/library by hand."""
  shelf = Library(path / "library")
  with shelf.writing():
    for one in skills:
      shelf.publish(one, source=f"test/{one.name}", evidence={})
  return shelf


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]
