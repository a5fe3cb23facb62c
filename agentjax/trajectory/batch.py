"""The one structure that reaches the device: packed rows, data a token and data a sequence."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax

Array = jax.Array


@flax.struct.dataclass
class Batch:
  """Packed rows. Everything per token is aligned with the token itself.

  ``behaviour_log_probs[b, t]`` is log p(token_ids[b, t] | earlier tokens of its sequence) and is 0
  on the first token of a sequence, whose weight is 0. Sequences are never split across rows.

  Attributes:
    token_ids: int32 [B, T].
    segment_ids: int32 [B, T], 0 on padding, else 1 + index of the sequence in the whole batch
      (the index into the [N] arrays below), so one array masks attention, resets recurrent state
      and groups tokens for reductions.
    positions: int32 [B, T], restart at 0 in every sequence.
    weights: float32 [B, T], loss weight of the token as a target; 0 on prompts, tools, padding.
    behaviour_log_probs, entropies: float32 [B, T], under the sampler, nats.
    versions: int32 [B, T], weight version that sampled the token, -1 elsewhere.
    turns: int32 [B, T], index of the model call in its sequence, -1 on padding.
    experts: uint8 or uint16 [B, T, routers, choices], what the sampler's routers chose (see
      ``trajectory.experts``); None where no sequence has any.
    branches: int32 [B, T], one positive id for each segment of a tree of episodes, the same on all
      its copies (see ``Trajectory``), 0 elsewhere; None where no sequence was branched.
    teacher_log_probs: float32 [B, T], as recorded in ``Segment``, NaN where not; None where no
      sequence has any.
    teacher_top_ids, teacher_top_log_probs: int32 and float32 [B, T, k], likewise, -1 and NaN.
    rewards: float32 [N]; 0 where not valid. valid: bool [N], False for invalid rewards and for
      unused sequence places.
    groups: int32 [N], group id for group statistics; -1 for unused places.
  """

  token_ids: Array
  segment_ids: Array
  positions: Array
  weights: Array
  behaviour_log_probs: Array
  entropies: Array
  versions: Array
  turns: Array
  rewards: Array
  valid: Array
  groups: Array
  experts: Array | None = None
  branches: Array | None = None
  teacher_log_probs: Array | None = None
  teacher_top_ids: Array | None = None
  teacher_top_log_probs: Array | None = None

  def unasked(self) -> Batch:
    """Without what teachers said of it."""
    return dataclasses.replace(
      self, teacher_log_probs=None, teacher_top_ids=None, teacher_top_log_probs=None
    )

  @property
  def num_sequences(self) -> int:
    """N, static: places for sequences, some of which may be unused."""
    return self.rewards.shape[0]
