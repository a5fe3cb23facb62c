"""A stream of groups: some always under way, handed over whole, each exactly once.

Groups begin in the order of their tasks: round by round, one batch of tasks each, within a round by
task id. The round stands in their addresses where ``collect`` has the step, so that what they draw
does not depend on when they run. All methods but those about states are coroutines of one event
loop; the groups go on there between calls.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentjax.data import TaskIterator
from agentjax.rollout.keys import Address
from agentjax.rollout.loop import GroupPlayer, groups_of
from agentjax.rollout.schedule import Pending, ScheduleConfig, choose
from agentjax.trajectory.record import Task, Trajectory

GroupKey = tuple[int, int]  # (round, task id)
Share = Callable[[list[Any]], list[Any]]
Accept = Callable[[list[Trajectory]], bool]


@dataclasses.dataclass
class _Round:
  """A batch of tasks that was drawn: its number, the data's position before it, its groups."""

  number: int
  position: dict[str, Any]
  groups: set[GroupKey]


@dataclasses.dataclass
class _Group:
  """A group under way."""

  version: int  # its tokens are of these weights or newer ones
  play: asyncio.Task[list[Trajectory]]


class GroupStream:
  """Starts groups, keeps them going and hands them over.

  Args:
    playing: plays a group.
    tasks: where rounds come from; the stream alone draws from it.
    first: number of the first round.
    group_size: episodes of a group.
    schedule: which groups a step takes.
    finished: episodes that are not to be run again, by address; read when a group begins.
    share: the part of a round's groups that is played here.
    accept: whether a group that has ended is to be trained on; None takes all. One that is not is
      given up at once, and another begins in its place. Which groups a step gets then depends on
      ``accept``, the seed and the weights, not on what ends first.
    refill: how many may begin so for one step; then the step takes fewer groups.
    on_refuse: called with the episodes of a group that is given up.

  Attributes:
    dropped: groups given up so far, as the schedule says.
    refused: groups given up so far, as ``accept`` says.
  """

  def __init__(
    self,
    playing: GroupPlayer,
    tasks: TaskIterator,
    *,
    first: int,
    group_size: int,
    schedule: ScheduleConfig,
    finished: Mapping[Address, Trajectory] | None = None,
    share: Share = list,
    accept: Accept | None = None,
    refill: int = 0,
    on_refuse: Callable[[list[Trajectory]], None] | None = None,
  ):
    self.dropped = self.refused = 0
    self._accept, self._refill, self._on_refuse = accept, refill, on_refuse
    self._refused_now = 0  # since the latest ``take``
    self._playing, self._tasks, self._group_size = playing, tasks, group_size
    self._schedule, self._share = schedule, share
    self._finished: Mapping[Address, Trajectory] = {} if finished is None else finished
    self._next = first
    self._rounds: collections.deque[_Round] = collections.deque()
    self._waiting: collections.deque[tuple[Task, list[Address]]] = collections.deque()
    self._groups: dict[GroupKey, _Group] = {}
    self._consumed: set[GroupKey] = set()  # of rounds that are not all consumed, or not yet drawn

  # States.

  @property
  def oldest_round(self) -> int:
    """The first round that has a group left."""
    return self._rounds[0].number if self._rounds else self._next

  def awaits(self, address: Address) -> bool:
    """Whether the episode belongs to a group that was not trained on."""
    return address[0] >= self.oldest_round and address[:2] not in self._consumed

  def get_state(self) -> dict[str, Any]:
    """Plain JSON: which groups are still to be trained on. The episodes are kept elsewhere."""
    position = self._rounds[0].position if self._rounds else self._tasks.get_state()
    consumed = [list(key) for key in sorted(self._consumed)]
    return {
      "round": self.oldest_round,
      "tasks": position,
      "consumed": consumed,
      "refused": self._refused_now,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on where ``get_state`` was taken; before any group began."""
    assert not self._rounds and not self._groups
    self._tasks.set_state(state["tasks"])
    self._next = state["round"]
    self._consumed = {(number, task) for number, task in state["consumed"]}
    self._refused_now = state["refused"]

  def consume(self, groups: Iterable[GroupKey]) -> None:
    """Notes that groups were trained on, here or by a process whose journal is executed again."""
    self._consumed.update(groups)
    while self._rounds and self._rounds[0].groups <= self._consumed:
      self._consumed -= self._rounds.popleft().groups

  # Playing.

  async def fill(self, version: int, count: int) -> None:
    """Starts groups until ``count`` are under way or wait to be taken.

    Args:
      version: of the engine's weights; all later tokens are of these or of newer ones.
      count: so many groups in all.
    """
    while len(self._groups) + self._missing < count:
      self._begin(version)

  async def take(self, step: int, size: int) -> list[Trajectory]:
    """The groups that ``step`` trains on, ``size`` of them, in the order of their addresses.

    They stay noted as not consumed until ``consume`` is called. With "drop" there may be fewer
    groups under way afterwards than there were, besides those taken. Where ``refill`` is used up
    there may be fewer than ``size``, or none.

    Raises:
      What ends an episode without being its own fault: errors of the engine or of the program.
    """
    while True:
      for group in self._groups.values():
        if group.play.done():
          group.play.result()  # raises what ended it
      if self._schedule.stale == "drop":
        await self._drop(step, size)
      pending = [self._pending(key, group) for key, group in self._groups.items()]
      chosen = choose(pending, step, size, self._schedule)
      running = [group.play for group in self._groups.values() if not group.play.done()]
      if chosen is None and not running and self._missing:
        chosen = [p.key for p in sorted(pending, key=lambda p: (p.version, p.key))[:size]]
      if chosen is not None:
        self._refused_now = 0
        taken = [self._groups.pop(key).play.result() for key in sorted(chosen)]
        return [trajectory for members in taken for trajectory in members]
      if not running:
        raise RuntimeError(
          f"step {step} needs {size} groups and only {len(self._groups)} have begun, all of which "
          "have ended: fill() the stream first."
        )
      await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

  async def settle(self) -> None:
    """Waits until all groups under way have ended; none is taken."""
    while running := [g.play for g in self._groups.values() if not g.play.done()]:
      await asyncio.wait(running)

  async def close(self) -> None:
    """Cancels what is under way and waits until every environment is closed."""
    plays = [group.play for group in self._groups.values()]
    self._groups.clear()
    await _cancel(plays)

  @property
  def _missing(self) -> int:
    """Groups that were refused since the latest ``take`` and not replaced."""
    return max(0, self._refused_now - self._refill)

  def _begin(self, version: int) -> None:
    """Starts the next group; ``version`` as in ``fill``."""
    task, addresses = self._draw()
    key = _key(addresses)
    known = {a: t for a, t in self._finished.items() if a[:2] == key}
    oldest = min([version, *(_oldest_version(t, version) for t in known.values())])
    play = asyncio.ensure_future(self._play(key, task, addresses, known))
    self._groups[key] = _Group(oldest, play)

  async def _play(
    self,
    key: GroupKey,
    task: Task,
    addresses: list[Address],
    known: Mapping[Address, Trajectory],
  ) -> list[Trajectory]:
    members = await self._playing.play(task, addresses, known)
    if self._accept is not None and not self._accept(members):
      self.refused += 1
      self._refused_now += 1
      if self._on_refuse is not None:
        self._on_refuse(members)
      if not self._missing:
        self._begin(self._playing.player.engine.version)
      del self._groups[key]
      self.consume((key,))
    return members

  def _draw(self) -> tuple[Task, list[Address]]:
    while not self._waiting:
      position = self._tasks.get_state()
      every = groups_of(next(self._tasks), self._next, self._group_size)
      self._rounds.append(_Round(self._next, position, {_key(at) for _, at in every}))
      self._next += 1
      own = self._share(every)
      self._waiting.extend(group for group in own if _key(group[1]) not in self._consumed)
      self.consume(())
    return self._waiting.popleft()

  def _pending(self, key: GroupKey, group: _Group) -> Pending[GroupKey]:
    if not group.play.done():
      return Pending(key, group.version, whole=False)
    return Pending(key, min(_oldest_version(t, group.version) for t in group.play.result()), True)

  async def _drop(self, step: int, size: int) -> None:
    """Gives up groups that are too old and starts others."""
    pending = [self._pending(key, group) for key, group in self._groups.items()]
    old = [p.key for p in pending if p.version + self._schedule.bound < step]
    count = len(self._groups)
    await _cancel([self._groups.pop(key).play for key in old])
    self.consume(old)
    self.dropped += len(old)
    await self.fill(step, max(count, size))


async def _cancel(plays: list[asyncio.Task[list[Trajectory]]]) -> None:
  for play in plays:
    play.cancel()
  await asyncio.gather(*plays, return_exceptions=True)


def _key(addresses: list[Address]) -> GroupKey:
  return addresses[0][:2]


def _oldest_version(trajectory: Trajectory, default: int) -> int:
  """Of the tokens the policy drew; ``default`` where there are none."""
  drawn = [int(s.versions[s.sampled].min()) for s in trajectory.segments if s.sampled.any()]
  return min(drawn, default=default)
