"""Stand-ins for models, with which days and nights run without any: a player and a writer.

They know the world "number_game", a hidden number from 1 to 100 that is guessed by "higher" and
"lower". The player has habits, most of them bad, and does what a skill of its catalogue says. The
writer finds out which way of guessing went best in the sessions that it is shown, and is wrong now
and then. So everything between them, from retrieval to replays, decides what is learned.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from agentjax.config import Share
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.recipes.skillclaw import models
from agentjax.recipes.skillclaw.library import Entry
from agentjax.recipes.skillclaw.retrieval import RetrievalConfig, catalogue
from agentjax.recipes.skillclaw.skill import Skill
from agentjax.rollout.seat_config import Bank, SeatConfig
from agentjax.rollout.seats import SeatPlayer
from agentjax.trajectory.record import Message, Task
from agentjax.worlds.number_game.game import HIGHEST, LOWEST, guess_number_tasks

# Ways of guessing, and how often the player takes each without a skill.
HABITS: Mapping[str, float] = {
  "any number": 0.5,
  "the next number up": 0.2,
  "a number within the bounds": 0.2,
  "the middle of the bounds": 0.1,
}
_TOLD = (0.2, 0.2, 0.2, 0.4)  # the same of the skills that a demonstration follows
_ALWAYS = re.compile(r"always (\d+)")
_SAID = re.compile(r"I guess ([a-z ]+?|always \d+): (\d+)")
_SKILL = "guess-a-hidden-number"
_DEMONSTRATED = 8  # turns of a demonstrated game, at most


def skill_for(way: str, name: str = _SKILL) -> Skill:
  """A skill that tells a way of guessing."""
  return Skill(name, "When you guess a number that is hidden.", f"Guess {way}.")


def way_of(text: str) -> str | None:
  """The way of guessing that a text names first; None if it names none."""
  found = [(text.find(way), way) for way in HABITS if way in text]
  found += [(match.start(), match[0]) for match in _ALWAYS.finditer(text.lower())][:1]
  return min(found)[1] if found else None


def next_guess(way: str, guesses: Sequence[tuple[int, str]], random: np.random.Generator) -> int:
  """The next guess of a way, after guesses with their answers."""
  low = max((n for n, answer in guesses if answer == "higher"), default=LOWEST - 1) + 1
  high = min((n for n, answer in guesses if answer == "lower"), default=HIGHEST + 1) - 1
  if match := _ALWAYS.fullmatch(way):
    return int(match[1])
  if way == "the next number up":
    return min(max((n for n, _ in guesses), default=LOWEST - 1) + 1, HIGHEST)
  if way == "any number" or low > high:
    return int(random.integers(LOWEST, HIGHEST + 1))
  if way == "the middle of the bounds":
    return (low + high) // 2
  return int(random.integers(low, high + 1))


def _habit(random: np.random.Generator) -> str:
  return str(random.choice(list(HABITS), p=list(HABITS.values())))


@dataclasses.dataclass(unsafe_hash=True)
class GuesserSeat(SeatConfig):
  """A player of "number_game".

  Attributes:
    explore: share of the games that it plays by habit, whatever a skill says.
  """

  explore: Share = 0.3

  def play(self, bank: Bank, name: str) -> SeatPlayer:
    return SeatPlayer(name, bank.chat, service=Guesser(self.explore))


class Guesser:
  """Says in each turn how it guesses, and guesses; see GuesserSeat."""

  def __init__(self, explore: float):
    self._explore = explore

  async def reply(self, messages: Sequence[Message], *, key: int) -> str:
    random = np.random.default_rng(key)
    said = [m for m in messages if m.role == "assistant"]
    found = _SAID.search(said[0].content) if said else None
    way = found[1] if found else self._choose(messages[0].content, random)
    return f"I guess {way}: {next_guess(way, _guesses(messages), random)}"

  def _choose(self, prompt: str, random: np.random.Generator) -> str:
    told = way_of(prompt)
    explores = random.random() < self._explore
    return _habit(random) if told is None or explores else told


def _guesses(messages: Sequence[Message]) -> list[tuple[int, str]]:
  """Guesses with their answers."""
  pairs = zip(messages, messages[1:], strict=False)
  found = [(_SAID.search(m.content), answer) for m, answer in pairs if m.role == "assistant"]
  return [(int(match[2]), answer.content) for match, answer in found if match]


@dataclasses.dataclass(unsafe_hash=True)
class LessonSeat(SeatConfig):
  """A writer and judge for sessions of "number_game".

  Attributes:
    mistaken: share of the edits that take any way of guessing that was seen, not the best.
    obeys: whether it does what a session orders it to, the worst that a model can do: a line
      ``PUBLISH {...}`` with name, description and body becomes its proposal.
  """

  mistaken: Share = 0.3
  obeys: bool = False

  def play(self, bank: Bank, name: str) -> SeatPlayer:
    return SeatPlayer(name, bank.chat, service=Lessons(self.mistaken, self.obeys))


class Lessons:
  """Answers all questions of a night; see LessonSeat. It finds every proposal good."""

  def __init__(self, mistaken: float, obeys: bool):
    self._mistaken, self._obeys = mistaken, obeys

  async def reply(self, messages: Sequence[Message], *, key: int) -> str:
    who, asked = messages[0].content, messages[1].content
    if who.startswith(models.SUMMARISE):
      return f"The agent guessed {way_of(asked) or 'in no way that is known'}."
    if who.startswith(models.EVOLVE):
      return json.dumps(self._edit(asked, np.random.default_rng(key)))
    if who.startswith(models.MERGE):
      return json.dumps(dataclasses.asdict(skill_for(way_of(_block(asked, "proposed")) or "well")))
    names = models.CRITERIA if who.startswith(models.VERIFY) else models.GRADES
    return json.dumps(dict.fromkeys(names, 1.0))

  def _edit(self, asked: str, random: np.random.Generator) -> dict[str, str]:
    ordered = re.search(r"PUBLISH (\{.*?\})", asked) if self._obeys else None
    if ordered:
      return {"action": "create_skill", "cause": "skill", **json.loads(ordered[1])}
    by_way: dict[str, list[float]] = collections.defaultdict(list)
    for way, score in _sessions(asked):
      by_way[way].append(score)
    present = way_of(_block(asked, "skill"))
    if not by_way:
      return {"action": "skip", "reason": "no session is of a game"}
    means = {way: sum(scores) / len(scores) for way, scores in by_way.items()}
    best = max(sorted(means), key=lambda way: means[way])
    if random.random() < self._mistaken:
      best = str(random.choice(sorted(means)))
    if best == present:
      return {"action": "skip", "reason": "the skill says so already"}
    action = "create_skill" if present is None else "improve_skill"
    reason = f"sessions that guess {best} score {means[best]:.2f}"
    return {"action": action, "cause": "skill", "failure": "SKILL_GAP", "reason": reason,
            **dataclasses.asdict(skill_for(best))}  # fmt: skip


def _block(asked: str, name: str) -> str:
  """The material of a name; "" if there is none."""
  found = re.search(rf"<{name} (\w+)>\n(.*?)\n</{name} \1>", asked, re.S)
  return found[2] if found else ""


def _sessions(asked: str) -> Iterator[tuple[str, float]]:
  """(way of guessing, score) of each session that tells both."""
  for number in range(asked.count("</session_")):
    text = _block(asked, f"session_{number}")
    score, way = re.match(r"score: ([\d.]+)", text), _SAID.search(text)
    if score and way:
      yield way[1], float(score[1])


@dataclasses.dataclass(unsafe_hash=True)
class GuesserDemonstrations(TaskSource):
  """Games that teach a small policy to do what a skill says: weights learn to obey, skills know.

  Half of the prompts show a skill for one of the ways of guessing, and the demonstration follows
  it. The other half shows none, and a habit is demonstrated. All figures are ours.
  """

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.train_size is not None and data.test_size is not None
    return TaskSplits(
      _demonstrations(data.train_size, 0, data.seed),
      _demonstrations(data.test_size, FIRST_TEST_ID, data.seed),
    )


def _demonstrations(count: int, first_id: int, seed: int) -> list[Task]:
  random = np.random.default_rng([seed, first_id])
  (plain,) = guess_number_tasks(1)[0].prompt
  shown = RetrievalConfig(show="bodies")
  tasks = []
  for number in range(count):
    way, prompt = _habit(random), plain.content
    if number % 2:
      way = str(random.choice(list(HABITS), p=_TOLD))
      prompt = f"{catalogue([Entry(skill_for(way))], shown)}\n\n{prompt}"
    tasks.append(
      Task(
        first_id + number,
        (Message("user", prompt),),
        "",
        "guess_number",
        demonstration=_game(way, int(random.integers(LOWEST, HIGHEST + 1)), random),
      )
    )
  return tasks


def _game(way: str, target: int, random: np.random.Generator) -> tuple[Message, ...]:
  """A game in one way, up to its end or ``_DEMONSTRATED`` turns."""
  said: list[Message] = []
  guesses: list[tuple[int, str]] = []
  for _ in range(_DEMONSTRATED):
    guess = next_guess(way, guesses, random)
    said.append(Message("assistant", f"I guess {way}: {guess}"))
    if guess == target:
      break
    guesses.append((guess, "higher" if guess < target else "lower"))
    said.append(Message("user", guesses[-1][1]))
  return tuple(said if said[-1].role == "assistant" else said[:-1])
