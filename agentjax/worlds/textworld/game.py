"""TextWorld's games in text: one command a turn, points for quests, descriptions of our own."""

from __future__ import annotations

import dataclasses
import json
import lzma
import pathlib
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.config import ConfigError, check
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.errors import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.text.answers import read_tagged_answer
from agentjax.tools.build import ToolsConfig
from agentjax.trajectory.record import Message, Reward, Status, Task
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.textworld.cheats import textworld_cheats
from agentjax.worlds.textworld.logic import Fact, Game, apply, read_game

REFUSED = "Nothing happens."
_PLAYER, _HANDS = "P", "I"  # ids that every game has


@dataclasses.dataclass(unsafe_hash=True)
class TextWorldConfig(WorldConfig):
  """Games that lie in the folder ``config.data.path``, or in archives (.tar.xz, .tar.gz) there.

  A game is a JSON file ``LEVEL/SPLIT/NAME.json``, as TextWorld's generators write it; games are
  taken in the order of their paths. Of TextWorld Commonsense there are five a level and split.

  Attributes:
    levels: folders that games are taken of: "easy", "medium" and "hard" in TextWorld Commonsense.
    train_split, test_split: folders of a level. "valid" has the same things as "train" in other
      places, "test" has other things.
    max_turns: of the policy; then the game is over. 50 in TextWorld Commonsense.
    tags: whether the command must be in ``<answer>...</answer>``; else the whole turn is one.
    show_commands: whether all commands that would do something are listed every turn.
  """

  levels: tuple[str, ...] = ("easy",)
  train_split: str = "train"
  test_split: str = "test"
  max_turns: int = 50
  tags: bool = True
  show_commands: bool = True

  def validate(self, path: str = "config.world") -> None:
    super().validate(path)
    check(bool(self.levels), f"{path}.levels", self.levels, "one folder or more")
    check(self.max_turns >= 1, f"{path}.max_turns", self.max_turns, ">= 1")

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    check(data.source is None, f"{path}.data.source", data.source, "none for 'textworld'")
    allowed = "a folder of games for 'textworld'; set --config.data.path=DIR"
    check(data.path is not None, f"{path}.data.path", data.path, allowed)

  def build(self, site: Site) -> World:
    """See ``WorldConfig.build``."""
    return TextWorld(self)


class TextWorld(World):
  """Games from files; the part "environment" of the reward is the share of points earned."""

  def __init__(self, config: TextWorldConfig):
    self.config = config

  def tasks(self, data: DataConfig) -> TaskSplits:
    """See ``World.tasks``.

    Raises:
      DataError: no game, or one that cannot be read or completed.
    """
    assert data.path is not None
    splits = (
      (self.config.train_split, data.train_size, 0),
      (self.config.test_split, data.test_size, FIRST_TEST_ID),
    )
    return TaskSplits(
      *(
        load_games(self.config, data.path, split, limit=limit, first_id=first)
        for split, limit, first in splits
      )
    )

  def environment(self, task: Task) -> Environment:
    return TextWorldGame(self.config)

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return textworld_cheats(task, self.config.tags, self.config.max_turns)

  def solution(self, task: Task, setting: Setting) -> Turns:
    return tuple(
      Message("assistant", write_command(command, tags=self.config.tags))
      for command in task.answer.split("; ")
    )


class TextWorldGame(Environment):
  """One game. A turn earns the points of the quests that it completes, over all points.

  A turn whose text is no command that can be done changes nothing and is answered by
  "Nothing happens.". Each quest is paid once, so undoing and doing again earns nothing.

  Args:
    config: see TextWorldConfig.
  """

  def __init__(self, config: TextWorldConfig):
    self.config = config
    self._game: Game | None = None

  async def reset(self, task: Task, key: int) -> Observation:
    del key  # nothing is left to chance
    self._game = read_game(task.metadata["game"])
    self._facts, self._done = self._game.facts, frozenset[int]()
    self._turn, self._paid = 0, 0.0
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    game = self._game
    if game is None:
      raise RuntimeError("step() before reset(task, key)")
    self._turn += 1
    if action.truncated:
      return Step(
        Observation(()), Reward(0.0), truncated=True, status=Status.TRUNCATED, executed=False
      )
    command = read_command(action.text, tags=self.config.tags)
    known = {normalise(name): found for name, found in game.actions(self._facts).items()}
    chosen = known.get(command)
    said, executed = REFUSED, chosen is not None
    if chosen is not None:
      self._facts, said = apply(chosen, self._facts), f"You {chosen.command}."
    reward = self._pay(game)
    won = len(self._done) == len(game.quests)
    lost = any(f <= self._facts for quest in game.quests for f in quest.failures)
    if won or lost or self._turn >= self.config.max_turns:
      done = command if chosen is not None else None
      return Step(Observation(()), reward, terminated=True, executed=executed, answer=done)
    text = f"{said}\n{describe(game, self._facts, commands=self.config.show_commands)}"
    return Step(Observation((Message("user", text),)), reward, executed=executed)

  def _pay(self, game: Game) -> Reward:
    """For quests that are completed now; all turns of a game that is won add up to 1 exactly."""
    self._done |= {
      i
      for i, quest in enumerate(game.quests)
      if any(event <= self._facts for event in quest.events)
    }
    total = sum(quest.reward for quest in game.quests)
    earned = sum(game.quests[i].reward for i in self._done)
    paid = (1.0 if len(self._done) == len(game.quests) else earned / total) - self._paid
    self._paid += paid
    return Reward(paid)

  def snapshot(self) -> bytes:
    values = [sorted(self._facts), sorted(self._done), self._turn, self._paid]
    return json.dumps(values).encode()

  def restore(self, state: bytes) -> None:
    facts, done, self._turn, self._paid = json.loads(state)
    self._facts = frozenset(tuple(fact) for fact in facts)
    self._done = frozenset(done)


def normalise(command: str) -> str:
  """A command in lower case, with single spaces, without articles and full stop."""
  words = command.lower().strip().removesuffix(".").split()
  return " ".join(word for word in words if word not in ("the", "a", "an"))


def read_command(text: str, *, tags: bool) -> str:
  """The command of a turn, normalised; "" where there is none.

  Args:
    text: of the turn.
    tags: see ``TextWorldConfig``.
  """
  found = read_tagged_answer(text) if tags else text
  return "" if found is None else normalise(found)


def write_command(command: str, *, tags: bool) -> str:
  """A turn that gives a command."""
  return f"<answer>{command}</answer>" if tags else command


def describe(game: Game, facts: frozenset[Fact], *, commands: bool) -> str:
  """Where the player is, what is there and carried, exits, and maybe what can be done."""
  rooms = [f[2] for f in sorted(facts) if f[0] == "at" and f[1] == _PLAYER]
  here = rooms[0] if rooms else ""
  fixed = [f[1] for f in sorted(facts) if f[0] == "at" and f[2] == here and f[1] != _PLAYER]
  lines = [f"You are in the {game.names.get(here, here)}."]
  for thing in fixed:
    kind = game.kinds[thing]
    if not (game.logic.is_a(kind, "s") or game.logic.is_a(kind, "c")):
      lines.append(f"On the floor: {game.names[thing]}.")
      continue
    if game.logic.is_a(kind, "c") and ("open", thing) not in facts:
      lines.append(f"The {game.names[thing]} is closed.")
      continue
    word = "on" if game.logic.is_a(kind, "s") else "in"
    held = [game.names[f[1]] for f in sorted(facts) if f[0] == word and f[2] == thing]
    lines.append(f"{word.capitalize()} the {game.names[thing]}: {', '.join(held) or 'nothing'}.")
  exits = [f[0] for f in sorted(facts) if f[0].endswith("_of") and f[2] == here]
  if exits:
    lines.append(f"Exits: {', '.join(name.removesuffix('_of') for name in exits)}.")
  carried = [game.names[f[1]] for f in sorted(facts) if f[0] == "in" and f[2] == _HANDS]
  lines.append(f"You carry: {', '.join(carried) or 'nothing'}.")
  if commands:
    lines.append(f"Commands: {'; '.join(game.actions(facts))}.")
  return "\n".join(lines)


def load_games(
  config: TextWorldConfig, path: str, split: str, *, limit: int | None, first_id: int
) -> list[Task]:
  """The games of a split as tasks, with a way to win as ``answer``; ``limit`` at most.

  Raises:
    DataError: no game, or one that cannot be read or completed.
  """
  tasks: list[Task] = []
  wanted = {(level, split) for level in config.levels}
  for where, text in _files(pathlib.Path(path), wanted):
    if limit is not None and len(tasks) >= limit:
      break
    try:
      values = json.loads(text)
      game = read_game(values)
      way = game.solve()
    except (ValueError, RecursionError) as error:
      raise DataError(f"not a game of TextWorld: {error}", where) from error
    tasks.append(_task(config, first_id + len(tasks), where, values, game, way))
  if not tasks and limit != 0:
    folders = ", ".join(f"{level}/{split}" for level in config.levels)
    raise DataError(f"no game *.json in {folders}, nor in an archive with such folders", path)
  return tasks


def _task(
  config: TextWorldConfig, number: int, where: str, values: Any, game: Game, way: list[str]
) -> Task:
  how = "Write one command a turn" + (" in <answer></answer>." if config.tags else ".")
  text = f"{game.goal}\n{how}\n{describe(game, game.facts, commands=config.show_commands)}"
  kept = ("world", "quests", "infos", "objective", "metadata")
  plain = {name: values[name] for name in kept if name in values}
  return Task(
    id=number,
    prompt=(Message("user", text),),
    answer="; ".join(way),
    source="textworld",
    demonstration=(Message("assistant", write_command(way[0], tags=config.tags)),),
    metadata={"file": where, "game": plain | {"KB": {"logic": values["KB"]["logic"]}}},
  )


def _files(folder: pathlib.Path, wanted: set[tuple[str, str]]) -> Iterator[tuple[str, str]]:
  """Path and text of the game files of these levels and splits, in the order of their paths."""
  if not folder.is_dir():
    raise ConfigError(f"config.data.path={str(folder)!r}; allowed: a folder of games.")
  found: dict[str, str] = {}
  for file in sorted(folder.glob("*/*/*.json")):
    if file.parts[-3:-1] in wanted:
      found[str(file)] = file.read_text()
  for archive in sorted(folder.glob("*.tar.[gx]z")):
    try:
      with tarfile.open(archive) as opened:
        for member in opened:
          place = tuple(member.name.split("/")[-3:-1])
          if member.isfile() and member.name.endswith(".json") and place in wanted:
            content = opened.extractfile(member)
            assert content is not None
            found[f"{archive}/{member.name}"] = content.read().decode()
    except (
      tarfile.TarError,
      OSError,
      EOFError,
      zlib.error,
      lzma.LZMAError,
      UnicodeDecodeError,
    ) as error:
      raise DataError(f"cannot be read: {error}", archive) from error
  yield from sorted(found.items())
