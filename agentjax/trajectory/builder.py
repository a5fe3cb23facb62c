"""Building and reading trees of segments. No jax.

A segment continues its ``parent``; a path from a root to a leaf is one sequence of tokens as the
policy saw it. Several children of one segment are branches, several roots are contexts that were
started again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from agentjax.trajectory.columns import (
  Column,
  ColumnError,
  core_fields,
  find_column,
  get_column,
  join_known,
  known_names,
  value_or_fill,
)
from agentjax.trajectory.experts import fit
from agentjax.trajectory.record import (
  Flag,
  Outcome,
  Reward,
  Segment,
  Status,
  ToolRecord,
  Trajectory,
)

LAST = -1  # as a parent: the segment appended last, or none where it would be the first


class TrajectoryError(ValueError):
  """An invalid tree, or impossible per-token data; names address, segment and field."""


@dataclasses.dataclass(frozen=True)
class TokenPath:
  """One path from a root to a leaf, concatenated; all arrays have its length n.

  Attributes:
    segments: indices of its segments in the trajectory, root first.
    token_ids: int32. sampled: bool. weights, behaviour_log_probs, entropies: float32.
    versions: int32.
    turns: int32, the model call each token belongs to.
    segment_of: int32, index in the trajectory of the segment each token stands in.
    columns: by name [n, ...], the registered columns of tokens and turns that a segment has, with
      the fill where others have none. A turn's value is repeated on all tokens of its segment.
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
  columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return len(self.token_ids)

  def column(self, name: str) -> np.ndarray:
    """[n, ...] of a column of tokens or turns; its fill if no segment has one."""
    return value_or_fill(self.columns, name, (len(self),))


class SegmentFields(TypedDict, total=False):
  """Where a segment stands, and what any segment may have.

  Attributes:
    parent: index of the segment this continues; None starts a root; the default is the last one.
    agent, policy, visible_to, seconds, flags: see ``Segment``.
    columns: by name what else is known, see ``TrajectoryBuilder.set_columns``.
  """

  parent: int | None
  agent: str
  policy: str
  visible_to: tuple[str, ...]
  seconds: float
  flags: Iterable[Flag]
  columns: Mapping[str, Any] | None


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
    """A builder for another episode of the task, ``sample``, that continues from the segments so
    far.

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
    calls: int = 0,
    **fields: Unpack[SegmentFields],
  ) -> int:
    """Adds tokens the policy did not draw: prompts, markup, tool results, demonstrations.

    Args:
      owner: "system" | "user" | "assistant" | "tool" | "environment".
      token_ids: int [n].
      weight: loss weight of each token; 1 for targets of a demonstration. With weight, an
        "assistant" segment counts as a model call.
      calls: model calls before a root, if a history was rewritten; the count of turns continues.
      fields: see ``SegmentFields``.

    Returns:
      Index of the new segment.

    Raises:
      TrajectoryError: an impossible parent.
      ColumnError: an unknown column.
    """
    ids = np.array(token_ids, np.int32)
    n = len(ids)
    before = calls if fields.get("parent", LAST) is None else 0
    return self._add(
      owner,
      calls=int(owner == "assistant" and weight > 0) + before,
      token_ids=ids,
      sampled=np.zeros(n, np.bool_),
      weights=np.full(n, weight, np.float32),
      behaviour_log_probs=np.zeros(n, np.float32),
      entropies=np.zeros(n, np.float32),
      versions=np.full(n, -1, np.int32),
      **fields,
    )

  def append_sampled(
    self,
    token_ids: Sequence[int] | np.ndarray,
    behaviour_log_probs: Sequence[float] | np.ndarray,
    entropies: Sequence[float] | np.ndarray,
    versions: Sequence[int] | np.ndarray | int,
    *,
    weights: Sequence[float] | np.ndarray | None = None,
    **fields: Unpack[SegmentFields],
  ) -> int:
    """Adds one model call: tokens the policy drew.

    Args:
      token_ids: int [n]. behaviour_log_probs, entropies: float [n], nats, under the sampler.
      versions: int [n] or one int, weight version that drew them, >= 0.
      weights: loss weights [n]; None means 1. Zero for tokens that the policy should not learn.
      fields: see ``SegmentFields``.

    Returns:
      Index of the new segment.

    Raises:
      TrajectoryError: arrays of unlike lengths, or an impossible parent.
      ColumnError: an unknown column.
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
      **fields,
    )

  def record_experts(self, experts: np.ndarray, index: int | None = None) -> None:
    """Records the routers' choices for the tokens from the root to segment ``index``.

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
      chosen = fit(experts[start : start + len(segment)], len(segment))
      segments[i] = segment.with_columns({"experts": chosen})
      start += len(segment)

  def set_columns(self, index: int, values: Mapping[str, Any]) -> None:
    """Records columns of the tokens of segment ``index``, or of its turn.

    Args:
      index: of the segment.
      values: by name of a registered column, one value per token, or one value for a column of
        turns.

    Raises:
      ColumnError: an unknown column.
      TrajectoryError: values of another shape.
    """
    segment = self._trajectory.segments[index].with_columns(_cast(values))
    _check_segment(self._trajectory, index, segment)
    self._trajectory.segments[index] = segment

  def flag(self, index: int, *flags: Flag) -> None:
    """Adds flags to a segment after it was appended."""
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
    columns: Mapping[str, Any] | None = None,
    agents: Mapping[str, Outcome] | None = None,
  ) -> Trajectory:
    """The checked trajectory. ``reward`` None means it is invalid until a reward graph ran.

    ``columns`` are those of sequences, one value each; ``agents`` as in ``Trajectory``.

    Raises:
      ColumnError: an unknown column.
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
      columns=_cast(columns),
      agents={} if agents is None else agents,
    )
    check_trajectory(trajectory)
    return trajectory

  def _add(
    self,
    owner: str,
    *,
    calls: int,
    parent: int | None = LAST,
    flags: Iterable[Flag] = frozenset(),
    columns: Mapping[str, Any] | None = None,
    **fields: Any,
  ) -> int:
    index = len(self._trajectory.segments)
    if parent == LAST:
      parent = index - 1 if index else None
    _check_parent(self._trajectory, index, parent)
    after = calls + (0 if parent is None else self._calls[parent])
    segment = Segment(
      owner=owner,
      parent=parent,
      turn=max(after - 1, 0),
      flags=frozenset(flags),
      columns=_cast(columns),
      **fields,
    )
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
  """Indices of the segments without a continuation, in order."""
  parents = {segment.parent for segment in trajectory.segments}
  return tuple(i for i in range(len(trajectory.segments)) if i not in parents)


def token_path(trajectory: Trajectory, leaf: int) -> TokenPath:
  """The tokens from the root to ``leaf`` with all their columns."""
  indices = path(trajectory, leaf)
  chain = [trajectory.segments[i] for i in indices]
  lengths = [len(segment) for segment in chain]
  arrays: dict[str, Any] = {
    column.name: np.concatenate([getattr(s, column.name) for s in chain])
    for column in core_fields(Segment)
  }
  extra = {}
  for column in known_names([s.columns for s in chain], "token", "turn"):
    parts = [_on_tokens(column, segment) for segment in chain]
    extra[column.name] = join_known(column, parts, lengths)
  return TokenPath(
    segments=indices,
    turns=np.repeat(np.array([s.turn for s in chain], np.int32), lengths),
    segment_of=np.repeat(np.array(indices, np.int32), lengths),
    columns=extra,
    **arrays,
  )


def _on_tokens(column: Column, segment: Segment) -> np.ndarray | None:
  """[n, ...]: a turn's value on every token of its segment."""
  values = segment.columns.get(column.name)
  if values is None or column.level == "token":
    return values
  return np.broadcast_to(values, (len(segment), *values.shape))


def _cast(columns: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
  return {name: get_column(name).cast(values) for name, values in (columns or {}).items()}


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
  """Raises TrajectoryError unless the tree and its per-token data are consistent.

  Parents stand before their children; the arrays of a segment have one length and the dtypes that
  their columns are registered with; a sampled token has a version >= 0, any other has version -1
  and no log-prob or entropy; log-probs are finite and <= 0, entropies finite and >= 0, weights
  finite and >= 0. Turn rewards are a finite number or None for every segment.
  """
  for i, segment in enumerate(trajectory.segments):
    _check_parent(trajectory, i, segment.parent)
    _check_segment(trajectory, i, segment)
  _check_columns(trajectory.columns, "sequence", (), f"trajectory {trajectory.address}")
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

  Checks only extremes, which is much cheaper than the rules below; a NaN fails every comparison.
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
  for column in core_fields(Segment):
    try:
      column.check(getattr(segment, column.name), (n,))
    except ColumnError as error:
      raise TrajectoryError(
        f"{_where(trajectory, index)}: {error}, as there are {n} token ids."
      ) from error
  if segment.columns:
    _check_columns(segment.columns, "token", (n,), _where(trajectory, index))
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


def _check_columns(
  columns: Mapping[str, np.ndarray], level: str, rows: tuple[int, ...], where: str
) -> None:
  """Checks columns of sequences if ``level`` says so, else of tokens and turns. Others are kept."""
  sizes: dict[str, tuple[int, str]] = {}
  for name, values in columns.items():
    column = find_column(name)
    if column is None:
      continue
    if column.core or (column.level == "sequence") != (level == "sequence"):
      place = "a field" if column.core else f"a column of a {column.level}"
      raise TrajectoryError(f"{where}: {name} is {place} and does not stand in these columns.")
    try:
      column.check(values, rows if column.level == level else ())
    except ColumnError as error:
      reason = f", as there are {rows[0]} token ids" if column.level == "token" else ""
      raise TrajectoryError(f"{where}: {error}{reason}.") from error
    missing = [other for other in column.together if other not in columns]
    if missing:
      raise TrajectoryError(f"{where}: {name} stands without {', '.join(missing)}; allowed: both.")
    for size, got in zip(column.shape, values.shape[-len(column.shape) :], strict=False):
      known, other = sizes.setdefault(str(size), (got, name))
      if isinstance(size, str) and known != got:
        raise TrajectoryError(
          f"{where}: {name} has {size}={got} and {other} has {known}; allowed: one number."
        )


def _where(trajectory: Trajectory, index: int) -> str:
  step, task_id, sample = trajectory.address
  return f"trajectory (step={step}, task={task_id}, sample={sample}) segment {index}"
