"""Turns as stages with rewards: the columns, and the signal that computes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.objectives.segments import sequence_units, unit_min
from agentjax.signals.reward_parts import check_turn_rewards
from agentjax.signals.signal import BatchContext, Metrics, Result, Signal, StepContext
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column
from agentjax.trajectory.packing import PackedSequence, PackingError, at_turn_ends
from agentjax.trajectory.record import Trajectory

Array = jax.Array

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
    del networks
    check_stages(context.sequences, self._stages)
    rewards, known, stages = stage_rewards(batch, stages=self._stages)
    return Result({STAGE_REWARDS.name: rewards, STAGES_KNOWN.name: known, STAGES.name: stages})


def check_stages(sequences: Sequence[PackedSequence], stages: int) -> None:
  """Raises PackingError for a sequence with more turns than stages."""
  for sequence in sequences:
    last = int(sequence.turns[sequence.versions >= 0].max(initial=0))
    if last >= stages:
      raise PackingError(
        f"the sequence ({sequence.name}) has {last + 1} turns for {stages} stages."
      )


@functools.partial(jax.jit, static_argnames="stages")
def stage_rewards(batch: Batch, *, stages: int) -> tuple[Array, Array, Array]:
  """Turns as stages: float32 [N, stages] rewards, bool [N, stages] known, int32 [B, T] stages.

  N are the places of the batch. A sequence's last turn is the last stage, whatever its number, and
  has the sequence's reward. Earlier turns count from 0 and have their own rewards, if they were
  judged. Tokens that the policy did not draw have stage -1.

  Args:
    batch: with the column ``stage_paid``; it passes ``check_stages``.
    stages: at least as many as any sequence has turns.
  """
  drawn, turns = batch.versions >= 0, batch.turns
  units = sequence_units(batch.segment_ids)
  # A maximum as a minimum; whole numbers of this size are exact in float32.
  last = -unit_min(-turns.astype(jnp.float32), drawn.astype(jnp.float32), units)
  early = turns < last
  paid = batch.column(STAGE_PAID.name)
  judged = (batch.segment_ids > 0) & early & ~jnp.isnan(paid)
  cells = jnp.maximum(batch.segment_ids - 1, 0), jnp.where(judged, turns, 0)
  empty = jnp.zeros((batch.num_sequences, stages), jnp.float32)
  rewards = empty.at[cells].add(jnp.where(judged, paid, 0)).at[:, -1].set(batch.rewards)
  known = (empty > 0).at[cells].max(judged).at[:, -1].set(batch.valid)
  return rewards, known, jnp.where(drawn, jnp.where(early, turns, stages - 1), -1)
