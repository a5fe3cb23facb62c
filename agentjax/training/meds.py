"""MEDS in a run: features of wrong answers from the policy, and rewards shaped by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from agentjax.models import ModelConfig, Params, layer_ends, layer_logits
from agentjax.rewards.mistakes import MedsConfig, MistakeMemory, answer_place
from agentjax.sharding import time_multiple
from agentjax.training import processes
from agentjax.training.update import split_rows, used_micro_batches
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.packing import PackedSequence, to_sequences
from agentjax.trajectory.record import Reward, Trajectory

PART = "repeated_mistake"  # name of the penalty among the parts of a reward


class RepeatedMistakes:
  """Shapes the rewards of each step by the memory of the steps before (``rewards.mistakes``).

  Args:
    config: settings.
    model: the policy.
    token_bytes: bytes of every token, None for those that are no text.
    mesh: that of the updates.
    pack: rows of sequences.
    rows: rows a forward pass, of which a pack is a multiple.
  """

  def __init__(
    self,
    config: MedsConfig,
    model: ModelConfig,
    token_bytes: Sequence[bytes | None],
    mesh: jax.sharding.Mesh,
    pack: Callable[[Sequence[PackedSequence]], Batch],
    rows: int,
  ):
    self._config, self._bytes, self._mesh = config, token_bytes, mesh
    self._pack, self._rows = pack, rows
    self._memory = MistakeMemory(config)
    self.get_state, self.set_state = self._memory.get_state, self._memory.set_state
    blocks = layer_ends(model.pattern)[-config.last_layers :]
    plain = dataclasses.replace(model, exact_chunk=0)
    self._logits = jax.jit(
      lambda params, ids, segments, positions, places: layer_logits(
        params, plain, ids, segments, positions, places, blocks
      )
    )

  def shape(
    self, policy: Params, trajectories: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], dict[str, float]]:
    """The step's episodes with penalties on repeated mistakes, which it then remembers.

    A penalty is taken off ``reward`` and noted in ``reward_parts`` as "repeated_mistake". Whatever
    filters groups by how many of them were right must look at the parts, not at the shaped reward.

    Args:
      policy: as the step begins.
      trajectories: scored, in the order of addresses.

    Returns:
      Copies, and metrics: ``meds/wrong`` (share of the episodes that were wrong and had an answer),
      ``meds/repeated`` (share of those that were punished), ``meds/penalty`` (their mean penalty).
    """
    wrong, sequences, places = [], [], []
    for i, trajectory in enumerate(trajectories):
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
    result = list(trajectories)
    metrics = {"meds/wrong": len(wrong) / max(len(result), 1)}
    if not wrong:
      return result, metrics | {"meds/repeated": 0.0, "meds/penalty": 0.0}
    features = self._features(policy, sequences, places)
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
