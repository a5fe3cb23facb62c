"""A stream of groups: some are always running, and each finished group is taken exactly once.

Groups begin in the order of their tasks: a round is one batch of tasks, and within a round the
order is by task id. Addresses contain the round where those of ``collect`` contain the step, so
draws do not depend on when a group runs. Groups run between calls in the event loop of the stream;
no other thread reads or changes a stream.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from agentjax.data import TaskIterator
from agentjax.rollout.keys import Address
from agentjax.rollout.loop import GroupPlayer, groups_of
from agentjax.rollout.schedule import Pending, ScheduleConfig, choose
from agentjax.trajectory.record import POLICY, Task, Trajectory

GroupKey = tuple[int, int]  # (round, task id)
Share = Callable[[list[Any]], list[Any]]
Accept = Callable[[list[Trajectory], int], bool]


@dataclasses.dataclass
class _Round:
  """A batch of tasks that was drawn: its number, the data's position before it, its groups."""

  number: int
  position: dict[str, Any]
  groups: set[GroupKey]


@dataclasses.dataclass
class _Group:
  """A group that has begun and was not taken; ``members`` once all its episodes have ended."""

  version: int  # its tokens are of these weights or newer ones
  play: asyncio.Task[None] | None = None
  members: list[Trajectory] | None = None


class StreamState(NamedTuple):
  """The state from which a stream continues.

  Attributes:
    plain: JSON: the groups that are not trained on yet.
    episodes: those that have ended and belong to such groups; they are not run again.
  """

  plain: dict[str, Any]
  episodes: list[Trajectory]


class GroupStream:
  """Starts groups, keeps them going and hands them over.

  Call ``set_state``, ``awaits`` and ``remember`` only before the first group begins. All other
  methods are coroutines and run in one event loop, in which ``accept`` is called too.

  Args:
    playing: plays a group.
    tasks: where rounds come from; the stream alone draws from it.
    first: number of the first round.
    group_size: episodes of a group.
    schedule: which groups a step takes.
    share: the part of a round's groups that is played here.
    accept: whether a finished group, begun with weights of a version, is trained on; None takes
      all. A refused group is dropped at once, and another begins in its place. Which groups a step
      gets depends on ``accept``, the seed and the weights, not on what ends first.
    refill: most replacements for one step; after that the step takes fewer groups.

  Attributes:
    dropped: groups that the schedule has dropped so far.
  """

  def __init__(
    self,
    playing: GroupPlayer,
    tasks: TaskIterator,
    *,
    first: int,
    group_size: int,
    schedule: ScheduleConfig,
    share: Share = list,
    accept: Accept | None = None,
    refill: int = 0,
  ):
    self.dropped = 0
    self._on_finish = playing.on_finish
    self._playing = dataclasses.replace(playing, on_finish=self._keep)
    self._accept, self._refill = accept, refill
    self._refused: list[Trajectory] = []  # episodes of groups that were not accepted
    self._refused_now = 0  # such groups since the latest ``take``
    self._tasks, self._group_size = tasks, group_size
    self._schedule, self._share = schedule, share
    self._next = first
    self._rounds: collections.deque[_Round] = collections.deque()
    self._waiting: collections.deque[tuple[Task, list[Address]]] = collections.deque()
    self._groups: dict[GroupKey, _Group] = {}
    self._kept: dict[GroupKey, dict[Address, Trajectory]] = {}  # ended, and not trained on
    self._consumed: set[GroupKey] = set()  # of rounds that are not all consumed, or not yet drawn
    self._changed = asyncio.Event()  # a play has ended
    self._error: BaseException | None = None  # that ended a play

  # States.

  def awaits(self, address: Address) -> bool:
    """Whether the episode belongs to a group that is not trained on yet."""
    return address[0] >= self._oldest_round and address[:2] not in self._consumed

  def remember(self, episodes: Iterable[Trajectory]) -> None:
    """Takes finished episodes, which are not run again."""
    for episode in episodes:
      self._kept.setdefault(episode.address[:2], {})[episode.address] = episode

  def set_state(self, plain: dict[str, Any]) -> None:
    """Goes on where ``get_state`` was taken; ``remember`` takes its episodes."""
    assert not self._rounds and not self._groups
    self._tasks.set_state(plain["tasks"])
    self._next = plain["round"]
    self._consumed = {(number, task) for number, task in plain["consumed"]}
    self._refused_now = plain["refused"]

  async def get_state(self) -> StreamState:
    """The state from which a later process continues."""
    plain = {
      "round": self._oldest_round,
      "tasks": self._rounds[0].position if self._rounds else self._tasks.get_state(),
      "consumed": [list(key) for key in sorted(self._consumed)],
      "refused": self._refused_now,
    }
    return StreamState(plain, [t for group in self._kept.values() for t in group.values()])

  async def consume(self, groups: Collection[GroupKey]) -> None:
    """Notes that groups were trained on, here or by a process whose journal is executed again."""
    self._consume(groups)

  async def take_refused(self) -> list[Trajectory]:
    """Episodes of the groups that ``accept`` refused since the last call."""
    refused, self._refused = self._refused, []
    return refused

  # Playing.

  async def fill(self, version: int, count: int) -> None:
    """Starts groups until ``count`` are running or wait to be taken.

    Args:
      version: of the engine's weights; all later tokens are of these or of newer ones.
      count: how many groups in all.
    """
    while len(self._groups) + self._missing < count:
      self._begin(version)

  async def take(self, step: int, size: int) -> list[Trajectory]:
    """The groups that ``step`` trains on, ``size`` of them, in the order of their addresses.

    They count as not consumed until ``consume`` is called. With "drop" further groups may be
    cancelled. If ``refill`` is used up there may be fewer than ``size``, or none.

    Raises:
      Errors of the engine or of the program.
    """
    while True:
      self._changed.clear()
      if self._error is not None:
        raise self._error
      if self._schedule.stale == "drop":
        await self._drop(step, size)
      running = any(not play.done() for play in self._plays())
      chosen = self._choose(step, size, running)
      if chosen is not None:
        self._refused_now = 0
        taken = [self._groups.pop(key).members for key in sorted(chosen)]
        return [trajectory for members in taken for trajectory in members or ()]
      if not running:
        raise RuntimeError(
          f"step {step} needs {size} groups and only {len(self._groups)} have begun, all of which "
          "have ended: fill() the stream first."
        )
      await self._changed.wait()

  async def settle(self) -> None:
    """Waits until all groups under way have ended; none is taken."""
    while running := [p for p in self._plays() if not p.done()]:
      await asyncio.wait(running)

  async def close(self) -> None:
    """Cancels what is under way and waits until every environment is closed."""
    plays = self._plays()
    self._groups.clear()
    await _cancel(plays)

  @property
  def _oldest_round(self) -> int:
    """The first round that has a group left."""
    return self._rounds[0].number if self._rounds else self._next

  @property
  def _missing(self) -> int:
    """Groups that were refused since the latest ``take`` and not replaced."""
    return max(0, self._refused_now - self._refill)

  def _plays(self) -> list[asyncio.Task[None]]:
    return [group.play for group in self._groups.values() if group.play is not None]

  def _consume(self, groups: Iterable[GroupKey]) -> None:
    for key in groups:
      self._consumed.add(key)
      self._kept.pop(key, None)
    while self._rounds and self._rounds[0].groups <= self._consumed:
      self._consumed -= self._rounds.popleft().groups

  def _keep(self, trajectory: Trajectory) -> None:
    if self._on_finish is not None:
      self._on_finish(trajectory)
    self.remember([trajectory])

  def _begin(self, version: int) -> None:
    """Starts the next group; ``version`` as in ``fill``."""
    task, addresses = self._draw()
    key = _key(addresses)
    known = dict(self._kept.get(key, {}))  # a copy: the group's own episodes join the original
    oldest = min([version, *(_oldest_version(t, version) for t in known.values())])
    group = self._groups[key] = _Group(oldest)
    group.play = asyncio.ensure_future(self._play(group, task, addresses, known))
    group.play.add_done_callback(self._note_end)

  async def _play(
    self,
    group: _Group,
    task: Task,
    addresses: list[Address],
    known: dict[Address, Trajectory],
  ) -> None:
    members = await self._playing.at(group.version).play(task, addresses, known)
    if self._accept is None or self._accept(members, group.version):
      group.version = min(_oldest_version(t, group.version) for t in members)
      group.members = members
      return
    key = _key(addresses)
    self._refused += members
    self._refused_now += 1
    if not self._missing:
      self._begin(self._playing.player.engine.version)
    del self._groups[key]
    self._consume((key,))

  def _note_end(self, play: asyncio.Task[None]) -> None:
    error = None if play.cancelled() else play.exception()
    if error is not None and play in self._plays():  # not of a group that was given up
      self._error = self._error or error
    self._changed.set()

  def _draw(self) -> tuple[Task, list[Address]]:
    while not self._waiting:
      position = self._tasks.get_state()
      every = groups_of(next(self._tasks), self._next, self._group_size)
      self._rounds.append(_Round(self._next, position, {_key(at) for _, at in every}))
      self._next += 1
      own = self._share(every)
      self._waiting.extend(group for group in own if _key(group[1]) not in self._consumed)
      self._consume(())
    return self._waiting.popleft()

  def _choose(self, step: int, size: int, running: bool) -> list[GroupKey] | None:
    """The groups that ``step`` takes; None where it has to wait, or no more can be had."""
    whole = sum(group.members is not None for group in self._groups.values())
    chosen = None
    if whole >= size:
      chosen = choose(self._pending(), step, size, self._schedule)
    if chosen is None and not running and self._missing:
      oldest_first = sorted(self._pending(), key=lambda p: (p.version, p.key))
      chosen = [p.key for p in oldest_first if p.whole][:size]
    return chosen

  def _pending(self) -> list[Pending[GroupKey]]:
    groups = self._groups.items()
    return [Pending(key, group.version, group.members is not None) for key, group in groups]

  async def _drop(self, step: int, size: int) -> None:
    """Gives up groups that are too old and starts others."""
    count = len(self._groups)
    old = [k for k, group in self._groups.items() if group.version + self._schedule.bound < step]
    groups = [self._groups.pop(key) for key in old]
    await _cancel([group.play for group in groups if group.play is not None])
    self._consume(old)
    self.dropped += len(old)
    await self.fill(step, max(count, size))


async def _cancel(plays: list[asyncio.Task[None]]) -> None:
  for play in plays:
    play.cancel()
  await asyncio.gather(*plays, return_exceptions=True)


def _key(addresses: list[Address]) -> GroupKey:
  return addresses[0][:2]


def _oldest_version(trajectory: Trajectory, default: int) -> int:
  """Of the tokens that trained policies drew; ``default`` where there are none."""
  own = [s for s in trajectory.segments if s.policy == POLICY or s.weights.any()]
  drawn = [int(s.versions[s.sampled].min()) for s in own if s.sampled.any()]
  return min(drawn, default=default)
