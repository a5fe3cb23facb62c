"""Turns as stages with rewards: the columns, and the signal that computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentjax.signals.reward_parts import check_turn_rewards
from agentjax.signals.signal import BatchContext, Metrics, Result, Signal, StepContext
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column
from agentjax.trajectory.packing import PackedSequence, PackingError, at_turn_ends, repack
from agentjax.trajectory.record import Trajectory

STAGES = Column("stages", "int32", "Stage of the token; -1 outside all.", fill=-1, in_loss=False)
STAGE_REWARDS = Column(
  "stage_rewards",
  "float32",
  "Reward of each stage of the sequence.",
  shape=("stages",),
  level="sequence",
  in_loss=False,
)
STAGE_PAID = Column(
  "stage_paid",
  "float32",
  "What a turn was paid, on its last token.",
  fill=np.nan,
  in_loss=False,
)
STAGES_KNOWN = Column(
  "stages_known",
  "bool",
  "Whether each stage of the sequence has a reward.",
  shape=("stages",),
  fill=False,
  level="sequence",
  in_loss=False,
)


class StageRewards(Signal):
  """The reward of every stage, and the stage of every token.

  Args:
    part: of the reward, earned turn by turn.
    stages: at least as many as any episode has turns.
  """

  name = "stage_rewards"
  adds = (STAGE_REWARDS, STAGES_KNOWN, STAGES, STAGE_PAID)

  def __init__(self, part: str, stages: int):
    self._part, self._stages = part, stages

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    check_turn_rewards(episodes, (self._part,))
    paid = [(one, one.turn_rewards.get(self._part, ())) for one in episodes]
    return [at_turn_ends(one, STAGE_PAID.name, by_turn) for one, by_turn in paid], {}

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    del networks, batch
    rewards, known, stages = stage_rewards(context.sequences, self._stages, context.packed)
    return Result({STAGE_REWARDS.name: rewards, STAGES_KNOWN.name: known, STAGES.name: stages})


def stage_rewards(
  sequences: Sequence[PackedSequence], stages: int, batch: Batch
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Turns as stages: float32 [N, stages] rewards, bool [N, stages] known, int32 [B, T] stages.

  N are the places of the batch. A sequence's last turn is the last stage, whatever its number, and
  has the sequence's reward. Earlier turns count from 0 and have their own rewards, if they were
  judged. Tokens that the policy did not draw have stage -1.

  Args:
    sequences: what was packed, with the column ``stage_paid``.
    stages: at least as many as any sequence has turns.
    batch: of all ``sequences``.
  """
  rewards = np.zeros((batch.num_sequences, stages), np.float32)
  known, columns = np.zeros(rewards.shape, bool), []
  for i, sequence in enumerate(sequences):
    drawn = sequence.versions >= 0
    last = int(sequence.turns[drawn].max(initial=0))
    if last >= stages:
      raise PackingError(
        f"the sequence ({sequence.name}) has {last + 1} turns for {stages} stages."
      )
    columns.append(np.where(drawn, np.where(sequence.turns < last, sequence.turns, stages - 1), -1))
    paid = sequence.column(STAGE_PAID.name)
    judged = ~np.isnan(paid) & (sequence.turns < last)
    np.add.at(rewards[i], sequence.turns[judged], paid[judged])
    known[i, sequence.turns[judged]] = True
    rewards[i, -1], known[i, -1] = sequence.reward, sequence.valid
  return rewards, known, repack(columns, batch.segment_ids, fill=-1).astype(np.int32)
