"""Packs sequences into batches of few different shapes, so that few programs are compiled."""

from __future__ import annotations

from collections.abc import Sequence

from agentjax.training.update import micro_rows
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import PackedSequence, pack, plan_rows


def sequence_places(count: int, expected: int) -> int:
  """Places for ``count`` sequences: ``expected`` times the least power of two that holds them."""
  places = max(expected, 1)
  while places < count:
    places *= 2
  return places


def pack_rows(
  sequences: Sequence[PackedSequence],
  *,
  row_length: int,
  rows: int,
  pad_id: int,
  expected: int,
  align: int = 1,
) -> Batch:
  """A batch on the host with whole micro-batches and places for sequences in few sizes.

  Args:
    sequences: in the order of the batch.
    row_length: tokens a row.
    rows: rows of a micro-batch.
    pad_id: id of padding.
    expected: sequences of a usual batch (``sequence_places``).
    align: every sequence starts at a multiple of it in its row.

  Raises:
    PackingError: as ``packing.pack``.
  """
  needed = plan_rows([len(s) for s in sequences], row_length, align).num_rows
  return pack(
    sequences,
    row_length=row_length,
    pad_id=pad_id,
    rows=micro_rows(needed, rows),
    max_sequences=sequence_places(len(sequences), expected),
    align=align,
  )
