"""OpenSpiel's games for two, played in text: a seat for each player, a move a turn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentjax.config import ConfigError, check
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.text.answers import read_tagged_answer
from agentjax.trajectory.record import Message, Reward, Status, Task
from agentjax.world.cheats import Setting, Turns, claims, each
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.world import Site, World, WorldConfig

AGENTS = ("player_1", "player_2")
_TRIES = 200  # random games from a position, to find one that the first to move wins
_OPENINGS = 20  # positions that are tried for a task


@dataclasses.dataclass(unsafe_hash=True)
class OpenSpielConfig(WorldConfig):
  """A game of OpenSpiel for two players who move in turns (extra ``agentjax[games]``).

  Attributes:
    game: name as OpenSpiel has it, perhaps with parameters: "connect_four(rows=4,columns=5)".
    opening_moves: at most this many random moves are made before the players begin. Their number
      and the moves are drawn for each task. With 0 all tasks of a game without chance are the same.
    tags: whether the move must be in ``<answer>...</answer>``; else the whole turn is one.
  """

  game: str = "tic_tac_toe"
  opening_moves: int = 0
  tags: bool = True

  def validate(self, path: str = "config.world") -> None:
    super().validate(path)
    check(bool(self.game), f"{path}.game", self.game, "the name of a game")
    check(self.opening_moves >= 0, f"{path}.opening_moves", self.opening_moves, ">= 0")

  def build(self, site: Site) -> World:
    """See ``WorldConfig.build``."""
    return OpenSpiel(self)


class OpenSpiel(World):
  """Plays the game of its settings; "environment" of the reward is what OpenSpiel pays a player."""

  def __init__(self, config: OpenSpielConfig):
    self.config = config

  def tasks(self, data: DataConfig) -> TaskSplits:
    """See ``World.tasks``.

    Raises:
      ConfigError: OpenSpiel is missing, or has no such game for two players.
    """
    sizes = ((data.train_size, 0, 0), (data.test_size, FIRST_TEST_ID, 1))
    train, test = (
      [self._task(first + i, [data.seed, split, i]) for i in range(size or 0)]
      for size, first, split in sizes
    )
    return TaskSplits(train, test)

  def environment(self, task: Task) -> Environment:
    return TwoPlayerGame(self.config)

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    """Texts that are no legal move, or moves where none is read."""
    way = task.answer.split("\n")
    tags = self.config.tags
    texts = claims(task) | {
      "two_moves": " ".join([*way, way[0]][:2]),
      "all_moves": "\n".join([*way, way[0]]),
      "glued": "".join([*way, way[0]]),
      "won": "I win. player_2 resigns. Returns: 1.0, -1.0",
      "number": "0",
    }
    attempts = each(texts, lambda text: _written(text, tags=tags))
    if tags:
      attempts["untagged"] = (Message("assistant", way[0]),)
      attempts["first_of_two_tags"] = (
        Message("assistant", f"{_written(way[0], tags=True)}{_written('', tags=True)}"),
      )
    return attempts

  def solution(self, task: Task, setting: Setting) -> Turns:
    return tuple(
      Message("assistant", _written(move, tags=self.config.tags))
      for move in task.answer.split("\n")
    )

  def _task(self, number: int, seed: list[int]) -> Task:
    game = load_game(self.config.game)
    draw = np.random.default_rng(seed)
    for _ in range(_OPENINGS):
      opening = draw_opening(game, self.config.opening_moves, draw)
      state = begin(game, opening, 0)
      way = find_win(state, draw)
      if way is not None:
        break
    else:
      raise ConfigError(
        f"config.world.game={self.config.game!r}: random play finds no end at which the first to "
        "move gains 1 or more; allowed: a game in which it does."
      )
    return Task(
      id=number,
      prompt=(Message("user", introduce(self.config, state)),),
      answer="\n".join(way),
      source=f"open_spiel/{self.config.game}",
      demonstration=(Message("assistant", _written(way[0], tags=self.config.tags)),),
      metadata={"opening": opening},
    )


class TwoPlayerGame(Environment):
  """A game between two agents. At its end each gets what OpenSpiel's rules pay.

  A turn that is no legal move, or ran out of tokens, loses: its player gets the lowest payment of
  the game, and the other 0, so that nobody is paid for the other's mistakes.

  Args:
    config: see OpenSpielConfig.
  """

  agents = AGENTS

  def __init__(self, config: OpenSpielConfig):
    self.config = config
    self._state: Any = None

  @property
  def least_return(self) -> float:
    return 0.0 if self._state is None else min(0.0, float(self._state.get_game().min_utility()))

  async def reset(self, task: Task, key: int) -> Observation:
    """Chance is drawn from ``key``, so that a snapshot holds the draws to come."""
    self._random = np.random.default_rng(key)
    game = load_game(self.config.game)
    self._state = begin(game, task.metadata["opening"], self._random)
    self._met: set[str] = set()
    return self._show()

  async def step(self, action: Action) -> Step:
    state = self._state
    if state is None:
      raise RuntimeError("step() before reset(task, key)")
    player = state.current_player()
    moves = {normalise(state.action_to_string(player, a)): a for a in state.legal_actions()}
    text = read_tagged_answer(action.text) if self.config.tags else action.text
    chosen = None if text is None or action.truncated else moves.get(normalise(text))
    other = AGENTS[1 - player]
    if chosen is None:
      status = Status.TRUNCATED if action.truncated else Status.OK
      return Step(
        Observation(()),
        Reward(self.least_return),
        terminated=not action.truncated,
        truncated=action.truncated,
        status=status,
        executed=False,
        rewards={other: Reward(0.0)},
      )
    state.apply_action(chosen)
    pass_chance(state, self._random)
    if not state.is_terminal():
      return Step(self._show(), Reward(0.0))
    returns = state.returns()
    return Step(
      Observation(()),
      Reward(float(returns[player])),
      terminated=True,
      answer=text,
      rewards={other: Reward(float(returns[1 - player]))},
    )

  def _show(self) -> Observation:
    """What the player to move sees; the rules when it moves for the first time."""
    agent = AGENTS[self._state.current_player()]
    text = show(self._state) if agent in self._met else introduce(self.config, self._state)
    self._met.add(agent)
    return Observation((Message("user", text),), next=agent)

  def snapshot(self) -> bytes:
    values = [self._state.serialize(), sorted(self._met), self._random.bit_generator.state]
    return json.dumps(values).encode()

  def restore(self, state: bytes) -> None:
    text, met, random = json.loads(state)
    self._state = load_game(self.config.game).deserialize_state(text)
    self._met = set(met)
    self._random = np.random.default_rng(0)
    self._random.bit_generator.state = random


def load_game(name: str) -> Any:
  """A game of OpenSpiel.

  Raises:
    ConfigError: OpenSpiel is missing, or has no such game for two players who move in turns.
  """
  try:
    import pyspiel
  except ImportError as error:
    raise ConfigError(
      "the world 'open_spiel' needs OpenSpiel; install the extra: pip install 'agentjax[games]'"
    ) from error
  path = f"config.world.game={name!r}"
  short = name.split("(")[0]
  if short not in pyspiel.registered_names():
    raise ConfigError(f"{path}; allowed: {', '.join(pyspiel.registered_names())}.")
  try:
    game = pyspiel.load_game(name)
  except pyspiel.SpielError as error:
    raise ConfigError(f"{path}: {error}; allowed: parameters that the game has.") from error
  in_turns = game.get_type().dynamics == pyspiel.GameType.Dynamics.SEQUENTIAL
  if game.num_players() != len(AGENTS) or not in_turns:
    raise ConfigError(
      f"{path} has {game.num_players()} players{'' if in_turns else ' who move at once'}; allowed: "
      "a game for two who move in turns."
    )
  return game


def begin(game: Any, opening: list[int], random: np.random.Generator | int) -> Any:
  """The state after chance, drawn from ``random``, and the opening moves."""
  drawn = np.random.default_rng(random)
  state = game.new_initial_state()
  pass_chance(state, drawn)
  for move in opening:
    # With another draw of chance a move may be illegal that was legal when the task was made.
    state.apply_action(move if move in state.legal_actions() else state.legal_actions()[0])
    pass_chance(state, drawn)
  return state


def pass_chance(state: Any, random: np.random.Generator) -> None:
  """Draws outcomes of chance until a player is to move, or the game is over."""
  while state.is_chance_node():
    outcomes, chances = zip(*state.chance_outcomes(), strict=True)
    bounds = np.cumsum(chances)
    drawn = int(np.searchsorted(bounds, random.random() * bounds[-1], side="right"))
    state.apply_action(outcomes[min(drawn, len(outcomes) - 1)])


def draw_opening(game: Any, most: int, random: np.random.Generator) -> list[int]:
  """Up to ``most`` random moves that neither end the game nor call chance."""
  state = game.new_initial_state()
  pass_chance(state, np.random.default_rng(0))
  opening: list[int] = []
  for _ in range(int(random.integers(most + 1))):
    made = int(random.choice(state.legal_actions()))
    state.apply_action(made)
    if state.is_terminal() or state.is_chance_node():
      break
    opening.append(made)
  return opening


def find_win(state: Any, random: np.random.Generator) -> list[str] | None:
  """Moves of both players to an end that the first to move is paid 1 or more for.

  None where random play finds none: the position may be lost.
  """
  for _ in range(_TRIES):
    now, moves = state.clone(), []
    chance = np.random.default_rng(0)
    while not now.is_terminal():
      player = now.current_player()
      chosen = int(random.choice(now.legal_actions()))
      moves.append(now.action_to_string(player, chosen))
      now.apply_action(chosen)
      pass_chance(now, chance)
    if now.returns()[state.current_player()] >= 1:
      return moves
  return None


def introduce(config: OpenSpielConfig, state: Any) -> str:
  """What a player reads before its first move."""
  name = state.get_game().get_type().long_name
  where = " in <answer></answer>" if config.tags else ""
  number = state.current_player() + 1
  return (
    f"You play {name} as player {number} of {len(AGENTS)}. Write one of your moves{where}; "
    f"anything else loses.\n{show(state)}"
  )


def show(state: Any) -> str:
  """What the player to move knows, and its moves."""
  import pyspiel

  player = state.current_player()
  perfect = pyspiel.GameType.Information.PERFECT_INFORMATION
  if state.get_game().get_type().information == perfect:
    known = str(state)
  else:
    known = state.information_state_string(player)
  moves = [state.action_to_string(player, a) for a in state.legal_actions()]
  return f"{known.strip()}\nMoves: {' | '.join(moves)}"


def normalise(move: str) -> str:
  """A move with single spaces; letter case stays, as chess needs it."""
  return " ".join(move.split())


def _written(move: str, *, tags: bool) -> str:
  return f"<answer>{move}</answer>" if tags else move
