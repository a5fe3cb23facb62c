"""Episode programs: how a policy acts in an environment, and how every ending gets its status.

A program is a coroutine over an ``Episode``, whose operations talk to the environment and the
engine and record every token. Where the environment has several agents, each has a seat of its
own (``rollout.seats``); the same program serves one and several. ``run_episode`` runs a program
within its time-outs, always closes what the episode holds and turns each way to end into exactly
one ``Status``:

  ok               the environment ended the episode
  truncated        tokens, turns or time ran out, or the prompt does not fit
  env_error        the environment failed by its own fault: masked
  policy_error     the policy drew markup that only the conversation itself may contain, such as a
                   made-up tool result; or its text broke the environment; or the environment
                   reported a breach. It counts, and is never worth more than losing
                   (``Environment.least_return``)
  engine_error     the policy's log-probs were not finite: masked
  verifier_error   set where rewards are scored

``faults.fault_of`` decides whose fault a failure is; ``metadata["fault"]`` keeps it.

Any other error of the engine is not the episode's fault: it propagates and ends the collection.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from agentjax.config import ConfigError
from agentjax.engine.config import SamplingConfig
from agentjax.engine.engine import Engine, Prefix
from agentjax.engine.grammar import compile_tool_calls
from agentjax.engine.request import (
  ContextLengthError,
  Finish,
  NonFiniteError,
  Sample,
  SampleRequest,
)
from agentjax.faults import FAULT, Boundary, Fault, Owner, describe, fault_of
from agentjax.places import Clock, TooSlow, owned_by, run_within
from agentjax.rollout import keys
from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.seats import (
  Seat,
  SeatPlayer,
  ToolService,
  close_seats,
  fork_seats,
  own_player,
  take_seats,
)
from agentjax.text.chat import Chat, Span
from agentjax.tools.protocol import ToolStatus
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import (
  BRANCHES,
  ENDED_BY,
  GUARDS,
  Flag,
  GuardRecord,
  Message,
  Outcome,
  Reward,
  Status,
  Task,
  ToolRecord,
  Trajectory,
)
from agentjax.trajectory.seats import outcome_of
from agentjax.world.environment import Action, Environment, Observation, Step, take_snapshot

_log = logging.getLogger(__name__)
T = TypeVar("T")

MakeEnvironment = Callable[[Task], Environment]
EpisodeProgram = Callable[["Episode"], Coroutine[Any, Any, None]]
ContextManager = Callable[["Episode", Observation], Awaitable[Observation | None]]

ENVIRONMENT_REWARD = "environment"  # reward part that holds what the environment itself paid


class EpisodeEnd(Exception):
  """Ends an episode from inside its program, with a status, a reason and what failed, if any."""

  def __init__(self, status: Status, reason: str, fault: Fault | None = None):
    super().__init__(reason)
    self.status = status
    self.reason = reason
    self.fault = fault


@dataclasses.dataclass(frozen=True)
class Player:
  """What plays episodes: an engine with published weights, and how conversations become tokens.

  Attributes:
    engine: samples; many episodes share it.
    chat: turns conversations into ids, and the policy's turns back.
    sampling: how tokens are drawn.
    config: turns, tokens and time-outs of an episode.
    run_seed: seed that all addressed randomness starts from.
    seats: other players than the policy, by agent.
    only: name of the one policy that is measured; with None all trained policies learn.
    background: its episodes get slots of the engine only when those of others want none.
  """

  engine: Engine
  chat: Chat
  sampling: SamplingConfig
  config: RolloutConfig
  run_seed: int
  seats: Mapping[str, SeatPlayer] = dataclasses.field(default_factory=dict)
  only: str | None = None
  background: bool = False

  def at(self, numbers: Callable[[Any], Any]) -> Player:
    """With numbers in the place of schedules."""
    config, sampling = numbers(self.config), numbers(self.sampling)
    return dataclasses.replace(self, config=config, sampling=sampling)

  def priority(self, address: keys.Address) -> tuple[int, ...]:
    """Of an episode's contexts in the engine; the lowest get slots first."""
    return (sys.maxsize, *address) if self.background else address

  def take_seats(self, agents: Sequence[str], address: keys.Address) -> dict[str, Seat]:
    """Who sits where in an episode; see ``rollout.seats.take_seats``."""
    own = own_player(self.chat, self.engine, self.sampling)
    by = {"never": 0, "step": address[0], "sample": address[2]}[self.config.rotate_seats]
    others = self.seats
    if self.only is not None:
      own, *rest = (
        dataclasses.replace(player, learns=player.policy == self.only)
        for player in (own, *others.values())
      )
      others = dict(zip(others, rest, strict=True))
    return take_seats(agents, own, others, rotate=by)


class SharedPrefixes:
  """Prompts that are prefilled once for all episodes of a group."""

  def __init__(self, engine: Engine):
    self._engine = engine
    self._prefills: dict[tuple[int, tuple[int, ...]], asyncio.Task[Prefix]] = {}

  async def get(
    self, ids: Sequence[int], priority: tuple[int, ...], engine: Engine | None = None
  ) -> Prefix:
    """The prefix of ``ids``. The first caller starts the prefill, with its priority.

    ``engine`` is that of another player; None is the policy's.
    """
    at = self._engine if engine is None else engine
    key = (id(at), tuple(ids))
    if key not in self._prefills:
      self._prefills[key] = asyncio.ensure_future(at.prefill(list(ids), priority=priority))
    # An episode that is cancelled while it waits must not take the prefill from its siblings.
    return await asyncio.shield(self._prefills[key])

  async def release(self) -> None:
    """Gives all prefixes back; call it when the last episode that may ask has ended.

    They are given back even if this call is cancelled while it waits for the prefills to end.
    """
    prefills = list(self._prefills.values())
    self._prefills.clear()
    for prefill in prefills:
      prefill.cancel()
      prefill.add_done_callback(_give_back)
    await asyncio.gather(*prefills, return_exceptions=True)


def _give_back(prefill: asyncio.Task[Prefix]) -> None:
  if not prefill.cancelled() and prefill.exception() is None:
    prefill.result().release()


class TurnWatcher(Protocol):
  """Is called before and after each turn of an episode."""

  async def before(self, episode: Episode) -> None:
    """The policy is about to take turn ``episode.turn``."""

  def after(self, episode: Episode, sample: Sample) -> None:
    """It took turn ``episode.turn - 1`` and drew ``sample``."""


@dataclasses.dataclass(eq=False)
class BranchPoint:
  """An episode as it was before a turn of the policy, from which others can continue.

  It holds a context of the engine, and the environment's resources for ``state``, until
  ``release``.
  """

  episode: Episode  # a copy that never acts
  state: bytes  # of the environment
  released: bool = False

  def release(self) -> None:
    """Frees its resources; episodes that continued from here are not affected. May be called
    twice."""
    if self.released:
      return
    self.released = True
    self.episode.discard(self.state)


class Episode:
  """One run of one environment. Its operations act for one seat and record what happened.

  The environment says which agent acts next; ``act``, ``step`` and ``length`` refer to that agent.
  An environment of one agent has one seat.

  A program calls ``reset``, ``open``, then ``act``, ``step`` and ``observe`` in turn. Each may
  raise ``EpisodeEnd``; a program that catches it must raise it again. A program that can be
  branched skips ``reset`` and ``open`` if ``opened`` is true, and keeps its memory between turns in
  the episode.

  Attributes:
    task: what is to be solved.
    address: (step, task id, sample), from which all its randomness follows.
    player: engine, chat and settings.
    turn: model calls made so far, for all seats.
    watcher: called around turns; may be None.
  """

  def __init__(
    self,
    task: Task,
    address: keys.Address,
    *,
    player: Player,
    environment: Environment,
    prefixes: SharedPrefixes,
    watcher: TurnWatcher | None = None,
    branch: int | None = None,
  ):
    self.task = task
    self.address = address
    self.player = player
    self.turn = 0
    self.watcher = watcher
    self._environment = environment
    self._environment_address = address  # whose key started the environment
    self._branches = None if branch is None else [(0, branch)]  # first segment, branch
    self._prefixes = prefixes
    self._time_left = player.config.episode_timeout
    self._seats = player.take_seats(environment.agents, address)
    self._acting = next(iter(self._seats))
    self._builder = TrajectoryBuilder(
      step=address[0], task_id=address[1], sample=address[2], source=task.source
    )
    self._tools: list[ToolRecord] = []
    self._guards: list[GuardRecord] = []
    # Who is paid and for which segment; None where the agent had not acted.
    self._rewards: list[tuple[str, int | None, Reward]] = []
    self._answer: str | None = None
    self._asked_seconds = 0.0  # of the environment's latest answer
    self._close_error = ""

  @property
  def seat(self) -> Seat:
    """That of the agent whose turn it is."""
    return self._seats[self._acting]

  @property
  def length(self) -> int:
    """Tokens so far, of the agent whose turn it is."""
    return self.seat.length

  @property
  def opened(self) -> bool:
    """Whether a conversation has begun; for a branched episode this is true from the start."""
    return any(seat.opened for seat in self._seats.values())

  async def mark(self) -> BranchPoint | None:
    """A branch point at this moment, before a turn; None if the environment cannot be copied now.

    Raises:
      ConfigError: the environment has no snapshots.
    """
    if not self.opened:
      raise RuntimeError("mark() before open(observation)")
    seats = await fork_seats(self._seats)
    try:
      state = await self._snapshot()
    except BaseException:
      close_seats(seats)
      raise
    if state is None:
      close_seats(seats)
      return None
    twin = copy.copy(self)
    twin._builder = self._builder.branch(self.address[2])
    twin._tools, twin._rewards = list(self._tools), list(self._rewards)
    twin._guards = list(self._guards)
    twin._seats = seats
    return BranchPoint(twin, state)

  async def _snapshot(self) -> bytes | None:
    """The environment's state; None where it failed to give it, which is logged."""
    environment = self._environment
    try:
      state = await self._bounded(lambda: take_snapshot(environment))
    except Exception as error:
      # It may well go on.
      _log.warning("nobody can go on from %s at this turn", self.address, exc_info=error)
      return None
    if state is None:
      raise ConfigError(
        f"the sampler lets episodes go on from where others were, and {type(environment).__name__} "
        "has no snapshots; allowed: an environment with snapshot() and restore(), or "
        "config.rollout.sampler='independent' or 'oversample'."
      )
    return state

  async def restore(self, point: BranchPoint, branch: int) -> None:
    """Goes on from ``point``, an episode of this task, as the branch ``branch`` of it."""
    origin = point.episode
    key = keys.environment_key(self.player.run_seed, origin._environment_address)
    environment = self._environment
    self._time_left = origin._time_left
    await self._ask("resume", type(None), lambda: environment.resume(self.task, key, point.state))
    self._seats = await fork_seats(origin._seats)
    self._acting, self.turn = origin._acting, origin.turn
    self._builder = origin._builder.branch(self.address[2])
    self._tools, self._rewards = list(origin._tools), list(origin._rewards)
    self._guards = list(origin._guards)
    self._answer, self._asked_seconds = origin._answer, origin._asked_seconds
    self._environment_address = origin._environment_address
    self._offer()
    self._branches = [*(origin._branches or []), (len(self._builder.segments), branch)]

  async def reset(self) -> Observation:
    """Starts the environment."""
    if self.opened:
      raise RuntimeError(
        "reset() in an episode that goes on from a branch: a program that can be branched calls "
        "reset() and open() only where episode.opened is False, as tool_episode does"
      )
    key = keys.environment_key(self.player.run_seed, self.address)
    environment = self._environment
    observation = await self._ask("reset", Observation, lambda: environment.reset(self.task, key))
    self._offer()
    return observation

  def _offer(self) -> None:
    for agent, seat in self._seats.items():
      seat.offered = self._environment.tools_of(agent)

  async def open(self, observation: Observation) -> None:
    """Shows the first observation to the agent who acts first."""
    await self._open(self._hear(observation, Boundary.RESET), Boundary.RESET)

  def _hear(self, observation: Observation, at: Boundary) -> tuple[Message, ...]:
    """Gives the turn to the next agent; returns the messages that it has not read yet."""
    seats = self._seats
    if len(seats) == 1 and observation.next not in seats and not observation.others:
      observation = dataclasses.replace(observation, next=self._acting)
    self._check_agents([observation.next, *observation.others], at)
    for agent, messages in observation.others.items():
      seats[agent].heard += tuple(messages)
    self._acting = observation.next
    messages, self.seat.heard = (*self.seat.heard, *observation.messages), ()
    self.seat.said += messages
    return messages

  def _check_agents(self, named: Iterable[str], at: Boundary) -> None:
    unknown = sorted(set(named) - set(self._seats))
    if unknown:
      message = (
        f"{at}() speaks of the agents {', '.join(unknown)}; allowed: {', '.join(self._seats)}"
      )
      raise self._failed(message, Fault(Owner.INFRASTRUCTURE, "environment", message), None)

  async def _open(self, messages: Sequence[Message], at: Boundary, *, shared: bool = True) -> None:
    """Begins a conversation; ``shared`` if others of the group may begin with the same prompt."""
    seat, player = self.seat, self.seat.player
    with _encoding(at):
      spans = player.chat.prompt(messages, seat.offered)
    ids = _flat(spans)
    limit = self.player.config.max_total_tokens
    if len(ids) >= limit:
      raise EpisodeEnd(
        Status.TRUNCATED,
        f"the prompt has {len(ids)} tokens and leaves no room for an answer within "
        f"rollout.max_total_tokens={limit}",
      )
    if player.engine is not None:
      priority = self.player.priority(self.address)
      with _engine():
        if shared:
          prefix = await self._prefixes.get(ids, priority, player.engine)
          seat.context = await player.engine.open(prefix, priority=priority)
        else:
          seat.context = await player.engine.open_ids(ids, priority=priority)
    seat.opened = True
    self._append(spans, seconds=0.0)

  async def act(self) -> Action:
    """Draws the turn of the agent who acts now."""
    seat = self.seat
    if not seat.opened:
      raise RuntimeError("act() before open(observation)")
    cut = await (self._sample(seat) if seat.player.service is None else self._be_served(seat))
    chat = seat.player.chat
    if forged := chat.reserved_ids.intersection(seat.drawn):
      raise EpisodeEnd(
        Status.POLICY_ERROR,
        f"the policy drew {chat.tokenizer.decode(sorted(forged))} within its own turn",
      )
    try:
      text, calls = chat.parse(seat.drawn, seat.offered)
    except Exception as error:
      message = f"the turn cannot be read: {describe(error)}"
      raise self._failed(message, fault_of(error, Boundary.STEP), error) from error
    seat.said += (Message("assistant", text, calls),)
    return Action(text, calls, truncated=cut, agent=seat.agent)

  async def _sample(self, seat: Seat) -> bool:
    """Draws a turn of ``seat`` and records it; returns whether it was cut off."""
    context, config, chat = seat.context, self.player.config, seat.player.chat
    assert context is not None
    grammar = None
    if config.grammar == "tool_calls":
      grammar = compile_tool_calls(chat, seat.offered)
    watcher = self.watcher if seat.player.learns else None
    if watcher is not None:
      await watcher.before(self)
    start = time.monotonic()
    with _engine():
      sample = await context.generate(
        SampleRequest(
          key_data=keys.turn_key(self.player.run_seed, self.address, self.turn),
          max_tokens=min(config.max_tokens_per_turn, config.max_total_tokens - seat.length),
          sampling=seat.player.sampling or self.player.sampling,
          stop_ids=chat.stop_ids,
          grammar=grammar,
        )
      )
    cut = sample.finish is not Finish.STOP
    seat.last = self._builder.append_sampled(
      sample.token_ids,
      sample.behaviour_log_probs,
      sample.entropies,
      sample.versions,
      weights=None if seat.player.learns else np.zeros(len(sample.token_ids), np.float32),
      parent=seat.tip,
      agent=seat.agent,
      policy=seat.player.policy,
      visible_to=seat.visible_to,
      seconds=time.monotonic() - start,
      flags=frozenset({Flag.TRUNCATED} if cut else ()),
    )
    self._note_turn(seat, sample.token_ids.tolist())
    if len(context) != seat.length:
      raise RuntimeError(
        f"the engine's context of {self.address} holds {len(context)} tokens, the record "
        f"{seat.length}: the policy no longer sees what is recorded"
      )
    if watcher is not None:
      watcher.after(self, sample)
    return cut

  async def _be_served(self, seat: Seat) -> bool:
    """Asks the service of ``seat`` for a turn and records it; returns whether it was cut off."""
    player, start = seat.player, time.monotonic()
    assert player.service is not None
    key = keys.service_key(self.player.run_seed, self.address, self.turn)
    try:
      if seat.offered and isinstance(player.service, ToolService):
        turn = await player.service.turn(seat.said, seat.offered, key=key)
      else:
        turn = Message("assistant", await player.service.reply(seat.said, key=key))
      ids = player.chat.assistant(turn, seat.offered)
    except Exception as error:
      message = f"{player.policy}, which plays {seat.agent}, raised {describe(error)}"
      fault = getattr(error, "fault", None)
      if isinstance(fault, Fault) and not fault.masks:
        # The service refused the request, for instance because the conversation is too long.
        raise EpisodeEnd(Status.TRUNCATED, message, fault) from error
      fault = Fault(Owner.INFRASTRUCTURE, "service", message)
      raise self._failed(message, fault, error) from error
    seat.last = self._builder.append(
      "assistant",
      ids,
      parent=seat.tip,
      agent=seat.agent,
      policy=player.policy,
      visible_to=seat.visible_to,
      seconds=time.monotonic() - start,
    )
    self._note_turn(seat, ids)
    return False

  def _note_turn(self, seat: Seat, ids: list[int]) -> None:
    assert seat.last is not None
    seat.grow(seat.last, len(ids))
    seat.drawn = ids
    seat.turns += 1
    self.turn += 1

  async def step(self, action: Action) -> Step:
    """Hands the action to the environment; raises EpisodeEnd where that ends the episode."""
    seat = self.seat
    try:
      step = await self._ask("step", Step, lambda: self._environment.step(action))
    except EpisodeEnd:
      self._flag_last(Flag.NOT_EXECUTED)
      raise
    self._check_agents(step.rewards, Boundary.STEP)
    tools: Sequence[ToolRecord] = step.tools
    if seat.several:
      tools = [dataclasses.replace(record, agent=seat.agent) for record in tools]
    self._tools.extend(tools)
    self._guards.extend(step.guards)
    self._answer = step.answer
    if step.reward is not None:
      self._rewards.append((seat.agent, seat.last, step.reward))
    self._rewards += [(a, self._seats[a].last, paid) for a, paid in step.rewards.items()]
    failed = any(record.status != ToolStatus.OK for record in step.tools)
    if failed:
      self._flag_last(Flag.TOOL_ERROR)
    if any(g.decision != "continue" for g in step.guards):
      self._flag_last(Flag.DENIED)
    if not step.executed:
      self._flag_last(Flag.NOT_EXECUTED)
    if step.status is not Status.OK:
      fault = step.fault
      if fault is None and step.status.masked:
        fault = Fault(Owner.INFRASTRUCTURE, "environment", _reason(step))
      raise EpisodeEnd(step.status, _reason(step), fault)
    if step.terminated:
      raise EpisodeEnd(Status.OK, step.reason)
    if step.truncated:
      raise EpisodeEnd(Status.TRUNCATED, _reason(step))
    return step

  async def observe(self, observation: Observation) -> None:
    """Shows the next agent its new messages, if a turn and room for an answer are left."""
    if not self.opened:
      raise RuntimeError("observe() before open(observation)")
    author = self._acting
    messages = self._next_turn(observation)
    seat, config = self.seat, self.player.config
    try:
      if not seat.opened:
        await self._open(messages, Boundary.STEP)
        return
      with _encoding(Boundary.STEP):
        spans = seat.player.chat.observation(messages, seat.drawn, seat.offered)
    except EpisodeEnd as end:
      if end.status is Status.POLICY_ERROR:  # of who wrote it, not of who was to read it
        self._acting = author
      raise
    ids = _flat(spans)
    if seat.length + len(ids) >= config.max_total_tokens:
      raise EpisodeEnd(
        Status.TRUNCATED,
        f"{seat.length} tokens and an observation of {len(ids)} leave no room for a turn within "
        f"rollout.max_total_tokens={config.max_total_tokens}",
      )
    if seat.context is not None:
      with _engine():
        await seat.context.extend(ids)
    self._append(spans, seconds=self._asked_seconds)

  async def rewrite(self, observation: Observation) -> None:
    """Shows the next agent these messages instead of its whole history.

    Programs that summarise a history, discard parts of it or rebuild it from memory call this
    instead of ``observe``. The messages are the whole new history and begin a new branch of the
    record. Tokens drawn before stay on their own branch and are trained there; if the new history
    repeats them, the repetition is text without loss.
    """
    if not self.opened:
      raise RuntimeError("rewrite() before open(observation)")
    messages = self._next_turn(observation)
    seat = self.seat
    self._record_columns(seat)
    seat.restart(messages)
    await self._open(messages, Boundary.STEP, shared=False)

  def _next_turn(self, observation: Observation) -> tuple[Message, ...]:
    """Gives the turn to the next agent, if a turn is left; returns its unread messages."""
    messages, limit = self._hear(observation, Boundary.STEP), self.player.config.max_turns
    if self.seat.turns >= limit:
      raise EpisodeEnd(Status.TRUNCATED, f"all rollout.max_turns={limit} turns are used")
    return messages

  def _record_columns(self, seat: Seat) -> None:
    if seat.player.learns and seat.context is not None:
      self._builder.record_path(seat.context.columns, seat.tip)

  def discard(self, state: bytes) -> None:
    """Frees the contexts of a copy, and what the environment keeps for its ``state``."""
    close_seats(self._seats)
    try:
      self._environment.discard(state)
    except Exception as error:
      _log.warning("a snapshot of %s cannot be freed", self.address, exc_info=error)

  async def close(self) -> None:
    """Frees the contexts and the environment; never raises for what the environment does."""
    close_seats(self._seats)
    try:
      await self._bounded(self._environment.close)
    except Exception as error:
      _log.warning("the environment of %s failed to close", self.address, exc_info=error)
      self._close_error = describe(error)

  def build(self, status: Status, reason: str, fault: Fault | None = None) -> Trajectory:
    """The trajectory so far, not yet scored."""
    several = self.seat.several
    if status is Status.ENV_ERROR:
      self._flag_last(Flag.ENV_FAULT)
    for seat in self._seats.values():
      self._record_columns(seat)
    texts = {"reason": reason, "close_error": self._close_error}
    metadata: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if fault is not None:
      metadata[FAULT] = fault.to_dict()
    if self._guards:
      metadata[GUARDS] = [dataclasses.asdict(record) for record in self._guards]
    if self._branches is not None:
      metadata[BRANCHES] = self._branch_of_segments(self._branches)
    if status is Status.POLICY_ERROR:
      self._take_back()
      if several:
        metadata[ENDED_BY] = self._acting
    paid = self._paid()
    by_turn: dict[str, list[float | None]] = {}
    if by_segment := self._by_segment(paid):
      by_turn[ENVIRONMENT_REWARD] = by_segment
    trajectory = self._builder.build(
      status=status,
      tools=self._tools,
      answer=self._answer,
      metadata=metadata,
      turn_rewards=by_turn,
      agents=self._outcomes(paid) if several else None,
    )
    if not several and self._acting in paid:
      trajectory.reward_parts[ENVIRONMENT_REWARD] = paid[self._acting]
    return trajectory

  def _paid(self) -> dict[str, Reward]:
    """Sum of the environment's payments by agent; agents without any are left out."""
    by_agent: dict[str, list[Reward]] = {}
    for agent, _, reward in self._rewards:
      by_agent.setdefault(agent, []).append(reward)
    return {agent: _total(rewards) for agent, rewards in by_agent.items()}

  def _outcomes(self, paid: Mapping[str, Reward]) -> dict[str, Outcome]:
    return {
      agent: outcome_of(
        seat.player.learns, {ENVIRONMENT_REWARD: paid[agent]} if agent in paid else {}
      )
      for agent, seat in self._seats.items()
    }

  def _by_segment(self, paid: Mapping[str, Reward]) -> list[float | None]:
    """Payment for each segment, None without one; [] if nobody was paid.

    An agent that is paid before its first turn is paid for its prompt. Agents with an invalid sum,
    or that saw nothing, are left out.
    """
    values: list[float | None] = [None] * len(self._builder.segments)
    placed = False
    for agent, index, reward in self._rewards:
      place = self._seats[agent].first if index is None else index
      if place is not None and paid[agent].valid and reward.value is not None:
        values[place] = (values[place] or 0.0) + reward.value
        placed = True
    return values if placed else []

  def _take_back(self) -> None:
    """After a breach the last turn lowers the sum of the environment's rewards to the least
    possible."""
    agent = self._acting
    earned = _total([reward for name, _, reward in self._rewards if name == agent]).value
    least = self._environment.least_return
    if earned is not None and earned > least:
      self._rewards.append((agent, self.seat.last, Reward(least - earned)))

  def _branch_of_segments(self, branches: list[tuple[int, int]]) -> list[int]:
    written = [0] * len(self._builder.segments)
    for first, branch in branches:
      written[first:] = [branch] * (len(written) - first)
    return written

  async def _ask(self, what: str, kind: type[T], call: Callable[[], Awaitable[T]]) -> T:
    """Awaits the environment within both time-outs; what goes wrong ends the episode."""
    config = self.player.config
    timeout = min(config.environment_timeout, self._time_left)
    at = Boundary.STEP if what == "step" else Boundary.RESET
    clock = Clock()
    try:
      answer = await self._bounded(call, timeout, clock)
    except TooSlow as slow:
      if timeout < config.environment_timeout:
        message = f"rollout.episode_timeout={config.episode_timeout:g} s ran out in {what}()"
        raise EpisodeEnd(Status.TRUNCATED, message) from slow
      message = f"{what}() took longer than rollout.environment_timeout={timeout:g} s"
      if at is Boundary.STEP:  # the time that an action takes is the policy's
        raise EpisodeEnd(Status.TRUNCATED, message, Fault(Owner.POLICY, "time", message)) from slow
      fault = Fault(Owner.INFRASTRUCTURE, "time", message)
      raise self._failed(message, fault, slow) from slow
    except Exception as error:
      message = f"{what}() raised {describe(error)}"
      raise self._failed(message, fault_of(error, at), error) from error
    self._asked_seconds = clock.elapsed
    self._time_left -= self._asked_seconds
    if not isinstance(answer, kind):
      message = f"{what}() returned {type(answer).__name__} instead of {kind.__name__}"
      raise self._failed(message, Fault(Owner.INFRASTRUCTURE, "environment", message), None)
    return answer

  async def _bounded(
    self,
    call: Callable[[], Awaitable[T]],
    timeout: float | None = None,
    clock: Clock | None = None,
  ) -> T:
    """``await call()`` of the environment, within its own time-out or a shorter one."""
    config = self.player.config
    seconds = config.environment_timeout if timeout is None else timeout
    with clock or Clock() as own:
      return await run_within(call, seconds, own, grace=config.cancel_grace, name="an environment")

  def _failed(self, message: str, fault: Fault, error: Exception | None) -> EpisodeEnd:
    _log.warning("environment of %s: %s", self.address, message, exc_info=error)
    status = Status.ENV_ERROR if fault.masks else Status.POLICY_ERROR
    return EpisodeEnd(status, message, fault)

  def _flag_last(self, flag: Flag) -> None:
    """Marks the last turn of the agent who acts now, if it has one."""
    if self.seat.last is not None:
      self._builder.flag(self.seat.last, flag)

  def _append(self, spans: Sequence[Span], *, seconds: float) -> None:
    """Records spans that were not drawn, for the seat; the first one carries the time they took."""
    seat = self.seat
    for owner, ids in spans:
      index = self._builder.append(
        owner,
        ids,
        parent=seat.tip,
        calls=seat.turns,
        agent=seat.agent,
        policy=seat.player.policy,
        visible_to=seat.visible_to,
        seconds=seconds,
      )
      seat.grow(index, len(ids))
      seconds = 0.0


async def tool_episode(episode: Episode, context: ContextManager | None = None) -> None:
  """Agents act and the environment answers, until one of them or a limit ends the episode.

  Args:
    episode: what is played.
    context: gives the new history of the next agent, or None to append the observation.
  """
  if not episode.opened:
    await episode.open(await episode.reset())
  while True:
    observation = (await episode.step(await episode.act())).observation
    history = None if context is None else await context(episode, observation)
    if history is None:
      await episode.observe(observation)
    else:
      await episode.rewrite(history)


async def run_episode(
  program: EpisodeProgram,
  task: Task,
  address: keys.Address,
  *,
  player: Player,
  make_environment: MakeEnvironment,
  prefixes: SharedPrefixes,
  start: BranchPoint | None = None,
  watcher: TurnWatcher | None = None,
  branch: int | None = None,
) -> Trajectory:
  """Runs one episode to its end and gives its record, not yet scored.

  Whatever happens, cancellation included, the context is freed and the environment closed. Errors
  of the engine and of the program itself propagate.

  Args:
    program: what happens in it.
    task: what is to be solved.
    address: where its randomness comes from.
    player, make_environment: of the run.
    prefixes: of its group.
    start: branch point to continue from; None is the beginning.
    watcher: called around its turns.
    branch: number of its branch in a tree of episodes (``record.BRANCHES``), needed with ``start``;
      None if it shares nothing.
  """
  try:
    environment = make_environment(task)
  except ConfigError:
    raise
  except Exception as error:
    _log.warning("no environment for %s", address, exc_info=error)
    reason = f"making the environment raised {describe(error)}"
    return TrajectoryBuilder(
      step=address[0], task_id=address[1], sample=address[2], source=task.source
    ).build(
      status=Status.ENV_ERROR,
      metadata={"reason": reason, FAULT: fault_of(error, Boundary.RESET).to_dict()},
    )
  episode = Episode(
    task,
    address,
    player=player,
    environment=environment,
    prefixes=prefixes,
    watcher=watcher,
    branch=branch,
  )
  ended = EpisodeEnd(Status.OK, "")
  with owned_by(address):
    try:
      if start is not None:
        assert branch is not None
        await episode.restore(start, branch)
      await program(episode)
    except EpisodeEnd as end:
      ended = end
    finally:
      await episode.close()
  return episode.build(ended.status, ended.reason, ended.fault)


@contextlib.contextmanager
def _engine() -> Iterator[None]:
  """Ends the episode if its context is too short, or lost because log-probs are not finite."""
  try:
    yield
  except NonFiniteError as error:
    raise EpisodeEnd(
      Status.ENGINE_ERROR, str(error), Fault(Owner.ENGINE, "numbers", str(error))
    ) from error
  except ContextLengthError as error:
    raise EpisodeEnd(Status.TRUNCATED, str(error)) from error


@contextlib.contextmanager
def _encoding(at: Boundary) -> Iterator[None]:
  """Ends the episode at messages that cannot become tokens: the environment's fault, unless they
  repeat text of the policy that no encoding can write, or the error knows better."""
  try:
    yield
  except (TypeError, ValueError) as error:
    known = isinstance(error, UnicodeError) or getattr(error, "fault", None) is not None
    fault = fault_of(error, at if known else Boundary.RESET)
    status = Status.ENV_ERROR if fault.masks else Status.POLICY_ERROR
    message = f"an observation cannot be encoded: {describe(error)}"
    raise EpisodeEnd(status, message, fault) from error


def _flat(spans: Sequence[Span]) -> list[int]:
  return [token for _, ids in spans for token in ids]


def _reason(step: Step) -> str:
  if step.reason:
    return step.reason
  failed = [r for r in step.tools if r.status == ToolStatus.INFRA_ERROR]
  if failed:
    return f"tool {failed[0].name} failed: {failed[0].output}"
  if step.truncated:
    return "the environment truncated the episode"
  return f"the environment reported {step.status}"


def _total(rewards: Sequence[Reward]) -> Reward:
  """The sum; invalid where one of them is."""
  invalid = [reward for reward in rewards if not reward.valid]
  return invalid[0] if invalid else Reward(sum(r.value for r in rewards if r.value is not None))
