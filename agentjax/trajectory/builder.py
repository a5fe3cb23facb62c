"""Building and reading trees of segments. No jax.

A segment continues its ``parent``; a path from a root to a leaf is one sequence of tokens as the
policy saw it. Several children of one segment are branches, several roots are contexts that were
started anew.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from agentjax.trajectory.experts import fit, join
from agentjax.trajectory.record import Flag, Reward, Segment, Status, ToolRecord, Trajectory

_FIELDS = {
  "token_ids": np.int32,
  "sampled": np.bool_,
  "weights": np.float32,
  "behaviour_log_probs": np.float32,
  "entropies": np.float32,
  "versions": np.int32,
}


# What a teacher said of tokens, and what stands where it was not asked.
TEACHERS_WORD = {
  "teacher_log_probs": np.nan,
  "teacher_top_ids": -1,
  "teacher_top_log_probs": np.nan,
}

LAST = -1  # as a parent: the segment appended last, or none where it would be the first


class TrajectoryError(ValueError):
  """A tree that is none, or per-token data that cannot be; names address, segment and field."""


@dataclasses.dataclass(frozen=True)
class TokenPath:
  """One path from a root to a leaf, concatenated; all arrays have its length n.

  Attributes:
    segments: indices of its segments in the trajectory, root first.
    token_ids: int32. sampled: bool. weights, behaviour_log_probs, entropies: float32.
    versions: int32.
    turns: int32, the model call each token belongs to.
    segment_of: int32, index in the trajectory of the segment each token stands in.
    experts: [n, routers, choices] as in ``Segment``; None where no segment has any.
    teacher_log_probs: float32, NaN where not known; None where no segment has any.
    teacher_top_ids, teacher_top_log_probs: int32 and float32 [n, k], -1 and NaN where not known;
      None where no segment has any.
  """

  segments: tuple[int, ...]
  token_ids: np.ndarray
  sampled: np.ndarray
  weights: np.ndarray
  behaviour_log_probs: np.ndarray
  entropies: np.ndarray
  versions: np.ndarray
  turns: np.ndarray
  segment_of: np.ndarray
  experts: np.ndarray | None = None
  teacher_log_probs: np.ndarray | None = None
  teacher_top_ids: np.ndarray | None = None
  teacher_top_log_probs: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.token_ids)


class TrajectoryBuilder:
  """Grows one trajectory, segment by segment, and counts turns.

  The prompt belongs to turn 0; what is sampled by the k-th model call on a path and the observation
  that answers it belong to turn k, counted from 0.

  Args:
    step, task_id, sample: the address of the episode.
    source: name of the data set.
    group: group key of the advantage; "" means the task.
  """

  def __init__(self, *, step: int, task_id: int, sample: int, source: str, group: str = "") -> None:
    self._trajectory = Trajectory(step, task_id, sample, source, segments=[], group=group)
    self._calls: list[int] = []  # model calls on the path up to and including each segment

  @property
  def segments(self) -> Sequence[Segment]:
    """What stands so far."""
    return self._trajectory.segments

  def branch(self, sample: int) -> TrajectoryBuilder:
    """A builder for another episode of the task, ``sample``, that goes on from what stands here.

    Token arrays are shared; what either builder appends or flags later is its own.
    """
    other = copy.copy(self)
    segments = [dataclasses.replace(segment) for segment in self.segments]
    other._trajectory = dataclasses.replace(self._trajectory, sample=sample, segments=segments)
    other._calls = list(self._calls)
    return other

  def append(
    self,
    owner: str,
    token_ids: Sequence[int] | np.ndarray,
    *,
    weight: float = 0.0,
    parent: int | None = LAST,
    agent: str = "agent",
    policy: str = "policy",
    visible_to: tuple[str, ...] = (),
    seconds: float = 0.0,
    flags: Iterable[Flag] = (),
  ) -> int:
    """Adds tokens the policy did not draw: prompts, markup, tool results, demonstrations.

    Args:
      owner: "system" | "user" | "assistant" | "tool" | "environment".
      token_ids: int [n].
      weight: loss weight of each token; 1 for what a demonstration teaches, and then an "assistant"
        segment counts as a model call.
      parent: index of the segment this continues; None starts a root.
      agent, policy, visible_to, seconds, flags: see ``Segment``.

    Returns:
      Index of the new segment.

    Raises:
      TrajectoryError: an impossible parent.
    """
    ids = np.array(token_ids, np.int32)
    n = len(ids)
    return self._add(
      owner,
      calls=int(owner == "assistant" and weight > 0),
      token_ids=ids,
      sampled=np.zeros(n, np.bool_),
      weights=np.full(n, weight, np.float32),
      behaviour_log_probs=np.zeros(n, np.float32),
      entropies=np.zeros(n, np.float32),
      versions=np.full(n, -1, np.int32),
      parent=parent,
      agent=agent,
      policy=policy,
      visible_to=visible_to,
      seconds=seconds,
      flags=frozenset(flags),
    )

  def append_sampled(
    self,
    token_ids: Sequence[int] | np.ndarray,
    behaviour_log_probs: Sequence[float] | np.ndarray,
    entropies: Sequence[float] | np.ndarray,
    versions: Sequence[int] | np.ndarray | int,
    *,
    weights: Sequence[float] | np.ndarray | None = None,
    parent: int | None = LAST,
    agent: str = "agent",
    policy: str = "policy",
    visible_to: tuple[str, ...] = (),
    seconds: float = 0.0,
    flags: Iterable[Flag] = (),
  ) -> int:
    """Adds one model call: tokens the policy drew.

    Args:
      token_ids: int [n]. behaviour_log_probs, entropies: float [n], nats, under the sampler.
      versions: int [n] or one int, weight version that drew them, >= 0.
      weights: loss weights [n]; None means 1. Zero where the policy wrote what it should not learn.
      parent: index of the segment this continues; None starts a root.
      agent, policy, visible_to, seconds, flags: see ``Segment``.

    Returns:
      Index of the new segment.

    Raises:
      TrajectoryError: arrays of unlike lengths, or an impossible parent.
    """
    ids = np.array(token_ids, np.int32)
    n = len(ids)
    return self._add(
      "assistant",
      calls=1,
      token_ids=ids,
      sampled=np.ones(n, np.bool_),
      weights=np.ones(n, np.float32) if weights is None else np.array(weights, np.float32),
      behaviour_log_probs=np.array(behaviour_log_probs, np.float32),
      entropies=np.array(entropies, np.float32),
      versions=np.full(n, versions, np.int32)
      if isinstance(versions, int | np.integer)
      else np.array(versions, np.int32),
      parent=parent,
      agent=agent,
      policy=policy,
      visible_to=visible_to,
      seconds=seconds,
      flags=frozenset(flags),
    )

  def path_ids(self, index: int | None = None) -> np.ndarray:
    """int32 ids from the root to segment ``index`` (default the last): the context as it stands."""
    if not self._trajectory.segments:
      return np.zeros(0, np.int32)
    last = len(self._trajectory.segments) - 1
    chain = path(self._trajectory, last if index is None else index)
    return np.concatenate([self._trajectory.segments[i].token_ids for i in chain])

  def record_experts(self, experts: np.ndarray, index: int | None = None) -> None:
    """Notes what the routers chose for the tokens from the root to segment ``index``.

    Args:
      experts: uint8 or uint16 [n, routers, choices], from the first token on; tokens beyond its end
        stay unrecorded, entries beyond theirs are dropped.
      index: the default is the last segment.
    """
    segments = self._trajectory.segments
    if not segments:
      return
    start = 0
    for i in path(self._trajectory, len(segments) - 1 if index is None else index):
      segment = segments[i]
      segment.experts = fit(experts[start : start + len(segment)], len(segment))
      start += len(segment)

  def flag(self, index: int, *flags: Flag) -> None:
    """Adds flags to a segment, for what is known only after it was appended."""
    segment = self._trajectory.segments[index]
    segment.flags = segment.flags | frozenset(flags)

  def build(
    self,
    *,
    status: Status = Status.OK,
    reward: Reward | None = None,
    tools: Iterable[ToolRecord] = (),
    answer: str | None = None,
    metadata: dict[str, Any] | None = None,
    turn_rewards: dict[str, list[float | None]] | None = None,
  ) -> Trajectory:
    """The checked trajectory. ``reward`` None means it is invalid until a reward graph ran.

    Raises:
      TrajectoryError: see ``check_trajectory``.
    """
    trajectory = dataclasses.replace(
      self._trajectory,
      segments=list(self._trajectory.segments),
      status=status,
      reward=Reward.invalid("not scored") if reward is None else reward,
      reward_parts={},  # its own: builders that were branched share what they began with
      tools=list(tools),
      answer=answer,
      metadata={} if metadata is None else metadata,
      turn_rewards={} if turn_rewards is None else turn_rewards,
    )
    check_trajectory(trajectory)
    return trajectory

  def _add(self, owner: str, *, calls: int, parent: int | None, **fields: Any) -> int:
    index = len(self._trajectory.segments)
    if parent == LAST:
      parent = index - 1 if index else None
    _check_parent(self._trajectory, index, parent)
    after = calls + (0 if parent is None else self._calls[parent])
    segment = Segment(owner=owner, parent=parent, turn=max(after - 1, 0), **fields)
    _check_segment(self._trajectory, index, segment)
    self._trajectory.segments.append(segment)
    self._calls.append(after)
    return index


def path(trajectory: Trajectory, index: int) -> tuple[int, ...]:
  """Indices of the segments from the root to segment ``index``, root first."""
  chain = []
  current: int | None = index
  while current is not None:
    chain.append(current)
    parent = trajectory.segments[current].parent
    _check_parent(trajectory, current, parent)
    current = parent
  return tuple(reversed(chain))


def leaves(trajectory: Trajectory) -> tuple[int, ...]:
  """Indices of the segments that nothing continues, in order."""
  parents = {segment.parent for segment in trajectory.segments}
  return tuple(i for i in range(len(trajectory.segments)) if i not in parents)


def children(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
  """For every segment the indices of those that continue it."""
  result: list[list[int]] = [[] for _ in trajectory.segments]
  for i, segment in enumerate(trajectory.segments):
    if segment.parent is not None:
      result[segment.parent].append(i)
  return tuple(tuple(c) for c in result)


def token_path(trajectory: Trajectory, leaf: int) -> TokenPath:
  """The tokens from the root to ``leaf`` with all that is known of each."""
  indices = path(trajectory, leaf)
  chain = [trajectory.segments[i] for i in indices]
  lengths = [len(segment) for segment in chain]
  arrays: dict[str, Any] = {
    name: np.concatenate([getattr(s, name) for s in chain]) for name in _FIELDS
  }
  for name, fill in TEACHERS_WORD.items():
    arrays[name] = join_known([getattr(s, name) for s in chain], lengths, fill)
  return TokenPath(
    segments=indices,
    turns=np.repeat(np.array([s.turn for s in chain], np.int32), lengths),
    segment_of=np.repeat(np.array(indices, np.int32), lengths),
    experts=join([s.experts for s in chain], lengths),
    **arrays,
  )


def join_known(
  parts: Sequence[np.ndarray | None], lengths: Sequence[int], fill: float
) -> np.ndarray | None:
  """Parts [n, ...] of these lengths in one array, ``fill`` where one is None; None if all are."""
  known = next((part for part in parts if part is not None), None)
  if known is None:
    return None
  filled = [
    np.full((n, *known.shape[1:]), fill, known.dtype) if part is None else part
    for part, n in zip(parts, lengths, strict=True)
  ]
  return np.concatenate(filled)


def token_paths(trajectory: Trajectory) -> list[TokenPath]:
  """One path a leaf, in order of the leaves, each token's weight counted once.

  A token that several leaves share keeps its weight on the first of them and has weight 0 on the
  others, so that sums over all paths are sums over the tree.
  """
  seen: set[int] = set()
  result = []
  for leaf in leaves(trajectory):
    tokens = token_path(trajectory, leaf)
    shared = [i for i in tokens.segments if i in seen]
    if shared:
      again = np.isin(tokens.segment_of, shared)
      tokens = dataclasses.replace(tokens, weights=np.where(again, np.float32(0), tokens.weights))
    seen.update(tokens.segments)
    result.append(tokens)
  return result


def check_trajectory(trajectory: Trajectory) -> None:
  """Raises TrajectoryError unless the tree and its per-token data hold together.

  Parents stand before their children; the arrays of a segment have one length and the dtypes of
  ``Segment``; a sampled token has a version >= 0, any other has version -1 and no log-prob or
  entropy; log-probs are finite and <= 0, entropies finite and >= 0, weights finite and >= 0. Turn
  rewards are a finite number or None for every segment.
  """
  for i, segment in enumerate(trajectory.segments):
    _check_parent(trajectory, i, segment.parent)
    _check_segment(trajectory, i, segment)
  for name, paid in trajectory.turn_rewards.items():
    if len(paid) != len(trajectory.segments) or not all(p is None or np.isfinite(p) for p in paid):
      raise TrajectoryError(
        f"trajectory {trajectory.address}: turn_rewards[{name!r}] is {paid}; allowed: a finite "
        f"number or None for each of its {len(trajectory.segments)} segments."
      )


def _check_parent(trajectory: Trajectory, index: int, parent: int | None) -> None:
  if parent is not None and not 0 <= parent < index:
    allowed = f"0..{index - 1}, or None for a root" if index else "None, as it is the first"
    raise TrajectoryError(
      f"{_where(trajectory, index)}: parent={parent}; a parent stands before its children, "
      f"allowed: {allowed}."
    )


# Rounding of a log-softmax or an entropy sum in fp32 may cross zero by about this much.
_ROUNDING = 1e-3


def _is_sound(segment: Segment) -> bool:
  """Whether the values of a segment with one kind of token are certainly possible.

  Extremes alone, as they cost a fraction of the rules below; a NaN fails every comparison.
  """
  weights, behaviour_log_probs, entropies = (
    segment.weights,
    segment.behaviour_log_probs,
    segment.entropies,
  )
  if not len(segment) or segment.token_ids.min() < 0:
    return False
  if not (weights.min() >= 0 and weights.max() < np.inf):
    return False
  if segment.sampled.all():
    return bool(
      segment.versions.min() >= 0
      and behaviour_log_probs.max() <= _ROUNDING
      and behaviour_log_probs.min() > -np.inf
      and entropies.min() >= -_ROUNDING
      and entropies.max() < np.inf
    )
  return bool(
    not segment.sampled.any()
    and segment.versions.max() < 0
    and not behaviour_log_probs.any()
    and not entropies.any()
  )


def _check_segment(trajectory: Trajectory, index: int, segment: Segment) -> None:
  n = len(segment.token_ids)
  for name, dtype in _FIELDS.items():
    array = getattr(segment, name)
    if array.shape != (n,) or array.dtype != dtype:
      raise TrajectoryError(
        f"{_where(trajectory, index)}: {name} is {array.dtype}{list(array.shape)}; allowed: "
        f"{np.dtype(dtype)}[{n}], as there are {n} token ids."
      )
  experts = segment.experts
  if experts is not None and (
    experts.ndim != 3 or len(experts) != n or experts.dtype not in (np.uint8, np.uint16)
  ):
    raise TrajectoryError(
      f"{_where(trajectory, index)}: experts is {experts.dtype}{list(experts.shape)}; allowed: "
      f"None, or uint8 or uint16 [{n}, routers, choices], as there are {n} token ids."
    )
  teacher = segment.teacher_log_probs
  if teacher is not None and (teacher.shape != (n,) or teacher.dtype != np.float32):
    raise TrajectoryError(
      f"{_where(trajectory, index)}: teacher_log_probs is {teacher.dtype}{list(teacher.shape)}; "
      f"allowed: None, or float32[{n}], as there are {n} token ids."
    )
  _check_candidates(trajectory, index, segment)
  if _is_sound(segment):
    return
  drawn = segment.sampled
  rules = (
    ("token_ids", segment.token_ids >= 0, "ids >= 0"),
    ("versions", (segment.versions >= 0) == drawn, ">= 0 where sampled, -1 elsewhere"),
    (
      "behaviour_log_probs",
      np.isfinite(segment.behaviour_log_probs)
      & np.where(drawn, segment.behaviour_log_probs <= _ROUNDING, segment.behaviour_log_probs == 0),
      "finite and <= 0 where sampled, 0 elsewhere",
    ),
    (
      "entropies",
      np.isfinite(segment.entropies)
      & np.where(drawn, segment.entropies >= -_ROUNDING, segment.entropies == 0),
      "finite and >= 0 where sampled, 0 elsewhere",
    ),
    ("weights", np.isfinite(segment.weights) & (segment.weights >= 0), "finite and >= 0"),
  )
  for name, good, allowed in rules:
    if not good.all():
      at = int(np.argmin(good))
      raise TrajectoryError(
        f"{_where(trajectory, index)}: {name}[{at}]={getattr(segment, name)[at]} "
        f"(sampled={bool(drawn[at])}); allowed: {allowed}."
      )


def _check_candidates(trajectory: Trajectory, index: int, segment: Segment) -> None:
  n, ids, log_probs = len(segment), segment.teacher_top_ids, segment.teacher_top_log_probs
  if ids is None and log_probs is None:
    return
  given = [f"{x.dtype}{list(x.shape)}" if x is not None else "None" for x in (ids, log_probs)]
  k = ids.shape[-1] if ids is not None and ids.ndim == 2 else "k"
  if given != [f"int32[{n}, {k}]", f"float32[{n}, {k}]"]:
    raise TrajectoryError(
      f"{_where(trajectory, index)}: teacher_top_ids and teacher_top_log_probs are "
      f"{' and '.join(given)}; allowed: None for both, or int32[{n}, k] and float32[{n}, k], as "
      f"there are {n} token ids."
    )


def _where(trajectory: Trajectory, index: int) -> str:
  step, task_id, sample = trajectory.address
  return f"trajectory (step={step}, task={task_id}, sample={sample}) segment {index}"
