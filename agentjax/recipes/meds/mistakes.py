r"""Memory of mistakes: a wrong answer that repeats an earlier mistake costs more (MEDS).

Every wrong episode has a feature vector (``layer_logits`` of its answer token). With C the
cluster of *earlier* wrong episodes of the same task that it falls into,

    penalty = min(alpha log(|C| + 1), beta),      reward <- reward - penalty.

An episode that falls into no cluster is a new mistake and costs nothing: noise is not a cluster.
Right episodes get no penalty and are not stored.

Reference: 2604.11297 (MEDS). Ours: features count as alike within ``radius``, both in clusters
(chains of features no further apart, at least two, instead of HDBSCAN, which treats a single
cluster as noise) and in the vote of the nearest neighbours (otherwise a new mistake would always
join the nearest cluster).
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jaxtyping import Float, Int

from agentjax.config import NonNegativeFloat, PositiveInt, Range, check
from agentjax.models import ModelConfig, Params
from agentjax.recipes.meds.logit_lens import layer_ends, layer_logits
from agentjax.sharding import split_rows, time_multiple
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training import processes
from agentjax.training.update import used_micro_batches
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.packing import PackedSequence, to_sequences
from agentjax.trajectory.record import Reward, Trajectory

NOISE = -1
PART = "repeated_mistake"  # name of the penalty among the parts of a reward


@dataclasses.dataclass(unsafe_hash=True)
class MedsConfig(SignalConfig):
  """Penalty on repeated mistakes.

  Attributes:
    alpha, beta: of the penalty. .1 and .2 for Qwen3-1.7B, .02 and .04 for Qwen3-8B.
    right_from: an episode with at least this reward is right. Ours.
    marker: text that the answer follows; features are of the first token after its last occurrence
      in what the policy wrote. Episodes without it are neither punished nor remembered.
    last_layers: how many of the model's last layers give a feature each; at most all.
    differences: features are the changes from layer to layer instead.
    neighbours: k, that vote on the cluster.
    radius: largest Euclidean distance of unit features that are alike, 0 to 2. Ours.
    most: mistakes remembered a task; the oldest go first. Ours.
  """

  alpha: NonNegativeFloat = 0.1
  beta: NonNegativeFloat = 0.2
  right_from: float = 1.0
  marker: str = "\\boxed{"
  last_layers: int = 14
  differences: bool = False
  neighbours: PositiveInt = 3
  radius: Annotated[float, Range(0, 2, above=True)] = 0.1
  most: PositiveInt = 512

  def validate(self, path: str = "config.rl.signals") -> None:
    super().validate(path)
    check(bool(self.marker), f"{path}.marker", self.marker, "a text of one character or more")
    least = 2 if self.differences else 1
    check(self.last_layers >= least, f"{path}.last_layers", self.last_layers, f">= {least}")

  def check_model(self, model: ModelConfig, path: str) -> None:
    """Features are of single blocks, so that no block may run more than once."""
    check(
      model.loop is None and model.second_pass is None,
      path,
      self,
      "none for a model whose blocks run more than once: its features are of single blocks",
    )

  def build(self, tools: SignalTools) -> RepeatedMistakes:
    """See ``SignalConfig.build``."""
    return RepeatedMistakes(self, tools)


def repetition_penalty(members: int, alpha: float, beta: float) -> float:
  """``min(alpha log(members + 1), beta)``: 0 for a mistake that is not similar to an earlier
  one."""
  return min(alpha * math.log(members + 1), beta)


def density_clusters(
  features: Float[np.ndarray, "points width"], radius: float
) -> Int[np.ndarray, " points"]:
  """Clusters of unit vectors: chains of neighbours within ``radius``; a point alone is NOISE.

  DBSCAN with two points a core (single linkage cut at the radius). Clusters are numbered by their
  first member.
  """
  labels = np.full(len(features), NOISE)
  near = _distances(features, features) <= radius
  np.fill_diagonal(near, False)
  found = 0
  for start in range(len(features)):
    if labels[start] != NOISE or not near[start].any():
      continue
    front = np.zeros(len(features), bool)
    front[start] = True
    while front.any():
      labels[front] = found
      front = near[front].any(axis=0) & (labels == NOISE)
    found += 1
  return labels


class MistakeMemory:
  """Features of earlier mistakes, by task, in the order in which they were made."""

  def __init__(self, config: MedsConfig):
    self._config = config
    self._features: dict[str, np.ndarray] = {}  # float32 [n, width], of length 1

  def members(self, task: str, features: Float[np.ndarray, "new width"]) -> list[int]:
    """|C| of each: number of stored mistakes in its cluster. Does not store anything.

    The ``neighbours`` nearest remembered features vote with their clusters; those further away than
    ``radius``, or in no cluster, vote for none. If two clusters have the same number of votes, the
    nearer wins.
    """
    known = self._features.get(task)
    if known is None:
      return [0] * len(features)
    labels = density_clusters(known, self._config.radius)
    distances = _distances(_unit(features), known)
    counts = []
    for row in distances:
      nearest = np.argsort(row, kind="stable")[: self._config.neighbours]
      votes = [int(labels[i]) if row[i] <= self._config.radius else NOISE for i in nearest]
      label = max(votes, key=votes.count)  # the first, that is the nearest, of equals
      counts.append(0 if label == NOISE else int(np.count_nonzero(labels == label)))
    return counts

  def remember(self, task: str, features: Float[np.ndarray, "new width"]) -> None:
    """Adds mistakes of a task."""
    known = self._features.get(task)
    units = _unit(features)
    joined = units if known is None else np.concatenate([known, units])
    if len(joined):
      self._features[task] = joined[-self._config.most :]

  def penalties(self, tasks: Sequence[str], features: Sequence[np.ndarray]) -> list[float]:
    """Penalties of a batch's wrong episodes by the memory before the batch; then stores the
    episodes.

    Args:
      tasks: whose mistakes they are, in the order of addresses.
      features: [width] each.
    """
    by_task: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
      by_task.setdefault(task, []).append(i)
    result = [0.0] * len(tasks)
    for task, places in by_task.items():
      own = np.stack([features[i] for i in places])
      for i, count in zip(places, self.members(task, own), strict=True):
        result[i] = repetition_penalty(count, self._config.alpha, self._config.beta)
      self.remember(task, own)
    return result

  def get_state(self) -> dict[str, Any]:
    """JSON-able; what ``set_state`` takes."""
    return {
      task: [len(known), base64.b64encode(known.astype("<f4").tobytes()).decode()]
      for task, known in self._features.items()
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Restores the state of ``get_state``, bit for bit."""
    self._features = {
      task: np.frombuffer(base64.b64decode(data), "<f4").reshape(count, -1).astype(np.float32)
      for task, (count, data) in state.items()
    }


def answer_place(pieces: Sequence[bytes], marker: str) -> int | None:
  """Index of the token that holds the first byte after the last ``marker``; None without one.

  Args:
    pieces: the bytes of every token of a text, b"" for those that are no text.
    marker: see ``MedsConfig``.
  """
  text, wanted = b"".join(pieces), marker.encode()
  at = text.rfind(wanted)
  if at < 0 or at + len(wanted) >= len(text):
    return None
  ends = np.cumsum([len(piece) for piece in pieces])
  return int(np.searchsorted(ends, at + len(wanted), side="right"))


def _unit(features: np.ndarray) -> np.ndarray:
  wide = np.asarray(features, np.float64)
  sizes = np.linalg.norm(wide, axis=-1, keepdims=True)
  return (wide / np.where(sizes > 0, sizes, 1)).astype(np.float32)


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.linalg.norm(a[:, None].astype(np.float64) - b[None].astype(np.float64), axis=-1)


class RepeatedMistakes(Signal):
  """Changes the rewards of each step by the memory of earlier steps."""

  name = "repeated_mistakes"

  def __init__(self, config: MedsConfig, tools: SignalTools):
    model = tools.model
    self._config, self._bytes, self._mesh = config, tools.token_bytes, tools.mesh
    self._pack, self._rows = tools.pack, tools.rows
    self._memory = MistakeMemory(config)
    blocks = layer_ends(model.pattern)[-config.last_layers :]
    plain = dataclasses.replace(model, exact_chunk=0)
    self._logits = jax.jit(
      lambda params, ids, segments, positions, places: layer_logits(
        params, plain, ids, segments, positions, places, blocks
      )
    )

  def get_state(self) -> dict[str, Any]:
    return self._memory.get_state()

  def set_state(self, state: Any) -> None:
    self._memory.set_state(state)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    """The step's episodes with penalties on repeated mistakes, which it then remembers.

    A penalty is taken off ``reward`` and noted in ``reward_parts`` as "repeated_mistake". A filter
    of groups by the number of right answers must use the parts, not the shaped reward.

    Args:
      context: of the step.
      episodes: scored, in the order of addresses.

    Returns:
      Copies, and metrics: ``meds/wrong`` (share of the episodes that were wrong and had an answer),
      ``meds/repeated`` (share of those that were punished), ``meds/penalty`` (their mean penalty).
    """
    wrong, sequences, places = [], [], []
    for i, trajectory in enumerate(episodes):
      value = trajectory.reward.value
      masked = value is None or trajectory.status.masked or not trajectory.segments
      if masked or value >= self._config.right_from:  # type: ignore[operator]
        continue
      path, sequence = token_paths(trajectory)[-1], to_sequences([trajectory])[-1]
      pieces = [
        self._bytes[token] or b"" if own else b""
        for token, own in zip(path.token_ids, path.sampled, strict=True)
      ]
      place = answer_place(pieces, self._config.marker)
      if place:
        wrong.append(i)
        sequences.append(sequence)
        places.append(place)
    result = list(episodes)
    metrics = {"meds/wrong": len(wrong) / max(len(result), 1)}
    if not wrong:
      return result, metrics | {"meds/repeated": 0.0, "meds/penalty": 0.0}
    features = self._features(context.policy(), sequences, places)
    tasks = [f"{result[i].source}/{result[i].task_id}" for i in wrong]
    penalties = self._memory.penalties(tasks, list(features))
    for i, penalty in zip(wrong, penalties, strict=True):
      before = result[i]
      assert before.reward.value is not None
      result[i] = dataclasses.replace(
        before,
        reward=Reward(before.reward.value - penalty),
        reward_parts={**before.reward_parts, PART: Reward(-penalty)},
      )
    return result, metrics | {
      "meds/repeated": float(np.mean(np.array(penalties) > 0)),
      "meds/penalty": float(np.mean(penalties)),
    }

  def _features(
    self, policy: Params, sequences: Sequence[PackedSequence], places: Sequence[int]
  ) -> np.ndarray:
    """Float32 [wrong, layers], or one less where differences are taken."""
    batch = self._pack(sequences)
    numbers = np.asarray(batch.segment_ids)
    cells: dict[int, list[tuple[int, int]]] = {}  # of each row: sequence, place in the row
    for i, place in enumerate(places):
      row, start = (int(v[0]) for v in np.nonzero(numbers == i + 1))
      cells.setdefault(row, []).append((i, start + place))
    multiple = time_multiple(self._mesh)
    count = multiple
    while count < max(len(row) for row in cells.values()):
      count *= 2  # few shapes are ever compiled
    grid = np.zeros((len(numbers), count), np.int32)
    for row, found in cells.items():
      grid[row, : len(found)] = [place for _, place in found]
    given: Any = (batch.token_ids, batch.segment_ids, batch.positions, grid)
    given = split_rows(given, self._rows)
    values: np.ndarray | None = None
    with jax.set_mesh(self._mesh):
      for micro in range(used_micro_batches(batch.segment_ids, self._rows)):
        part = self._logits(policy, *(v[micro] for v in given))
        found_here = np.asarray(processes.local_copy(part))
        if values is None:
          values = np.zeros((len(places), found_here.shape[-1]), np.float32)
        for row, found in cells.items():
          if row // self._rows == micro:
            for column, (i, _) in enumerate(found):
              values[i] = found_here[row % self._rows, column]
    assert values is not None
    return np.diff(values, axis=1) if self._config.differences else values
